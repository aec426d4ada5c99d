#include "nanlocator/step/step_driver.hpp"

#include <ATen/ops/isfinite.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <iostream>
#include <map>
#include <set>
#include <utility>

#include "nanlocator/step/step_rerun.hpp"
#include "nanlocator/tensor/scan_one.hpp"
#include "nanlocator/watch/boundary_watch.hpp"
#include "nanlocator/watch/module_watch.hpp"
#include "nanlocator/watch/position.hpp"
#include "tensor/tensor_access.hpp"

namespace nanlocator::inline step_room {
namespace {

// Groups of scans; parameters need no buckets. Weights scanned because of bad gradients may also
// have been scanned before forward.
constexpr std::uint64_t kGradients = 0, kWeights = 1, kWeightsOfABadStep = 2;

/// Drops births that may be received values. A module that makes a bad output from finite inputs
/// may have received it in a collective inside. This is assumed in microbatches in which the first
/// bad tensor at this rank's boundary was received.
void drop_receipts(std::vector<Birth>& births, const std::vector<Sighting>& crossed) {
  std::map<std::optional<int>, RoleKind> first;
  for (const auto& sighting : crossed) first.try_emplace(sighting.microbatch, sighting.role.kind());
  std::erase_if(births, [&](const Birth& birth) {
    const auto found = first.find(birth.sighting.microbatch);
    return found != first.end() && found->second == RoleKind::received;
  });
}

bool are_finite(std::span<const LossView> losses) {
  for (const auto& loss : losses) {
    if (loss.tensor.defined() && !at::isfinite(loss.tensor).all().item<bool>()) return false;
  }
  return true;
}

}  // namespace

struct StepDriver::Impl {
  Impl(std::shared_ptr<Framework> framework_, LocatorOptions options,
       std::shared_ptr<Communicator> communicator)
      : framework(std::move(framework_)),
        locator(framework->parameter_map(), std::move(options), std::move(communicator)),
        rerun(locator) {
    follow_parameters();
  }

  std::shared_ptr<Framework> framework;
  GradientLocator locator;
  StepRerun rerun;
  Phase gradient_phase = Phase::grad_local;
  std::optional<std::uint64_t> writes_after_bad_update;  // at the end of the latest step
  std::shared_ptr<ModuleWatch> modules;
  std::shared_ptr<BoundaryWatch> boundaries;
  bool is_closed = false;
  bool is_on_device = false;  // the parameters are
  bool has_told_of_graph = false;
  std::int64_t next_number = 1;      // of the next step
  bool is_number_held = false;       // the program itself numbers each step
  bool has_number_for_next = false;  // it has numbered the step after this one
  bool has_begun = false;            // a step
  bool may_go_on = false;            // after bad gradients
  bool began_unrecorded = false;     // this step
  bool has_had_pass = false;         // in any step
  const Verdict* verdict = nullptr;
  std::size_t reported = 0;              // number of verdicts passed to the framework
  std::optional<std::int64_t> bad_step;  // the latest that made its bad gradients itself

  /// Adapts to the locator's current map.
  void follow_parameters() {
    gradient_phase = framework->gradient_phase();
    is_on_device = std::ranges::any_of(framework->parameters(),
                                       [](const auto& each) { return each.tensor.is_cuda(); });
    rerun.set_framework(framework);
  }

  /// State of one step; reset when a step ends.
  struct Step {
    bool is_open = false;                   // the locator's begin_step was called
    std::optional<std::int64_t> iteration;  // the framework's count
    bool is_scanned = false;                // the gradients that the update will use
    bool is_agreeing = false;               // between start_agreement and finish_agreement
    bool is_agreed = false;                 // on the scanned tensors
    std::optional<bool> is_bad;             // agreed on by `may_go_on`, and not yet judged
    bool goes_on = false;                   // all the same, on all ranks, until `end_pass`
    bool is_judged = false;                 // a finding has been reported or dismissed
    bool is_update_running = false;
    bool has_ended_pass = false;
    bool has_left_gradients = false;  // bad ones of the latest bad step, when this one began
    bool is_discarded = false;        // by the program itself
    Decision decision = Decision::proceed;
    std::shared_ptr<StepPass> pass;  // can be executed again now
    std::vector<LossView> losses;
  };
  Step step;

  // --- observations ---

