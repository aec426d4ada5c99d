// One training step of any framework: scan, agree, re-run, decide. The only owner of a step's
// state.
//
// In: what the framework does, in the order in which it does it, on every rank alike. Out: a
// Decision at each point where the ranks agree. A Framework (step/framework.hpp) says what is
// scanned and executed again; two ways through a step:
//
//   forward and backward can be executed again        they cannot
//     begin_pass(pass)                                  (forward, backward)
//       (forward, backward; scan, where the owner
//        sees gradients earlier than at the end)
//     end_pass(losses)   -> Decision                    scan_and_agree() -> Decision
//     begin_update, (the optimizer), end_update         the same
//     end_step()         -> Decision                    end_step()       -> Decision
//
// Exceptions: whatever ends a step early destroys a Scope or calls `abandon`, and the next step is
// a fresh one. Healthy steps cost what GradientLocator and StepState cost. Thread: the training
// thread.
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

/// What the owner of the loop does next, the same on every rank.
enum class Decision {
  proceed,    // nothing is bad, or the policy reports and goes on
  recovered,  // go on with the gradients and losses of the clean re-run
  skip,       // leave this step's update out
  stop,       // throw NonFiniteGradientError with `verdict()`; the step is over
};
[[nodiscard]] constexpr auto names_of(Decision) {
  return std::to_array<std::string_view>({"proceed", "recovered", "skip", "stop"});
}

class StepDriver {
 public:
  /// Throws what GradientLocator's constructor throws, and UsageError for level operators where
  /// another optimizer of this process has it.
  StepDriver(std::shared_ptr<Framework> framework, LocatorOptions options,
             std::shared_ptr<Communicator> communicator);
  ~StepDriver();
  StepDriver(const StepDriver&) = delete;  // a step has one owner
  StepDriver& operator=(const StepDriver&) = delete;

  [[nodiscard]] GradientLocator& locator() noexcept;
  [[nodiscard]] const LocatorOptions& options() const noexcept;
  /// What a re-run finds as it was: generators and the framework's buffers; add more.
  [[nodiscard]] StepState& state() noexcept;
  /// The framework's parameters are others now; between steps.
  void take_parameters_again();
  /// What these see in a pass goes into the ledger of a bad one.
  void watch(std::shared_ptr<ModuleWatch> modules);
  void watch(std::shared_ptr<BoundaryWatch> boundaries);
  /// Takes watches and traces off; gradients are still scanned. Also in the middle of a step.
  void stop_observing() noexcept;
  /// Does nothing from now on: every Decision is `proceed`. Also in the middle of a step.
  void close() noexcept;
  [[nodiscard]] bool is_closed() const noexcept;

  // --- the step ---

  /// Opens the step, unless it is open: whatever comes first calls it. `iteration`: as the
  /// framework counts; without it steps are counted here, from 1.
  void begin(std::optional<std::int64_t> iteration = {});
  /// Forward begins. LBFGS has many passes in a step; each is judged on its own.
  void begin_pass(std::shared_ptr<StepPass> pass, std::optional<std::int64_t> iteration = {});
  [[nodiscard]] bool is_in_pass() const noexcept;
  /// The pass has been judged, and the step is not over.
  [[nodiscard]] bool has_ended_pass() const noexcept;
  [[nodiscard]] bool is_rerunning() const noexcept;
  /// Of the pass that runs now: the step's own, or one of its re-run.
  void scan(Phase phase, std::uint64_t group, std::string_view role,
            std::span<const GradientView> views);
  /// The framework's gradients, before something changes them (a clip). Inside a pass they are
  /// judged at its end, and not scanned again.
  void scan_gradients();
  /// Scanned gradients are no longer those that the update will use (zero_grad).
  void forget_gradients() noexcept;
  /// What the framework's clip computes. Before the ranks agree it is agreed on; after that it must
  /// be the same number on all ranks, and is judged now where it is not finite.
  Decision set_gradient_norm(double norm);
  /// Backward has ended: scans what the owner has not, agrees and judges.
  Decision end_pass(std::span<const LossView> losses);

  /// The gradients of a step without a pass: agrees on what was scanned; inside a pass nothing.
  Decision agree();
  /// The same in two halves, for frameworks that wait later.
  void start_agreement();
  /// `overflow`: the framework has seen one, and will leave the update out; the same on all ranks.
  Decision finish_agreement(const std::optional<LossScale>& overflow = {});
  /// Between the two.
  [[nodiscard]] bool is_agreeing() const noexcept;
  /// Scans and agrees where this step has not; else what was decided.
  Decision scan_and_agree();
  /// This step's findings are reported: it needs no further agreement.
  [[nodiscard]] bool is_judged() const noexcept;
  /// The latest Decision of this step was `skip`.
  [[nodiscard]] bool skips_update() const noexcept;

  /// The optimizer's own operators.
  void begin_update();
  void end_update();
  /// The update is done or left out: scans the weights on request, and counts the step.
  Decision end_step();
  /// The step is over, and nothing of it is left. Not counted.
  void abandon() noexcept;
  /// An exception is on its way through this rank alone: writes what it has seen, then goes on.
  void conclude_alone(const std::string& reason, Failure failure);
  /// A forward that is no step's (evaluation) has been observed.
  void forget_observations();

  /// Of the latest finding; valid until the next one.
  [[nodiscard]] const Verdict& verdict() const;
  [[nodiscard]] bool is_tracing() const noexcept;

  /// Abandons the step unless `complete` was called: whatever leaves the scope early.
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
