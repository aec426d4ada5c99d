// Sees every dispatched operator of forward and backward, on all threads, and reports where NaN or
// Inf was born.
//
//     nanlocator::OperatorTrace trace;
//     trace.declare(*model);
//     auto loss = model->forward(batch);
//     loss.backward();
//     for (const auto& birth : trace.explain({loss}, gradients).births) ...
//
// While one lives it scans values between operators (on a device: it waits), so it is armed for
// a re-run or on request (`level="operators"`). It changes no value. Outputs are scanned always,
// inputs only where an output is bad. The rules of a birth are in docs/causes.md.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Backtrace.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "nanlocator/operators/program_code.hpp"
#include "nanlocator/record/birth.hpp"
#include "nanlocator/record/unordered_access.hpp"
#include "nanlocator/replay/operator_call.hpp"
#include "nanlocator/tensor/named_tensor.hpp"

namespace torch::nn {
class Module;
}

namespace nanlocator::inline operators_room {

/// Two operators that used the same memory in a pass, one of the step and one of another thread of
/// the program, which wrote it.
struct ThreadOrder {
  struct Place {
    std::string op;
    ProgramCode::Position line;
    int execution = 0;  // of this operator at this line, in the pass
    bool is_steps = false;
    bool is_write = false;
    std::string module;  // "" where none has been entered
    Phase phase = Phase::forward;
  };
  Place first, second;     // as they came
  UnorderedAccess access;  // the same in the ledger's words
};

struct TraceOptions {
  /// Keep the calls of births, for bundles and replay: tensors that an operator writes are cloned
  /// before it runs. Off: births have no `call`.
  bool keep_calls = true;
  /// Host and device memory that kept calls may hold; later births are kept without their call.
  std::uint64_t kept_bytes = std::uint64_t{4} << 30;
  /// Gives the lines of the program that births come from. Null in C++ programs: births have none.
  std::shared_ptr<ProgramCode> program_code;
  int threads = 1;  // for scans in host memory
  /// What tensors hold that an operator has allocated and nobody has written. NaN: births of kind
  /// unwritten. Empty: whatever lies there.
  std::optional<double> fresh_memory;
  bool follows_threads = false;  // for thread_orders
  /// Once in the pass the first of these waits for the second: 0.5 s at most.
  std::optional<ThreadOrder> reordered;
};

/// What a tensor was before the pass. A gradient (name: its parameter's) has no values of its own
/// then: it is the memory that kernels off the dispatcher may add a parameter's gradient to.
enum class DeclaredAs : std::uint8_t { parameter, buffer, data, gradient };

/// Of a weight, buffer or data, `sighting.parameter` is the declared name and the stats are the
/// whole tensor's; of an opaque birth, `sighting.op` is the frame it was computed in; of memory,
/// the operator that wrote it last.
struct TracedBirth {
  Birth birth;                       // sighting.iteration, bundle and replay are left to the caller
  std::optional<OperatorCall> call;  // of an operator, where it was kept
  c10::Backtrace cpp_stack;          // of that call; symbols are looked up when it is read
};

struct Explanation {
  /// Births that reached a bad loss, or where every loss is finite a bad gradient, with their
  /// ancestors; in execution order, Birth::parent pointing into this list.
  std::vector<TracedBirth> births;
  std::int64_t masked = 0;         // births that reached neither: masks, padding
  std::int64_t operators = 0;      // calls seen since begin_pass
  std::vector<std::string> notes;  // what it could not see or keep
};

class OperatorTrace {
 public:
  /// Observes from now on. One at a time per process: throws UsageError for a second.
  explicit OperatorTrace(TraceOptions options = {});
  ~OperatorTrace();
  OperatorTrace(const OperatorTrace&) = delete;  // registers callbacks with its address
  OperatorTrace& operator=(const OperatorTrace&) = delete;

  struct Impl;  // src/operators

  /// Names a tensor that exists before the pass. Its storage is known by it from then on; a bad one
  /// becomes a birth of kind weight, buffer or data where it is read. A parameter "a.b.weight" also
  /// names the module "a.b" of operators that read it where no module was entered. Keeps no tensor
  /// alive.
  void declare(const at::Tensor& tensor, DeclaredAs as, std::string name);
  /// Every parameter and buffer of `model` by its name there.
  void declare(const torch::nn::Module& model);

  /// Forgets everything but the declarations.
  void begin_pass();

  /// Births are of this phase from now on, without a module: Phase::params_after while the
  /// optimizer steps. nullopt: forward, loss or backward, as autograd and the modules show.
  void enter_phase(std::optional<Phase> phase);

  /// Scans `losses` and `gradients` (name: the parameter's) and follows the bad ones back. A bad
  /// gradient that nothing explains is a birth of kind memory with the parameter's name: no
  /// operator of this pass wrote it bad. Call it after backward, from any thread.
  [[nodiscard]] Explanation explain(std::span<const NamedTensor> losses,
                                    std::span<const NamedTensor> gradients);

  /// Operators of this pass that used memory of a transfer (see Transfer) which nobody had waited
  /// for; the same one at the same place once, in the order of the first time.
  [[nodiscard]] std::vector<UnorderedAccess> unordered_accesses() const;
  /// Whether any operator of this pass ran while a transfer was under way.
  [[nodiscard]] bool has_overlap() const noexcept;
  /// Whether one did while a transfer was under way that uses this tensor's memory.
  [[nodiscard]] bool was_in_transfer(const at::Tensor& tensor) const;

  /// Operators of the step, and of other threads of the program, that used the same memory in this
  /// pass (`follows_threads`). Whether one of them waits for the other no trace can see: see
  /// `reordered`.
  [[nodiscard]] std::vector<ThreadOrder> thread_orders() const;
  /// Whether the two of `reordered` came in the other order: the program keeps none.
  [[nodiscard]] bool has_reordered() const noexcept;

  /// Stops and goes on observing, for work that is not training's (own scans, logging).
  void pause() noexcept;
  void resume() noexcept;

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace nanlocator::inline operators_room