  void forget_observations() {
    if (modules) modules->begin_step();
    if (boundaries) boundaries->begin_step();
  }

  /// Adds them to this step's ledger. Waits for the devices.
  void collect_observations() {
    const auto iteration = locator.iteration();
    std::vector<Sighting> crossed;
    if (boundaries) {
      auto collected = boundaries->collect(iteration);
      crossed = std::move(collected.sightings);
      locator.set_crossings(crossed, std::move(collected.coverage));
    }
    if (modules) {
      const auto model = framework->model_tensors();
      auto births = modules->collect(iteration, model.parameters, model.buffers).births;
      drop_receipts(births, crossed);
      locator.set_births(std::move(births));
    }
    if (step.pass) locator.set_microbatches(step.pass->microbatches());
    if (step.has_left_gradients && bad_step) locator.set_gradients_left_by(*bad_step);
    if (began_unrecorded) locator.set_began_unrecorded();
    if (step.is_discarded) locator.set_discarded();
  }

  /// States of weights that were bad before the step show whether the last update made them bad; if
  /// none was, the learning rates, each once, may be why something overflows.
  void keep_optimizer_states() {
    try {
      auto weights = locator.bad_weights();
      const bool is_any_bad = !weights.empty();
      if (!is_any_bad) {
        for (const ParameterInfo& each : locator.map().parameters()) weights.push_back(each.id);
      }
      std::vector<OptimizerState> states;
      std::set<double> rates;
      for (const auto& [parameter, name, tensor, offset] : framework->optimizer_state(weights)) {
        if (!is_any_bad && name != "lr") continue;
        auto stats = nanlocator::scan_one(tensor);
        if (!stats || (!is_any_bad && !rates.insert(stats->absmax).second)) continue;
        if (stats->first_bad >= 0) stats->first_bad += offset;
        states.push_back({parameter, name, *stats});
      }
      locator.set_optimizer_states(std::move(states));
    } catch (const std::exception& error) {
      locator.add_note("The optimizer's state could not be scanned: " + std::string(error.what()));
    }
  }

  void open(std::optional<std::int64_t> iteration) {
    if (step.is_open) return;
    if (iteration) step.iteration = iteration;
    has_number_for_next = false;
    has_begun = true;
    locator.begin_step(step.iteration.value_or(next_number));
    step.is_open = true;
    if (options().check_params) {
      locator.scan(Phase::params_before, kWeights, "weight", framework->weights());
    }
  }

  void scan_gradients() {
    if (rerun.is_running()) {
      rerun.scan_before_change(framework->gradients());
      return;
    }
    if (!step.pass && step.is_scanned) step = {};  // those gradients no longer exist
    open({});
    locator.scan(gradient_phase, kGradients, "grad", framework->gradients());
    step.is_scanned = true;
  }

  [[nodiscard]] const LocatorOptions& options() const { return locator.options(); }

  /// During capture of a CUDA graph nothing may wait or allocate, and each replay repeats enqueued
  /// work, so nothing is scanned.
  [[nodiscard]] bool is_off() {
    if (is_closed || !is_on_device || !is_captured(at::kCUDA)) return is_closed;
    if (!std::exchange(has_told_of_graph, true)) {
      std::cerr << "nanlocator: a step is captured into a CUDA graph: what its replays compute is "
                   "not seen\n"
                << std::flush;
    }
    return true;
  }

  // --- findings ---

  /// fp16 with a dynamic loss scale finds its scale by overflowing in backward; this does not
  /// explain a non-finite loss. The same on all ranks.
  bool is_routine_overflow(const std::optional<LossScale>& scale) {
    const bool is_routine = scale && scale->falls_on_overflow && are_finite(step.losses);
    return !locator.is_true_anywhere(!is_routine);
  }

  /// Uses the framework's own loss scale; the same on all ranks.
  bool is_routine_overflow() {
    if (!framework->has_loss_scaler()) return false;
    const auto scale = framework->loss_scale();
    if (scale && scale->is_in_gradients) {
      const bool is_scale = scale->scale > 0 && std::isfinite(scale->scale);
      if (is_scale) locator.set_loss_scale(scale->scale, scale->falls_on_overflow);
      if (!is_scale) locator.add_note("The loss scale is " + std::to_string(scale->scale));
    }
    return is_routine_overflow(scale);
  }

