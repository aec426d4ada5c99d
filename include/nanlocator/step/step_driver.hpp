// One training step of any framework: scan, agree, re-run, decide. The only owner of a step's
// state.
//
// In: the framework's actions, in order, on every rank alike. Out: a Decision at each point where
// the ranks agree. A Framework (step/framework.hpp) provides the tensors to scan and the pass to
// execute again. A step takes one of two ways:
//
//   forward and backward can be executed again        they cannot
//     begin_pass(pass)                                  (forward, backward)
//       (forward, backward; scan, if the owner
//        sees gradients before the end)
//     end_pass(losses)   -> Decision                    scan_and_agree() -> Decision
//     begin_update, (the optimizer), end_update         the same
//     end_step()         -> Decision                    end_step()       -> Decision
//
// Exceptions: if a step ends early, destroy its Scope or call `abandon`; the next step starts anew.
// Healthy steps cost as much as GradientLocator and StepState. Thread: the training thread.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "nanlocator/files/names.hpp"
#include "nanlocator/step/framework.hpp"
#include "nanlocator/step/gradient_locator.hpp"
#include "nanlocator/step/step_state.hpp"

namespace nanlocator::inline watch_room {
class BoundaryWatch;
class ModuleWatch;
}  // namespace nanlocator::inline watch_room

namespace nanlocator::inline step_room {

/// The loop's next action, the same on every rank.
enum class Decision {
  proceed,    // nothing is bad, or the policy only reports
  recovered,  // continue with the gradients and losses of the clean re-run
  skip,       // skip this step's update
  stop,       // throw NonFiniteGradientError with `verdict()`; the step is over
};
[[nodiscard]] constexpr auto names_of(Decision) {
  return std::to_array<std::string_view>({"proceed", "recovered", "skip", "stop"});
}

class StepDriver {
 public:
  /// Throws the errors of GradientLocator's constructor, and UsageError for level operators if
  /// another optimizer of this process has it.
  StepDriver(std::shared_ptr<Framework> framework, LocatorOptions options,
             std::shared_ptr<Communicator> communicator);
  ~StepDriver();
  StepDriver(const StepDriver&) = delete;  // a step has one owner
  StepDriver& operator=(const StepDriver&) = delete;

  [[nodiscard]] GradientLocator& locator() noexcept;
  [[nodiscard]] const LocatorOptions& options() const noexcept;
  /// State that is restored for a re-run: generators and the framework's buffers; add more.
  [[nodiscard]] StepState& state() noexcept;
  /// Reads the framework's parameters again; call it between steps.
  void take_parameters_again();
  /// Sets the watch whose observations of a bad pass go into the ledger.
  void watch(std::shared_ptr<ModuleWatch> modules);
  void watch(std::shared_ptr<BoundaryWatch> boundaries);
  /// Removes watches and traces; gradients are still scanned. May be called within a step.
  void stop_observing() noexcept;
  /// Disables everything: every Decision is `proceed` from now on. May be called within a step.
  void close() noexcept;
  [[nodiscard]] bool is_closed() const noexcept;

  // --- the step ---

