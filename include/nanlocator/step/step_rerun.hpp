// Executes a bad step again with operators traced, so that its verdict names the operator.
//
// Every step: save, then the step itself (forward, backward, scans). If all ranks agree that it is
// bad, every rank calls `rerun_or_trace` before GradientLocator::conclude: generators, buffers and
// registered state are restored, forward and backward run again under an OperatorTrace, and the
// gradients' fingerprints of both passes are compared. Bad again: deterministic; each origin is
// replayed alone and kept as a bundle, and, if the integration supports it, one more pass keeps the
// module calls around the origins. Clean: a control pass without the trace, then "not reproduced".
// If operators used a transfer's memory before the program waited for it, or if the control pass
// was bad: two more passes in which each transfer is waited for at once. The findings go into the
// locator's ledger. Costs two to three steps, seldom more, only after a bad one.
//
// If a step cannot be executed again (no closure), steps are traced from then on, and the next bad
// one is reported. Thread: the training thread.
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
  no_pass,             // the start and end of forward and backward are unknown
  pass_has_ended,      // and its data are gone
  weights_have_moved,  // the bad tensors are the weights after the update
};

/// A step on whose finding all ranks have agreed.
struct BadStep {
  CanRerun can_rerun = CanRerun::yes;  // the same on every rank
  std::shared_ptr<StepPass> pass;      // the pass to execute again; else null
  std::string why_no_pass;             // for the note about it
  std::vector<GradientView> results;   // the bad tensors: gradients or updated parameters
  /// Keeps what this rank receives from collectives, if a peer asks; null if crossings are not
  /// watched.
  std::shared_ptr<BoundaryWatch> boundaries;
  std::vector<LossView> losses{};  // of the step itself
};

class StepRerun {
 public:
  /// `locator` must outlive it.
  explicit StepRerun(GradientLocator& locator);
  ~StepRerun();
  StepRerun(const StepRerun&) = delete;  // a step has one owner
  StepRerun& operator=(const StepRerun&) = delete;

  [[nodiscard]] StepState& state() noexcept;
  /// Call it first, and again after the parameters change; registered state stays.
  void set_framework(std::shared_ptr<Framework> framework);

  /// Call it before a step that can be executed again. Does nothing under RerunPolicy::never.
  void save();
  /// Finds the bad computation, as far as the locator's options and the step allow. Every rank
  /// calls it, before `conclude`. True, on all ranks alike, if the step was executed again and was
  /// clean: the gradients are those of the last pass, which ran untraced.
  bool rerun_or_trace(BadStep step);

  /// The error that ended this rank's latest re-run, unless another rank's failure caused it; null
  /// otherwise, and after it has been taken.
  [[nodiscard]] std::exception_ptr take_error() noexcept;

  /// True during a pass of the re-run.
  [[nodiscard]] bool is_running() const noexcept;
  /// Scans gradients of the running pass, if its owner sees them at more than one phase (before and
  /// after a collective). If none is of the framework's `gradient_phase`, its `gradients` are
  /// scanned when the pass ends. Only while `is_running`.
  void scan(Phase phase, std::uint64_t group, std::string_view role,
            std::span<const GradientView> views);
  /// The same for gradients that the owner is about to change (a clip): the pass is explained by
  /// those that were bad before.
  void scan_before_change(std::span<const GradientView> views);
  /// The same for the norm from a clip: a pass with a non-finite one is bad.
  void set_gradient_norm(double norm);
  /// The pass will not end with the gradients that the owner has scanned (zero_grad).
  void forget_scans() noexcept;

  /// Traces steps from now on. `rerun_or_trace` calls it for a step that cannot be executed again,
  /// and stops tracing at the next bad step, except at Level::operators.
  void trace_from_now_on();
  void stop_tracing() noexcept;
  [[nodiscard]] bool is_tracing() const noexcept;
  /// While tracing: what made these losses and the gradients of `results` bad, for a rank that ends
  /// alone. Runs no collective.
  void explain(std::span<const LossView> losses, const std::vector<GradientView>& results);
  /// While tracing: forgets the previous step, or a forward outside a step.
  void begin_pass();
  /// The optimizer's own operators begin: traced if updated parameters are scanned.
  void begin_update();
  void end_update();

  /// Repeats a good step (RerunPolicy::always). Returns the number of gradients on this rank whose
  /// bits differ. Every rank calls it equally often.
  [[nodiscard]] std::int64_t compare(std::shared_ptr<StepPass> pass);

 private:
  [[nodiscard]] bool run_again();

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace nanlocator::inline step_room