  /// Differs after any write to a weight. Empty: no earlier update made weights bad.
  [[nodiscard]] std::optional<std::uint64_t> writes_to_weights() {
    if (!locator.has_bad_update()) return std::nullopt;
    std::uint64_t writes = 0;
    for (const auto& [name, tensor] : framework->parameters()) {
      writes = writes * 31 + version_of(tensor);
    }
    return writes;
  }

  struct Rerunnable {
    CanRerun can;
    std::string why_not;
  };

  /// The same on all ranks except the reason: an obstacle on one rank prevents execution on all.
  Rerunnable can_rerun() {
    if (!step.pass) {
      return {step.has_ended_pass ? CanRerun::pass_has_ended : CanRerun::no_pass,
              framework->why_no_pass()};
    }
    const auto obstacle = step.pass->obstacle();
    if (!obstacle || !locator.is_true_anywhere(!obstacle->empty())) return {CanRerun::yes, {}};
    return {CanRerun::no_pass,
            obstacle->empty() ? "another rank could not execute it again" : *obstacle};
  }

  /// `results`: the bad tensors that all ranks have agreed on.
  Decision judge(const Rerunnable& rerunnable, std::vector<GradientView> results) {
    const auto& [can, why_not] = rerunnable;
    const bool are_gradients = can != CanRerun::weights_have_moved;
    step.is_judged = true;
    if (step.goes_on) step.is_discarded = !locator.is_true_anywhere(!step.is_discarded);
    if (are_gradients) {  // the optimizer has not changed the weights since
      const auto weights = framework->weights();
      if (!weights.empty()) {
        locator.scan(Phase::params_before, kWeightsOfABadStep, "weight", weights);
      }
      keep_optimizer_states();
      locator.set_framework_skips_update(framework->skips_bad_updates());
    }
    collect_observations();
    bool is_clean_now = false;
    const bool are_untouched = writes_after_bad_update == writes_to_weights();
    if (are_gradients && locator.is_consequence(are_untouched)) {
      report(&locator.conclude());
      return decide(are_gradients, is_clean_now);
    }
    if (can == CanRerun::no_pass && !has_had_pass && !framework->can_trace_later_steps()) {
      locator.set_no_rerun(why_not);
      locator.add_note("This step could not be executed again: " + why_not);
    } else if (can == CanRerun::yes || framework->can_trace_later_steps()) {
      locator.now_in(Activity::rerun);
      is_clean_now = rerun.rerun_or_trace({can, can == CanRerun::yes ? step.pass : nullptr, why_not,
                                           std::move(results), boundaries, step.losses});
    }
    report(&locator.conclude());
    return decide(are_gradients, is_clean_now);
  }

  Decision decide(bool are_gradients, bool is_clean_now) {
    if (step.is_discarded) return Decision::proceed;
    switch (options().on_bad) {
      case Policy::report:
        return Decision::proceed;
      case Policy::skip:
        return are_gradients ? Decision::skip : Decision::proceed;
      case Policy::recover:
        if (!is_clean_now) break;
        step.is_judged = false;
        return Decision::recovered;
      case Policy::stop:
        break;
    }
    end();
    count();
    return Decision::stop;
  }

  void report(const Verdict* latest) {
    verdict = latest;
    if (!step.has_left_gradients) bad_step = latest->iteration;
    reported = locator.verdicts().size();
    framework->on_verdict(*latest);
  }

  void conclude_alone(const std::string& reason, Failure failure,
                      std::span<const LossView> losses = {}) {
    try {
      locator.scan_losses(losses);
      collect_observations();
      if (!losses.empty()) rerun.explain(losses, framework->gradients());
    } catch (...) {
      // The device may have failed.
    }
    const auto* const partial = locator.conclude_alone(reason, failure);
    if (partial != nullptr && locator.verdicts().size() > reported) report(partial);
  }

  /// `work`: one agreement and its consequences. This rank's findings must survive its failure.
  template <typename Work>
  Decision agreed(const Work& work) {
    constexpr auto kReason = "The ranks could not agree on this step: ";
    Decision decision = Decision::proceed;
    try {
      decision = work();
    } catch (const AgreementError& error) {
      conclude_alone(kReason + std::string(error.what()), Failure::of_peers);
      throw;
    } catch (const std::exception& error) {
      conclude_alone(kReason + std::string(error.what()), Failure::own);
      throw;
    }
    const auto rerun_error = rerun.take_error();
    if (decision == Decision::skip) rerun.state().put_back_bad_buffers();
    if (decision != Decision::stop) {
      step.decision = decision;
    } else if (rerun_error) {  // the step is over, for this rank's own error
      std::rethrow_exception(rerun_error);
    }
    return decision;
  }

