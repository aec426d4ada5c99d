// A framework as the engine sees it: the contract of an integration.
//
// An integration derives a Framework, which holds no state of a step, and a StepPass for each
// forward and backward that can be executed again. StepDriver and StepRerun call them; in Python
// they are `nanlocator.driver.Adapter` and `Pass` (integrations/bindings/framework.cpp). A method
// with a default is an optional capability: a framework that has it overrides it, on all ranks
// alike.
//
// Thread: the training thread, unless a method says otherwise. Streams: the current ones. Errors:
// an exception ends the call of StepDriver that led to it; within a pass of a re-run it ends that
// pass like an error of the step, and the verdict says so.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "nanlocator/gradients/gradient_scanner.hpp"
#include "nanlocator/map/parameter_map.hpp"
#include "nanlocator/operators/operator_trace.hpp"
#include "nanlocator/record/bundle.hpp"
#include "nanlocator/replay/kernel_replay.hpp"
#include "nanlocator/verdict/verdict.hpp"

namespace nanlocator::inline step_room {

/// A loss scaler that will skip this step's update because of an overflow.
struct LossScale {
  double scale = 1;
  bool falls_on_overflow = false;  // it lowers the scale afterwards: a routine overflow
  bool is_in_gradients = true;     // the scanned gradients are multiplied by it
};

/// The current model, for a ModuleWatch's births and for a new trace.
struct ModelTensors {
  std::vector<NamedTensor> parameters;
  std::vector<NamedTensor> buffers;  // includes tensors that modules hold as plain attributes
};

/// Current optimizer state of a parameter.
struct OptimizerTensor {
  std::int64_t parameter = 0;  // id
  std::string name;            // "exp_avg"; "main_param": its own copy of the weight
  at::Tensor tensor;
  std::int64_t element_offset = 0;  // of tensor's first element in the flattened parameter (shards)
};

class Framework {
 public:
  Framework() = default;
  virtual ~Framework() = default;
  Framework(const Framework&) = delete;  // the engine keeps one, shared with its abort thread
  Framework& operator=(const Framework&) = delete;

  // --- tensors ---

  /// This rank's current parameters. Called first, and again after they change
  /// (StepDriver::take_parameters_again).
  [[nodiscard]] virtual ParameterMap parameter_map() = 0;
  /// The phase of `gradients` at the end of a pass; called once per map.
  [[nodiscard]] virtual Phase gradient_phase() { return Phase::grad_local; }
  /// The current gradients; called in every step.
  [[nodiscard]] virtual std::vector<GradientView> gradients() = 0;
  /// The weights with the same ids; empty if they are no longer the ones that the step used.
  [[nodiscard]] virtual std::vector<GradientView> weights() = 0;
  /// The current parameters; the program owns them.
  [[nodiscard]] virtual std::vector<NamedTensor> parameters() = 0;
  /// The current buffers; called in every step that can be executed again.
  [[nodiscard]] virtual std::vector<NamedTensor> buffers() { return {}; }
  [[nodiscard]] virtual ModelTensors model_tensors() { return {parameters(), buffers()}; }
  /// State of the parameters with these ids, between updates.
  [[nodiscard]] virtual std::vector<OptimizerTensor> optimizer_state(
      const std::vector<std::int64_t>& /*ids*/) {
    return {};
  }

  // --- a bad step ---

  /// True if gradients may be multiplied by a loss scale. `loss_scale` is nullopt if the scaler has
  /// seen no overflow.
  [[nodiscard]] virtual bool has_loss_scaler() { return false; }
  [[nodiscard]] virtual std::optional<LossScale> loss_scale() { return std::nullopt; }
  /// True if the framework itself skips an update with bad gradients.
  [[nodiscard]] virtual bool skips_bad_updates() { return false; }
  /// Why a step has no pass, a clause: "step() was called without a closure".
  [[nodiscard]] virtual std::string why_no_pass() { return {}; }
  /// True if later steps may be traced when one has no pass.
  [[nodiscard]] virtual bool can_trace_later_steps() { return true; }
  /// Called for each verdict, including partial ones of this rank alone.
  virtual void on_verdict(const Verdict& /*verdict*/) {}

