// Executes a bad step again with operators traced, so that its verdict names the operator.
//
// Every step: save, the step itself (forward, backward, scans). Where all ranks have agreed that it
// is bad, every rank calls `rerun_or_trace` before GradientLocator::conclude: generators, buffers
// and registered state are restored, forward and backward run again under an OperatorTrace, and the
// gradients' fingerprints of both passes are compared. Bad again: deterministic, and each origin is
// replayed alone and kept as a bundle; where the integration can, one more pass keeps the module
// calls around the origins. Clean: a control pass without the trace, then "not reproduced". Where
// operators used memory of a transfer that nobody had waited for, or the control pass was bad: two
// more in which each transfer is waited for at once. What it found goes into the locator's ledger.
// Costs two to three steps, seldom more, only when one has failed.
//
// Where a step cannot be executed again (no closure), steps are traced from then on, and the next
// bad one is reported. Thread: the training thread.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "nanlocator/replay/kernel_replay.hpp"
#include "nanlocator/step/gradient_locator.hpp"
#include "nanlocator/step/step_state.hpp"
#include "nanlocator/trace/operator_trace.hpp"

namespace nanlocator::inline step_room {

/// How the owner of a training step executes it.
struct RerunnableStep {
  /// Forward and backward once more, from the same data; returns the losses. May throw.
  std::function<std::vector<NamedTensor>()> run;
  /// Sentences about data that a pass finds changed by the one before; may be empty.
  std::function<std::vector<std::string>()> changed_data;
  /// The gradients as they are now, and their phase when a pass has ended.
  std::function<std::vector<GradientView>()> gradients;
  Phase gradient_phase = Phase::grad_local;
  /// Puts the gradients where they were before the first pass: undefined, or zero.
  std::function<void()> clear_gradients;
  std::function<std::vector<NamedTensor>()> parameters;  // as they are now; held by others
  std::function<std::vector<NamedTensor>()> buffers;     // as they are now; may be empty
  /// Tensors that the model holds otherwise, as they are when a trace is armed; may be empty.
  std::function<std::vector<NamedTensor>()> attributes;
  /// See TraceOptions; may be empty.
  std::shared_ptr<ProgramCode> program_code;
  /// Calls `run`, which executes the step once more, and keeps for each of these births, made by
  /// operators or hooks, the call of the module around it; afterwards `add_module_call` puts it
  /// into a bundle. Both empty where the integration cannot (C++ programs have no module calls).
  std::function<void(const std::vector<Birth>&, const std::function<void()>& run)>
      keep_module_calls;
  std::function<void(const Birth&, Bundle&, StorageCollector&, BundleContents&)> add_module_call;
  /// The same of the kernels' calls among these births (BirthKind::kernel, or left unwritten); may
  /// be empty.
  std::function<std::optional<KeptKernelCall>(const Birth&)> take_kernel_call;
  /// Before and after that pass: keeps and gives what collectives give this rank, as the question
  /// asks. Empty where no crossings are watched.
  std::function<void(const PeerQuestion&)> keep_results;
  std::function<std::vector<CollectiveResult>()> take_results;
  /// Whether the program has parts that torch.compile has compiled, and how to have them executed
  /// by their operators from now on, or no more; both may be empty.
  std::function<bool()> has_compiled_parts;
  std::function<void(bool is_eager)> set_eager;
  /// Has each transfer between ranks waited for where it begins, and each operator on a GPU where
  /// it ends, from now on or no more; may be empty.
  std::function<void(bool is_serialised)> set_serialised;
  /// Whether a GPU with streams is in use; calls `run`, a pass, under PyTorch's stream sanitizer
  /// and gives what it has found. Both may be empty.
  std::function<bool()> has_streams;
  std::function<std::vector<UnorderedAccess>(const std::function<void()>& run)> sanitise_streams;
  /// Ends the collectives in which this process waits, on whichever thread and in whichever groups;
  /// called on another one, where a re-run cannot be completed. Empty: only the communicator's
  /// group is aborted.
  std::function<void()> abort_collectives;
};

enum class CanRerun {
  yes,
  no_pass,             // nobody said where forward and backward begin and end
  pass_has_ended,      // and its data are gone
  weights_have_moved,  // what is bad are the weights after the update
};

class StepRerun {
 public:
  /// `locator` must outlive it.
  explicit StepRerun(GradientLocator& locator);
  ~StepRerun();
  StepRerun(const StepRerun&) = delete;  // the step's functions belong to one owner
  StepRerun& operator=(const StepRerun&) = delete;

  [[nodiscard]] StepState& state() noexcept;
  /// Before anything else, and again where the parameters change; registered state stays.
  void set_step(RerunnableStep step);

  /// Before a step that can be executed again. Does nothing under RerunPolicy::never.
  void save();
  /// The step is bad, as all ranks know: finds what was being computed, as far as the locator's
  /// options allow and `can_rerun` says, the same on every rank. `results`: what is bad, gradients
  /// or updated parameters. `why_no_pass`: for the note that says so. Every rank calls it, before
  /// `conclude`. True, on all ranks alike, where the step was executed again and came out clean:
  /// the gradients are those of the last pass, which ran untraced.
  bool rerun_or_trace(CanRerun can_rerun, std::vector<GradientView> results,
                      std::string_view why_no_pass);

  /// What ended this rank's latest re-run, where it was no failure of another rank; null otherwise,
  /// and when it was taken.
  [[nodiscard]] std::exception_ptr take_error() noexcept;

  /// A pass of the re-run runs now.
  [[nodiscard]] bool is_running() const noexcept;
  /// Gradients of the pass that runs now, where its owner sees them at more than one phase (before
  /// and after a collective); where none is of `RerunnableStep::gradient_phase`, its `gradients`
  /// are scanned when the pass has ended. Only while `is_running`.
  void scan(Phase phase, std::uint64_t group, std::string_view role,
            std::span<const GradientView> views);
  /// The same for gradients that the owner is going to change (a clip): the pass is explained by
  /// those that were bad before.
  void scan_before_change(std::span<const GradientView> views);
  /// The same for the norm that a clip computes: a pass with an infinite one is bad.
  void set_gradient_norm(double norm);
  /// What the owner has scanned is no longer what the pass will end with (zero_grad).
  void forget_scans() noexcept;

  /// Traces steps from now on; `rerun_or_trace` of a step that cannot be executed again calls it,
  /// and ends it with the next bad step, but for Level::operators.
  void trace_from_now_on();
  void stop_tracing() noexcept;
  [[nodiscard]] bool is_tracing() const noexcept;
  /// A step has ended, or never was one: forgets it. While tracing.
  void begin_pass();
  /// The optimizer's own operators: traced where updated parameters are scanned.
  void begin_update();
  void end_update();

  /// Repeats a step that was good (RerunPolicy::always): the number of its gradients that come out
  /// with other bits on this rank. Every rank calls it equally often.
  [[nodiscard]] std::int64_t compare();

 private:
  [[nodiscard]] bool run_again();

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace nanlocator::inline step_room
