// Sees every dispatched operator of forward and backward, on all threads, and reports where NaN or
// Inf was born.
//
//     nanlocator::OperatorTrace trace;
//     trace.declare(*model);
//     auto loss = model->forward(batch);
//     loss.backward();
//     for (const auto& birth : trace.explain({loss}, gradients).births) ...
//
// A live trace scans values between operators, and waits for the device to do so; it is therefore
// used in a re-run or on request (`level="operators"`). It changes no value. Outputs are always
// scanned, inputs only if an output is bad. docs/causes.md has the rules of a birth.
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

/// Two operators that used the same memory in a pass: one of the step, and one of another thread of
/// the program, which wrote it.
struct ThreadOrder {
  struct Place {
    std::string op;
    ProgramCode::Position line;
    int execution = 0;  // index of this operator's execution at this line, in the pass
    bool is_steps = false;
    bool is_write = false;
    std::string module;  // "" if no module has been entered
    Phase phase = Phase::forward;
  };
  Place first, second;     // in observed order
  UnorderedAccess access;  // the same as a ledger's record
};

struct TraceOptions {
  /// Keep the calls of births, for bundles and replay; tensors that an operator writes are cloned
  /// before it runs. Off: births have no `call`.
  bool keep_calls = true;
  /// Limit of host and device memory for kept calls; later births are kept without their call.
  std::uint64_t kept_bytes = std::uint64_t{4} << 30;
  /// Source of the program lines that births come from. Null in C++ programs: births have no lines.
  std::shared_ptr<ProgramCode> program_code;
  int threads = 1;  // for scans in host memory
  /// The value to fill fresh memory with. NaN makes a read of unwritten memory a birth of kind
  /// unwritten. Empty: memory stays as allocated.
  std::optional<double> fresh_memory;
  bool follows_threads = false;  // for thread_orders
  /// Once in the pass, the first of these waits at most 0.5 s for the second.
  std::optional<ThreadOrder> reordered;
};

/// A tensor's role before the pass. A gradient (name: its parameter's) counts as memory without
/// values, to which kernels off the dispatcher may add a parameter's gradient.
enum class DeclaredAs : std::uint8_t { parameter, buffer, data, gradient };

/// For a weight, buffer or data, `sighting.parameter` is the declared name and the stats cover the
/// whole tensor; for an opaque birth, `sighting.op` is the frame that computed it; for memory, it
/// is the operator that wrote it last.
struct TracedBirth {
  Birth birth;                       // the caller fills in sighting.iteration, bundle and replay
  std::optional<OperatorCall> call;  // of an operator, if it was kept
  c10::Backtrace cpp_stack;          // of that call; reading it looks up symbols
};

struct Explanation {
  /// Births that reached a bad loss, or, if every loss is finite, a bad gradient; with their
  /// ancestors. In execution order; Birth::parent is an index into this list.
  std::vector<TracedBirth> births;
  std::int64_t masked = 0;         // births that reached neither: masks, padding
  std::int64_t operators = 0;      // calls since begin_pass
  std::vector<std::string> notes;  // what could not be seen or kept
};

class OperatorTrace {
 public:
  /// Starts observing. One per process at a time: throws UsageError for a second.
  explicit OperatorTrace(TraceOptions options = {});
  ~OperatorTrace();
  OperatorTrace(const OperatorTrace&) = delete;  // registers callbacks with its address
  OperatorTrace& operator=(const OperatorTrace&) = delete;

  struct Impl;  // src/operators

  /// Names a tensor that exists before the pass, and recognises it by its storage from then on. If
  /// it is bad, reading it makes a birth of kind weight, buffer or data. A parameter "a.b.weight"
  /// also assigns module "a.b" to operators that read it while no module is entered. Keeps no
  /// tensor alive.
  void declare(const at::Tensor& tensor, DeclaredAs as, std::string name);
  /// Declares every parameter and buffer of `model` by its name there.
  void declare(const torch::nn::Module& model);

  /// Forgets everything but the declarations.
  void begin_pass();

  /// Gives later births this phase, without a module: Phase::params_after while the optimizer
  /// steps. nullopt: forward, loss or backward, as autograd and the modules show.
  void enter_phase(std::optional<Phase> phase);

  /// Scans `losses` and `gradients` (name: the parameter's) and traces bad ones back. A bad
  /// gradient without an explanation is a birth of kind memory with the parameter's name: no
  /// operator of this pass wrote it bad. Call it after backward, from any thread.
  [[nodiscard]] Explanation explain(std::span<const NamedTensor> losses,
                                    std::span<const NamedTensor> gradients);

  /// The same for a pass without a bad result on this rank: what it has sent to one other rank,
  /// where it may have had consequences. An activation that the rank's own backward masks, for
  /// example. A collective's input is none, as a program may broadcast what nobody uses.
  [[nodiscard]] Explanation explain_sent();

  /// Operators of this pass that used a transfer's memory (see Transfer) before the program waited
  /// for it. Each operator and place appears once, in the order of first occurrence.
  [[nodiscard]] std::vector<UnorderedAccess> unordered_accesses() const;
  /// True if any operator of this pass ran during a transfer.
  [[nodiscard]] bool has_overlap() const noexcept;
  /// True if one ran during a transfer that uses this tensor's memory.
  [[nodiscard]] bool was_in_transfer(const at::Tensor& tensor) const;

  /// Pairs of operators, one of the step and one of another thread of the program, that used the
  /// same memory in this pass (`follows_threads`). The trace cannot see whether one waits for the
  /// other; see `reordered`.
  [[nodiscard]] std::vector<ThreadOrder> thread_orders() const;
  /// True if the two operators of `reordered` ran in the other order, so the program does not order
  /// them.
  [[nodiscard]] bool has_reordered() const noexcept;

  /// Suspends and resumes observation, for work outside training (own scans, logging).
  void pause() noexcept;
  void resume() noexcept;

 private:
  std::unique_ptr<Impl> impl_;
};

/// The program passes these tensors to a model. A bad tensor that no operator of the pass wrote,
/// and that a module reads, is data if it is among them (or if nothing was passed to a model: a C++
/// program); otherwise the module keeps it. `is_all`: false if the arguments may hold further
/// tensors, which cannot be found; then it stays data. Does nothing without a trace. Any thread.
void note_model_inputs(std::span<const at::Tensor> inputs, bool is_all);

}  // namespace nanlocator::inline operators_room
