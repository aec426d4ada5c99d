// What a framework is to the engine: the contract of an integration, written once.
//
// An integration derives a Framework, which holds nothing of a step, and a StepPass for each
// forward and backward that can be executed again. StepDriver and StepRerun call them; in Python
// they are `nanlocator.driver.Adapter` and `Pass` (integrations/bindings/framework.cpp). What has a
// default is a capability that a framework may lack: one that has it overrides it, on all ranks
// alike.
//
// Thread: the training thread, except where a method says otherwise. Streams: the current ones.
// Errors: what a method throws ends the call of StepDriver that asked; within a pass of a re-run it
// ends that pass, as an error of the step would, and the verdict says so.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "nanlocator/gradients/gradient_scanner.hpp"
#include "nanlocator/locate/verdict.hpp"
#include "nanlocator/map/parameter_map.hpp"
#include "nanlocator/operators/operator_trace.hpp"
#include "nanlocator/record/bundle.hpp"
#include "nanlocator/replay/kernel_replay.hpp"

namespace nanlocator::inline step_room {

/// A loss scaler that will leave this step's update out, as it has seen an overflow.
struct LossScale {
  double scale = 1;
  bool falls_on_overflow =
      false;                    // it will be lower afterwards: then the overflow was a routine one
  bool is_in_gradients = true;  // the gradients that are scanned are multiplied by it
};

/// The model as it is now, for a ModuleWatch's births and for a trace that is armed.
struct ModelTensors {
  std::vector<NamedTensor> parameters;
  std::vector<NamedTensor> buffers;  // and what modules hold as plain attributes
};

/// What an optimizer keeps of a parameter, as it is now.
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

  /// This rank's parameters as they are from now on; asked first, and again when they have changed
  /// (StepDriver::take_parameters_again).
  [[nodiscard]] virtual ParameterMap parameter_map() = 0;
  /// That `gradients` are of, when a pass has ended; asked once for each map.
  [[nodiscard]] virtual Phase gradient_phase() { return Phase::grad_local; }
  /// The gradients as they are now; in every step.
  [[nodiscard]] virtual std::vector<GradientView> gradients() = 0;
  /// The weights of the same ids: none where they are no longer those that the step has used.
  [[nodiscard]] virtual std::vector<GradientView> weights() = 0;
  /// As they are now; held by others.
  [[nodiscard]] virtual std::vector<NamedTensor> parameters() = 0;
  /// As they are now; in every step that can be executed again.
  [[nodiscard]] virtual std::vector<NamedTensor> buffers() { return {}; }
  [[nodiscard]] virtual ModelTensors model_tensors() { return {parameters(), buffers()}; }
  /// Of the parameters with these ids, between updates.
  [[nodiscard]] virtual std::vector<OptimizerTensor> optimizer_state(
      const std::vector<std::int64_t>& /*ids*/) {
    return {};
  }

  // --- a bad step ---

  /// Whether gradients may be multiplied by a loss scale; `loss_scale` is nullopt where the scaler
  /// has seen no overflow.
  [[nodiscard]] virtual bool has_loss_scaler() { return false; }
  [[nodiscard]] virtual std::optional<LossScale> loss_scale() { return std::nullopt; }
  /// Whether the framework itself leaves out an update whose gradients are bad.
  [[nodiscard]] virtual bool skips_bad_updates() { return false; }
  /// Of a step without a pass, a clause: "step() was called without a closure".
  [[nodiscard]] virtual std::string why_no_pass() { return {}; }
  /// Whether a later step may be traced where one has no pass.
  [[nodiscard]] virtual bool can_trace_later_steps() { return true; }
  /// Each verdict as it comes, partial ones of this rank alone, too.
  virtual void on_verdict(const Verdict& /*verdict*/) {}

  // --- its re-run ---

  /// The lines of the program, for a trace (TraceOptions); null where they are not known.
  [[nodiscard]] virtual std::shared_ptr<ProgramCode> program_code() { return nullptr; }

  /// Whether the three below do something (C++ programs have no module calls).
  [[nodiscard]] virtual bool keeps_calls() { return false; }
  /// Calls `run`, which executes the step once more, and keeps for each of these births, made by
  /// operators or hooks, the call of the module around it, and the kernels' calls among them
  /// (BirthKind::kernel, or left unwritten).
  virtual void keep_calls(const std::vector<Birth>& /*births*/, const std::function<void()>& run) {
    run();
  }
  /// Puts the kept call of a module into the birth's bundle.
  virtual void add_module_call(const Birth& /*birth*/, Bundle& /*bundle*/,
                               StorageCollector& /*storages*/, BundleContents& /*contents*/) {}
  /// The kept call of a kernel.
  [[nodiscard]] virtual std::optional<KeptKernelCall> take_kernel_call(const Birth& /*birth*/) {
    return std::nullopt;
  }

  /// Whether the program has parts that torch.compile has compiled.
  [[nodiscard]] virtual bool has_compiled_parts() { return false; }
  /// They are executed by their operators from now on, or no more.
  virtual void set_eager(bool /*is_eager*/) {}

  /// Whether `set_serialised` does something.
  [[nodiscard]] virtual bool can_serialise() { return false; }
  /// Each transfer between ranks is waited for where it begins, and each operator on a GPU where it
  /// ends, from now on or no more.
  virtual void set_serialised(bool /*is_serialised*/) {}

  /// Whether a GPU with streams is in use, and `sanitise_streams` can watch them.
  [[nodiscard]] virtual bool has_streams() { return false; }
  /// Calls `run`, a pass, under PyTorch's stream sanitizer and gives what that has found.
  [[nodiscard]] virtual std::vector<UnorderedAccess> sanitise_streams(
      const std::function<void()>& run) {
    run();
    return {};
  }

  /// Ends the collectives in which this process waits, on whichever thread and in whichever groups,
  /// where a re-run cannot be completed; the communicator's own group is aborted in any case.
  /// Thread: one of its own, which may never come back. Must not throw.
  virtual void abort_collectives() noexcept {}
};

/// Forward and backward of one step, as they can be executed again. Kept until the pass has been
/// judged.
class StepPass {
 public:
  StepPass() = default;
  virtual ~StepPass() = default;
  StepPass(const StepPass&) = delete;  // one step's data
  StepPass& operator=(const StepPass&) = delete;

  /// From the same data; returns the losses. May throw.
  [[nodiscard]] virtual std::vector<NamedTensor> run() = 0;
  /// Sets the gradients to what they were before the first time: undefined, or zero.
  virtual void clear_gradients() = 0;
  /// Sentences about its data that it has written to, so that a re-run finds them changed.
  [[nodiscard]] virtual std::vector<std::string> changed_data() { return {}; }
  /// Why it cannot be executed again, a clause ("a tensor ... was overwritten"); "" where it can.
  /// Asked where the pass is bad; nullopt, on all ranks alike: passes of this kind always can.
  [[nodiscard]] virtual std::optional<std::string> obstacle() { return std::nullopt; }
  /// What the pass has drawn.
  [[nodiscard]] virtual std::vector<Microbatch> microbatches() { return {}; }
};

}  // namespace nanlocator::inline step_room