  /// True if something is bad on any rank. If ranks may go on in spite of it, they learn that this
  /// one does not.
  bool finish_agreement_at_once() {
    const bool is_bad = locator.finish_agreement();
    if (is_bad && may_go_on && step.pass) (void)locator.is_true_anywhere(true);
    return is_bad;
  }

  /// The same if this rank would go on: true only if each rank would, and any has bad gradients.
  bool finish_agreement_and_go_on() {
    step.is_bad = locator.finish_agreement();
    if (!*step.is_bad || locator.is_true_anywhere(false)) return false;
    const auto gradients = framework->gradients();
    const bool has_bad = std::ranges::any_of(gradients, [](const GradientView& view) {
      const auto stats = scan_one(view.tensor);
      return stats && !stats->is_finite();
    });
    return locator.is_true_anywhere(has_bad);
  }

  template <typename IsRoutine>
  Decision finish_agreement(const IsRoutine& is_routine) {
    return agreed([&] {
      step.is_agreeing = false;
      step.is_agreed = true;
      if (!(step.is_bad ? *step.is_bad : finish_agreement_at_once())) return Decision::proceed;
      if (is_routine()) {
        step.is_judged = true;
        locator.dismiss();
        forget_observations();  // the scaler skips the update: no end_step may follow
        return Decision::proceed;
      }
      return judge(can_rerun(), framework->gradients());
    });
  }

  Decision finish_agreement() {
    return finish_agreement([&] { return is_routine_overflow(); });
  }

  void scan_pass(std::span<const LossView> losses) {
    if (!step.is_scanned) scan_gradients();
    for (auto loss : losses) {
      if (loss.tensor.defined()) loss.tensor = loss.tensor.detach();  // without its graph
      step.losses.push_back(std::move(loss));
    }
    locator.scan_losses(losses);
    locator.start_agreement();
  }

  void compare_with_rerun() {
    if (const auto [can, why_not] = can_rerun(); can != CanRerun::yes) {
      std::cerr << "nanlocator: step " + std::to_string(locator.iteration()) +
                       ": not executed again, as " + why_not + "\n"
                << std::flush;
      return;
    }
    if (const auto changed = rerun.compare(step.pass); changed > 0) {
      std::cerr << "nanlocator: step " + std::to_string(locator.iteration()) +
                       ": executed again from the same state, " + std::to_string(changed) +
                       " gradients have other bits\n"
                << std::flush;
    }
  }

  Decision scan_updated_weights() {
    return agreed([&] {
      open({});
      const auto weights = framework->weights();
      locator.scan(Phase::params_after, kWeights, "weight", weights);
      locator.start_agreement();
      if (!locator.finish_agreement()) {
        locator.weights_are_finite();
        return step.decision;
      }
      return judge({CanRerun::weights_have_moved, {}}, weights);
    });
  }

  // --- the end ---

  void count() {
    if (!is_number_held && !has_number_for_next) ++next_number;
  }

