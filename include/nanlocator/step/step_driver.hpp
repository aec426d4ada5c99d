// One training step of any framework: scan, agree, re-run, decide. The only owner of a step's
// state.
//
// In: what the framework does, in the order in which it does it, on every rank alike. Out: a
// Decision at each point where the ranks agree. A framework is described by a StepAdapter, which
// holds nothing of a step; two ways through a step:
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
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "nanlocator/files/names.hpp"
#include "nanlocator/step/gradient_locator.hpp"
#include "nanlocator/step/step_rerun.hpp"
#include "nanlocator/step/step_state.hpp"

namespace nanlocator::inline trace_room {
class BoundaryWatch;
class ModuleWatch;
}  // namespace nanlocator::inline trace_room

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

/// What a framework is to the driver. Functions are called on the training thread; those that are
/// marked may be empty.
struct StepAdapter {
  /// The gradients as they are now, and the weights of the same ids: none where they are no longer
  /// those that the step has used.
  std::function<std::vector<GradientView>()> gradients;
  std::function<std::vector<GradientView>()> weights;
  /// Of the parameters with these ids, between updates; may be empty.
  std::function<std::vector<OptimizerTensor>(const std::vector<std::int64_t>& ids)> optimizer_state;
  Phase gradient_phase = Phase::grad_local;  // that `gradients` are of, when a pass has ended
  std::function<std::vector<NamedTensor>()> parameters;  // as they are now; held by others
  std::function<std::vector<NamedTensor>()> buffers;     // as they are now; may be empty
  /// See TraceOptions; may be empty.
  std::shared_ptr<ProgramCode> program_code;
  /// See RerunnableStep; both may be empty.
  std::function<void(const std::vector<Birth>&, const std::function<void()>& run)>
      keep_module_calls;
  std::function<void(const Birth&, Bundle&, StorageCollector&, BundleContents&)> add_module_call;
  std::function<std::optional<KeptKernelCall>(const Birth&)> take_kernel_call;
  /// See RerunnableStep; all may be empty.
  std::function<void()> abort_collectives;
  std::function<bool()> has_compiled_parts;
  std::function<void(bool is_eager)> set_eager;
  std::function<void(bool is_serialised)> set_serialised;
  std::function<bool()> has_streams;
  std::function<std::vector<UnorderedAccess>(const std::function<void()>& run)> sanitise_streams;
  /// Empty where there is no loss scaler, on all ranks alike; nullopt where it has seen no
  /// overflow.
  std::function<std::optional<LossScale>()> loss_scale;
  /// Whether the framework itself leaves out an update whose gradients are bad, the same on all
  /// ranks; empty where it never does.
  std::function<bool()> skips_bad_updates;
  /// May be empty without a ModuleWatch.
  std::function<ModelTensors()> model;
  /// Of a step without a pass: "step() was called without a closure".
  std::string why_no_pass;
  /// Whether a later step may be traced where one has no pass.
  bool can_trace_later_steps = true;
  /// Each verdict as it comes, partial ones of this rank alone, too; may be empty.
  std::function<void(const Verdict&)> on_verdict;
};

/// Forward and backward of one step, as they can be executed again. Kept until the pass has been
/// judged.
struct StepPass {
  /// From the same data; returns the losses. May throw.
  std::function<std::vector<NamedTensor>()> run;
  /// Sets the gradients to what they were before the first time: undefined, or zero.
  std::function<void()> clear_gradients;
  /// Sentences about its data that it has written to, so that a re-run finds them changed; may be
  /// empty.
  std::function<std::vector<std::string>()> changed_data;
  /// Why it cannot be executed again, a clause ("a tensor ... was overwritten"); "" where it can.
  /// Asked where the pass is bad; may be empty.
  std::function<std::string()> obstacle;
  /// What the pass has drawn; may be empty.
  std::function<std::vector<Microbatch>()> microbatches;
};

class StepDriver {
 public:
  /// Throws what GradientLocator's constructor throws, and UsageError for level operators where
  /// another optimizer of this process has it.
  StepDriver(ParameterMap map, LocatorOptions options, std::shared_ptr<Communicator> communicator,
             StepAdapter adapter);
  ~StepDriver();
  StepDriver(const StepDriver&) = delete;  // the adapter's functions belong to one owner
  StepDriver& operator=(const StepDriver&) = delete;

  [[nodiscard]] GradientLocator& locator() noexcept;
  [[nodiscard]] const LocatorOptions& options() const noexcept;
  /// What a re-run finds as it was: generators and the adapter's buffers; add more.
  [[nodiscard]] StepState& state() noexcept;
  /// The parameters are others now; between steps.
  void set_parameters(ParameterMap map, StepAdapter adapter);
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
  void begin_pass(StepPass pass, std::optional<std::int64_t> iteration = {});
  [[nodiscard]] bool is_in_pass() const noexcept;
  /// The pass has been judged, and the step is not over.
  [[nodiscard]] bool has_ended_pass() const noexcept;
  [[nodiscard]] bool is_rerunning() const noexcept;
  /// Of the pass that runs now: the step's own, or one of its re-run.
  void scan(Phase phase, std::uint64_t group, std::string_view role,
            std::span<const GradientView> views);
  /// The adapter's gradients, before something changes them (a clip). Inside a pass they are judged
  /// at its end, and not scanned again.
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
  [[nodiscard]] RerunnableStep rerunnable_step();

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace nanlocator::inline step_room
