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
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "nanlocator/step/framework.hpp"
#include "nanlocator/step/gradient_locator.hpp"
#include "nanlocator/step/step_state.hpp"

namespace nanlocator::inline watch_room {
class BoundaryWatch;
}  // namespace nanlocator::inline watch_room

namespace nanlocator::inline step_room {

enum class CanRerun {
  yes,
  no_pass,             // nobody said where forward and backward begin and end
  pass_has_ended,      // and its data are gone
  weights_have_moved,  // what is bad are the weights after the update
};

/// A step that is bad, as all ranks know.
struct BadStep {
  CanRerun can_rerun = CanRerun::yes;  // the same on every rank
  std::shared_ptr<StepPass> pass;      // that can be executed again; else null
  std::string why_no_pass;             // for the note that says so
  std::vector<GradientView> results;   // what is bad, gradients or updated parameters
  /// What collectives give this rank is kept by it, if a peer asks; null where no crossings are
  /// watched.
  std::shared_ptr<BoundaryWatch> boundaries;
};

class StepRerun {
 public:
  /// `locator` must outlive it.
  explicit StepRerun(GradientLocator& locator);
  ~StepRerun();
  StepRerun(const StepRerun&) = delete;  // a step has one owner
  StepRerun& operator=(const StepRerun&) = delete;

  [[nodiscard]] StepState& state() noexcept;
  /// Before anything else, and again where the parameters change; registered state stays.
  void set_framework(std::shared_ptr<Framework> framework);

  /// Before a step that can be executed again. Does nothing under RerunPolicy::never.
  void save();
  /// Finds what was being computed, as far as the locator's options and the step allow. Every rank
  /// calls it, before `conclude`. True, on all ranks alike, where the step was executed again and
  /// came out clean: the gradients are those of the last pass, which ran untraced.
  bool rerun_or_trace(BadStep step);

  /// What ended this rank's latest re-run, where it was no failure of another rank; null otherwise,
  /// and when it was taken.
  [[nodiscard]] std::exception_ptr take_error() noexcept;

  /// A pass of the re-run runs now.
  [[nodiscard]] bool is_running() const noexcept;
  /// Gradients of the pass that runs now, where its owner sees them at more than one phase (before
  /// and after a collective); where none is of the framework's `gradient_phase`, its `gradients`
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
  [[nodiscard]] std::int64_t compare(std::shared_ptr<StepPass> pass);

 private:
  [[nodiscard]] bool run_again();

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace nanlocator::inline step_room