  /// Opens the step unless it is open; the first call of a step does so implicitly. `iteration`:
  /// the framework's count; without it steps are counted here, from 1.
  void begin(std::optional<std::int64_t> iteration = {});
  /// Forward begins. LBFGS has several passes per step; each is judged separately.
  void begin_pass(std::shared_ptr<StepPass> pass, std::optional<std::int64_t> iteration = {});
  [[nodiscard]] bool is_in_pass() const noexcept;
  /// True if the pass has been judged and the step is not over.
  [[nodiscard]] bool has_ended_pass() const noexcept;
  [[nodiscard]] bool is_rerunning() const noexcept;
  /// Scans gradients of the running pass: the step's own, or one of its re-run.
  void scan(Phase phase, std::uint64_t group, std::string_view role,
            std::span<const GradientView> views);
  /// Scans the framework's gradients before they are changed (a clip). Inside a pass they are
  /// judged at its end, and not scanned again.
  void scan_gradients();
  /// The update will no longer use the scanned gradients (zero_grad).
  void forget_gradients() noexcept;
  /// This step's backward adds to gradients that the latest bad step left behind. Within a pass.
  void note_left_gradients();
  /// The steps that begin from now on are numbered from `next` on, or, if that is held, all have
  /// this number. By default they are counted from 1. Throws UsageError below 0.
  void number_steps(std::int64_t next, bool is_held);
  /// Of the step that runs, or of the next one.
  [[nodiscard]] std::int64_t step_number() const noexcept;
  /// The program has computed something in this step that was not recorded.
  void note_unrecorded_beginning();
  /// While it is true on all ranks, the program itself throws away what this step has computed: a
  /// finding is reported, and the program goes on, whatever the policy.
  void set_discarded(bool is_discarded);
  /// The norm from the framework's clip. Set before the agreement, it is agreed on; set later, it
  /// must be the same on all ranks, and a non-finite one is judged at once.
  Decision set_gradient_norm(double norm);
  /// `may_go_on` will be called in some steps. On all ranks alike, before the first step.
  void allow_going_on() noexcept;
  /// Backward has ended: scans the gradients that the owner has not scanned, and agrees. True if
  /// any rank has bad gradients, and each has called this: they are judged in `end_pass`, which may
  /// come later; until then the pass goes on. `end_pass` has these losses. At most once per pass.
  [[nodiscard]] bool may_go_on(std::span<const LossView> losses);
  /// Backward has ended: scans the gradients that the owner has not scanned, agrees and judges.
  Decision end_pass(std::span<const LossView> losses);

  /// Agrees on the scanned gradients of a step without a pass; does nothing inside a pass.
  Decision agree();
  /// The same in two parts, for frameworks that wait later.
  void start_agreement();
  /// `overflow`: the framework has seen one and will skip the update; the same on all ranks.
  Decision finish_agreement(const std::optional<LossScale>& overflow = {});
  /// True between the two.
  [[nodiscard]] bool is_agreeing() const noexcept;
  /// Scans and agrees if this step has not; else returns the earlier decision.
  Decision scan_and_agree();
  /// True if this step's findings are reported, so that it needs no further agreement.
  [[nodiscard]] bool is_judged() const noexcept;
  /// True if the latest Decision of this step was `skip`.
  [[nodiscard]] bool skips_update() const noexcept;

  /// The optimizer's own operators begin.
  void begin_update();
  void end_update();
  /// The update is done or skipped: scans the weights if requested, and counts the step.
  Decision end_step();
  /// The number of the last step whose update is in the weights, while no update runs.
  [[nodiscard]] std::int64_t updates() const noexcept;
  /// Ends the step and drops its state. Not counted.
  void abandon() noexcept;
  /// This rank alone is about to raise an exception: writes its findings. `losses`: of the step,
  /// where they were not scanned yet.
  void conclude_alone(const std::string& reason, Failure failure,
                      std::span<const LossView> losses = {});
  /// Drops the observations of a forward outside a step (evaluation).
  void forget_observations();

  /// The verdict on the latest finding; valid until the next one.
  [[nodiscard]] const Verdict& verdict() const;
  [[nodiscard]] bool is_tracing() const noexcept;

  /// Abandons the step on destruction, unless `complete` was called.
  class Scope {
   public:
    explicit Scope(StepDriver& driver) noexcept : driver_(&driver) {}
    ~Scope() {
      if (driver_ != nullptr) driver_->abandon();
    }
    Scope(const Scope&) = delete;  // one step, one end
    Scope& operator=(const Scope&) = delete;
    void complete() noexcept { driver_ = nullptr; }

   private:
    StepDriver* driver_;
  };

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace nanlocator::inline step_room