  void end() {
    if (step.is_update_running) rerun.end_update();
    if (!step.is_open) has_number_for_next = false;  // it was this one's
    step = {};
    began_unrecorded = false;
    rerun.begin_pass();
    forget_observations();
  }
};

StepDriver::StepDriver(std::shared_ptr<Framework> framework, LocatorOptions options,
                       std::shared_ptr<Communicator> communicator)
    : impl_(std::make_unique<Impl>(std::move(framework), std::move(options),
                                   std::move(communicator))) {
  auto& impl = *impl_;
  const bool traces =
      impl.options().level == Level::operators && impl.framework->can_trace_later_steps();
  if (!traces) return;
  impl.rerun.trace_from_now_on();
  if (!impl.rerun.is_tracing()) {
    throw UsageError(
        "level 'operators' is on for another optimizer of this process; one trace at a time: call "
        "its remove() first");
  }
}

StepDriver::~StepDriver() = default;

GradientLocator& StepDriver::locator() noexcept {
  return impl_->locator;
}
const LocatorOptions& StepDriver::options() const noexcept {
  return impl_->options();
}
StepState& StepDriver::state() noexcept {
  return impl_->rerun.state();
}
const Verdict& StepDriver::verdict() const {
  if (impl_->verdict == nullptr) throw UsageError("StepDriver::verdict: nothing was found yet.");
  return *impl_->verdict;
}
bool StepDriver::is_tracing() const noexcept {
  return impl_->rerun.is_tracing();
}

void StepDriver::take_parameters_again() {
  impl_->locator.set_map(impl_->framework->parameter_map());
  impl_->follow_parameters();
  const bool had_ended_pass = has_ended_pass();
  forget_gradients();
  impl_->step.has_ended_pass = had_ended_pass;
}

void StepDriver::watch(std::shared_ptr<ModuleWatch> modules) {
  impl_->modules = std::move(modules);
}
void StepDriver::watch(std::shared_ptr<BoundaryWatch> boundaries) {
  impl_->boundaries = std::move(boundaries);
}

void StepDriver::stop_observing() noexcept {
  impl_->modules.reset();
  impl_->boundaries.reset();
  impl_->rerun.stop_tracing();
}

void StepDriver::close() noexcept {
  stop_observing();
  abandon();
  impl_->is_closed = true;
}
bool StepDriver::is_closed() const noexcept {
  return impl_->is_closed;
}

// ------------------------------------------------------------------------------------------ a step

void StepDriver::begin(std::optional<std::int64_t> iteration) {
  if (!impl_->is_off()) impl_->open(iteration);
}

void StepDriver::begin_pass(std::shared_ptr<StepPass> pass, std::optional<std::int64_t> iteration) {
  auto& impl = *impl_;
  if (impl.is_off()) return;
  if (impl.step.pass || impl.step.has_ended_pass || impl.step.is_agreed) impl.step = {};
  impl.open(iteration);
  impl.locator.now_in(Activity::forward_backward);
  if (impl.modules) impl.modules->begin_step();
  if (impl.boundaries) {
    impl.boundaries->begin_pass();
  } else {
    forget_position();
  }
  impl.rerun.save();
  impl.step.pass = std::move(pass);
  impl.has_had_pass = true;
}

bool StepDriver::is_in_pass() const noexcept {
  return impl_->step.pass != nullptr;
}
bool StepDriver::has_ended_pass() const noexcept {
  return impl_->step.has_ended_pass;
}
bool StepDriver::is_rerunning() const noexcept {
  return impl_->rerun.is_running();
}

void StepDriver::scan(Phase phase, std::uint64_t group, std::string_view role,
                      std::span<const GradientView> views) {
  auto& impl = *impl_;
  if (impl.is_off()) return;
  if (impl.rerun.is_running()) return impl.rerun.scan(phase, group, role, views);
  impl.open({});
  impl.locator.scan(phase, group, role, views);
  if (phase == impl.gradient_phase) impl.step.is_scanned = true;
}

void StepDriver::scan_gradients() {
  if (!impl_->is_off()) impl_->scan_gradients();
}

void StepDriver::forget_gradients() noexcept {
  auto& impl = *impl_;
  if (impl.rerun.is_running()) return impl.rerun.forget_scans();
  if (!impl.step.pass) impl.step = {};
  impl.step.is_scanned = impl.step.is_agreed = false;
}

void StepDriver::number_steps(std::int64_t next, bool is_held) {
  if (next < 0) {
    throw UsageError("a step's number is 0 or more, not " + std::to_string(next));
  }
  impl_->next_number = next;
  impl_->is_number_held = is_held;
  impl_->has_number_for_next = true;
}

std::int64_t StepDriver::step_number() const noexcept {
  return impl_->step.is_open ? impl_->locator.iteration() : impl_->next_number;
}

void StepDriver::note_unrecorded_beginning() {
  impl_->began_unrecorded = true;
}

void StepDriver::set_discarded(bool is_discarded) {
  impl_->step.is_discarded = is_discarded;
}

void StepDriver::note_left_gradients() {
  impl_->step.has_left_gradients = true;
}

Decision StepDriver::set_gradient_norm(double norm) {
  auto& impl = *impl_;
  if (impl.is_off()) return Decision::proceed;
  if (impl.rerun.is_running()) {
    impl.rerun.set_gradient_norm(norm);
    return Decision::proceed;
  }
  if (impl.step.is_judged) return impl.step.decision;
  impl.locator.set_gradient_norm(norm);
  if (!impl.step.is_agreed || std::isfinite(norm)) return Decision::proceed;
  return impl.agreed([&] { return impl.judge(impl.can_rerun(), impl.framework->gradients()); });
}

void StepDriver::allow_going_on() noexcept {
  impl_->may_go_on = true;
}

bool StepDriver::may_go_on(std::span<const LossView> losses) {
  auto& impl = *impl_;
  if (impl.is_off() || !impl.step.pass) return false;
  impl.scan_pass(losses);
  (void)impl.agreed([&] {
    impl.step.goes_on = impl.finish_agreement_and_go_on();
    return Decision::proceed;
  });
  if (impl.step.goes_on) impl.locator.now_in(Activity::training);
  return impl.step.goes_on;
}

Decision StepDriver::end_pass(std::span<const LossView> losses) {
  auto& impl = *impl_;
  if (impl.is_off() || !impl.step.pass) return Decision::proceed;
  if (!impl.step.is_bad) impl.scan_pass(losses);
  const auto decision = impl.finish_agreement();
  if (decision == Decision::stop) return decision;
  if (!impl.step.is_judged && decision == Decision::proceed &&
      impl.options().rerun == RerunPolicy::always) {
    impl.compare_with_rerun();
  }
  impl.step.pass.reset();
  impl.step.has_ended_pass = true;
  return decision;
}

Decision StepDriver::agree() {
  auto& impl = *impl_;
  if (impl.is_off() || impl.step.pass || impl.rerun.is_running()) return Decision::proceed;
  impl.locator.start_agreement();
  return impl.finish_agreement();
}

void StepDriver::start_agreement() {
  if (impl_->is_off()) return;
  impl_->step.is_agreed = false;
  impl_->locator.start_agreement();
  impl_->step.is_agreeing = true;
}

bool StepDriver::is_agreeing() const noexcept {
  return impl_->step.is_agreeing;
}

Decision StepDriver::finish_agreement(const std::optional<LossScale>& overflow) {
  auto& impl = *impl_;
  if (impl.is_off()) return Decision::proceed;
  return impl.finish_agreement([&] { return overflow && impl.is_routine_overflow(overflow); });
}

Decision StepDriver::scan_and_agree() {
  auto& impl = *impl_;
  if (impl.is_off() || impl.step.is_agreed) return impl.step.decision;
  impl.scan_gradients();
  return agree();
}

bool StepDriver::is_judged() const noexcept {
  return impl_->is_off() || impl_->step.is_judged;
}

bool StepDriver::skips_update() const noexcept {
  return impl_->step.decision == Decision::skip;
}

void StepDriver::begin_update() {
  if (impl_->is_off()) return;
  impl_->rerun.begin_update();
  impl_->step.is_update_running = true;
}

void StepDriver::end_update() {
  if (!std::exchange(impl_->step.is_update_running, false)) return;
  impl_->rerun.end_update();
}

Decision StepDriver::end_step() {
  auto& impl = *impl_;
  if (impl.is_off()) return Decision::proceed;
  end_update();
  // Bad weights after bad gradients are no new finding.
  const bool scans_weights = impl.options().check_params && !impl.step.is_judged;
  const auto decision = scans_weights ? impl.scan_updated_weights() : impl.step.decision;
  if (decision == Decision::stop) return decision;
  impl.writes_after_bad_update = impl.writes_to_weights();
  if (!impl.step.is_judged) impl.bad_step.reset();  // no gradient of it was left
  impl.end();
  impl.count();
  return decision;
}

std::int64_t StepDriver::updates() const noexcept {
  if (impl_->step.is_open) return impl_->locator.iteration() - 1;
  return impl_->has_begun ? impl_->locator.iteration() : impl_->next_number - 1;
}

void StepDriver::abandon() noexcept {
  try {
    impl_->locator.abandon_step();
    impl_->end();
  } catch (...) {
    // Training reports a failed device.
  }
}

void StepDriver::conclude_alone(const std::string& reason, Failure failure,
                                std::span<const LossView> losses) {
  if (!impl_->is_off() && impl_->step.is_open) impl_->conclude_alone(reason, failure, losses);
}

void StepDriver::forget_observations() {
  if (!is_in_pass()) impl_->forget_observations();
}

}  // namespace nanlocator::inline step_room