  // --- its re-run ---

  /// The program's lines, for a trace (TraceOptions); null if unknown.
  [[nodiscard]] virtual std::shared_ptr<ProgramCode> program_code() { return nullptr; }

  /// True if the next three methods are implemented (C++ programs have no module calls).
  [[nodiscard]] virtual bool keeps_calls() { return false; }
  /// Calls `run`, which executes the step once more. Keeps the surrounding module call of each of
  /// these births, made by operators or hooks, and the kernel calls among them (BirthKind::kernel,
  /// or left unwritten).
  virtual void keep_calls(const std::vector<Birth>& /*births*/, const std::function<void()>& run) {
    run();
  }
  /// Adds the kept module call to the birth's bundle.
  virtual void add_module_call(const Birth& /*birth*/, Bundle& /*bundle*/,
                               StorageCollector& /*storages*/, BundleContents& /*contents*/) {}
  /// The kept kernel call.
  [[nodiscard]] virtual std::optional<KeptKernelCall> take_kernel_call(const Birth& /*birth*/) {
    return std::nullopt;
  }

  /// True if torch.compile has compiled parts of the program.
  [[nodiscard]] virtual bool has_compiled_parts() { return false; }
  /// Switches eager execution of the compiled parts on or off.
  virtual void set_eager(bool /*is_eager*/) {}

  /// True if `set_serialised` is implemented.
  [[nodiscard]] virtual bool can_serialise() { return false; }
  /// Switches serialisation on or off: each transfer between ranks is waited for at its start, each
  /// operator on a GPU at its end.
  virtual void set_serialised(bool /*is_serialised*/) {}

  /// True if a GPU with streams is in use that `sanitise_streams` can watch.
  [[nodiscard]] virtual bool has_streams() { return false; }
  /// Calls `run`, a pass, under PyTorch's stream sanitizer and returns its findings.
  [[nodiscard]] virtual std::vector<UnorderedAccess> sanitise_streams(
      const std::function<void()>& run) {
    run();
    return {};
  }

  /// Aborts the collectives in which this process waits, on any thread and in any group, if a
  /// re-run cannot be completed. The communicator aborts its own group in any case. Thread: a
  /// separate one, which may never return. Must not throw.
  virtual void abort_collectives() noexcept {}
};

/// A step's forward and backward, which can be executed again. Kept until the pass has been judged.
class StepPass {
 public:
  StepPass() = default;
  virtual ~StepPass() = default;
  StepPass(const StepPass&) = delete;  // one step's data
  StepPass& operator=(const StepPass&) = delete;

  /// Executes it on the same data; returns the losses. May throw.
  [[nodiscard]] virtual std::vector<NamedTensor> run() = 0;
  /// Resets the gradients to their state before the first execution: undefined, or zero.
  virtual void clear_gradients() = 0;
  /// Sentences about data that the pass has written to, so that a re-run sees it changed.
  [[nodiscard]] virtual std::vector<std::string> changed_data() { return {}; }
  /// True if the program reduced gradients by collectives of its own, which `run` leaves out.
  [[nodiscard]] virtual bool leaves_out_reduction() { return false; }
  /// What code that a re-run calls may read and nobody has compared with the first pass, as a
  /// clause; "" if there is nothing. Asked after a re-run.
  [[nodiscard]] virtual std::string unseen_reads() { return {}; }
  /// True if a re-run calls code that torch.compile has made also where it is to run eagerly.
  [[nodiscard]] virtual bool repeats_compiled_code() { return false; }
  /// Why it cannot be executed again, a clause ("a tensor ... was overwritten"); "" if it can.
  /// Called if the pass is bad. nullopt, on all ranks alike: passes of this kind always can.
  [[nodiscard]] virtual std::optional<std::string> obstacle() { return std::nullopt; }
  /// The data that the pass has drawn.
  [[nodiscard]] virtual std::vector<Microbatch> microbatches() { return {}; }
};

}  // namespace nanlocator::inline step_room
