#include "nanlocator/step/step_rerun.hpp"

#include <c10/util/ScopeExit.h>

#include <exception>
#include <utility>

#include "step/birth_bundles.hpp"
#include "step/rerun_experiments.hpp"
#include "step/rerun_passes.hpp"
#include "tensor/tensor_access.hpp"

namespace nanlocator::inline step_room {
namespace {

/// Limit of steps traced to catch the next bad one. A fault that has not come back by then is not
/// worth the slower steps.
constexpr int kMostTracedSteps = 100;

}  // namespace

struct StepRerun::Impl {
  explicit Impl(GradientLocator& locator_) : locator(locator_), passes(locator_) {}

  GradientLocator& locator;
  RerunPasses passes;
  RerunEvidence evidence;  // of the current re-run
  /// Of the bad step's first pass, if its operators were traced.
  std::optional<Explanation> of_first_pass;

  /// What the births are taken from: the re-run if it was bad again, else the first pass.
  const Explanation* explaining() {
    const auto& again = evidence.explaining.explanation;
    const bool is_bad_again =
        evidence.findings.reproduced == true && again && !again->births.empty();
    if (is_bad_again || !of_first_pass) return again ? &*again : nullptr;
    evidence.findings.has_first_births = true;
    return &*of_first_pass;
  }

  void publish(const Explanation& explanation) {
    std::vector<Birth> births;
    for (const auto& traced : explanation.births) {
      births.push_back(traced.birth);
      births.back().sighting.iteration = locator.iteration();
    }
    if (!births.empty()) locator.set_births(std::move(births));
  }

  /// Publishes the births first, because replays take time.
  void keep(const Explanation& explanation) {
    publish(explanation);
    std::vector<Birth> births;
    try {
      births = keep_births(explanation, locator, locator.iteration(), *passes.framework);
    } catch (const std::exception&) {
      throw;
    } catch (...) {  // an interrupt, in a replayed kernel
      locator.rerun_has_failed("it was interrupted");
      throw;
    }
    if (!births.empty()) locator.set_births(std::move(births));
  }
};

StepRerun::StepRerun(GradientLocator& locator) : impl_(std::make_unique<Impl>(locator)) {}

StepRerun::~StepRerun() = default;

StepState& StepRerun::state() noexcept {
  return impl_->passes.state;
}

void StepRerun::set_framework(std::shared_ptr<Framework> framework) {
  impl_->passes.framework = std::move(framework);
  impl_->passes.state.set_buffers([asked = impl_->passes.framework] { return asked->buffers(); });
  if (is_tracing()) {
    stop_tracing();
    trace_from_now_on();
  }
}

void StepRerun::save() {
  if (impl_->locator.options().rerun != RerunPolicy::never) impl_->passes.state.save();
}

std::exception_ptr StepRerun::take_error() noexcept {
  return std::exchange(impl_->passes.own_error, nullptr);
}

bool StepRerun::is_running() const noexcept {
  return impl_->passes.scanner != nullptr;
}

void StepRerun::scan(Phase phase, std::uint64_t group, std::string_view role,
                     std::span<const GradientView> views) {
  if (!is_running()) throw UsageError("StepRerun::scan: no re-run of a step is running.");
  impl_->passes.scanned_by_owner.insert(phase);
  impl_->passes.scanner->scan(phase, group, role, views);
}

void StepRerun::set_gradient_norm(double norm) {
  impl_->passes.gradient_norm = norm;
}

void StepRerun::scan_before_change(std::span<const GradientView> views) {
  scan(impl_->passes.framework->gradient_phase(), kOnlyGroup, "grad", views);
  impl_->passes.are_gradients_changed = true;
}

void StepRerun::forget_scans() noexcept {
  impl_->passes.scanned_by_owner.clear();
  impl_->passes.are_gradients_changed = false;
}

bool StepRerun::run_again() {
  auto& locator = impl_->locator;
  auto& passes = impl_->passes;
  auto& evidence = impl_->evidence;
  passes.first_pass = locator.scanned_gradients();
  locator.keep_first_pass();
  passes.own_error = nullptr;
  evidence = {};

  const auto go_on =
      c10::make_scope_exit([&, end = passes.state.end(), was_tracing = is_tracing()] {
        try {
          if (was_tracing) passes.trace_from_now_on();
          passes.state.go_on_from(end);
        } catch (...) {
          // Training reports a failed device.
        }
      });
  passes.stop_tracing();  // one trace at a time
  const bool is_complete = run_experiments(passes, evidence);
  const Rerun& findings = evidence.findings;
  const bool is_clean_now = findings.control_reproduced == false;
  if (is_complete && evidence.are_gradients_finite) {
    locator.add_note("The gradients in memory are now the finite ones of the re-run.");
  }
  const Explanation* const explaining = impl_->explaining();
  locator.set_rerun(findings);
  if (explaining != nullptr) impl_->keep(*explaining);
  return is_clean_now;
}

static std::vector<NamedTensor> named_losses(std::span<const LossView> losses) {
  std::vector<NamedTensor> named;
  for (std::size_t i = 0; i < losses.size(); ++i) {
    const std::string number = losses.size() == 1 ? "" : "[" + std::to_string(i) + "]";
    named.push_back({"loss" + number, losses[i].tensor});
  }
  return named;
}

bool StepRerun::rerun_or_trace(BadStep bad) {
  auto& impl = *impl_;
  const auto& options = impl.locator.options();
  if (impl.locator.is_counted_only() && options.on_bad != Policy::recover) return false;
  if (options.rerun != RerunPolicy::never && bad.can_rerun == CanRerun::yes) {
    if (impl.passes.standing) {
      impl.of_first_pass =
          impl.passes.standing->explain(named_losses(bad.losses), impl.passes.named(bad.results));
    }
    bad.results.clear();  // frees the first pass's gradients before the second pass
    impl.passes.step = std::move(bad.pass);
    impl.passes.boundaries = std::move(bad.boundaries);
    const auto forget = c10::make_scope_exit([&] {
      impl.evidence = {};
      impl.of_first_pass.reset();
      impl.passes.boundaries.reset();
      impl.passes.step.reset();
    });
    try {
      return run_again();
    } catch (const AgreementError& error) {  // a rank was lost between two passes
      Pass lost;
      lost.problem = first_line(error);
      lost.error = std::current_exception();
      const Explanation* const explaining = impl.explaining();
      impl.locator.set_rerun(impl.evidence.findings);
      if (explaining != nullptr) impl.publish(*explaining);
      (void)impl.passes.has_ended_early(lost);
      if (explaining != nullptr) impl.keep(*explaining);
    }
    return false;
  }
  if (impl.passes.standing) {
    impl.keep(
        impl.passes.standing->explain(named_losses(bad.losses), impl.passes.named(bad.results)));
    if (options.level != Level::operators) impl.passes.stop_tracing();
    return false;
  }
  if (options.rerun == RerunPolicy::never) return false;
  trace_from_now_on();
  if (!impl.passes.standing) return false;
  const std::string reason =
      bad.can_rerun == CanRerun::weights_have_moved ? "its optimizer has changed the weights"
      : bad.can_rerun == CanRerun::pass_has_ended   ? "its forward and backward had ended"
                                                    : bad.why_no_pass;
  impl.locator.set_no_rerun(reason);
  impl.locator.add_note("This step cannot be executed again, as " + reason +
                        ": operators are traced for the next " + std::to_string(kMostTracedSteps) +
                        " steps, and a bad one will name its operator.");
  return false;
}

void StepRerun::trace_from_now_on() {
  impl_->passes.trace_from_now_on();
}

void StepRerun::stop_tracing() noexcept {
  impl_->passes.stop_tracing();
}

bool StepRerun::is_tracing() const noexcept {
  return impl_->passes.standing != nullptr;
}

void StepRerun::explain(std::span<const LossView> losses,
                        const std::vector<GradientView>& results) {
  if (!is_tracing()) return;
  impl_->keep(impl_->passes.standing->explain(named_losses(losses), impl_->passes.named(results)));
}

void StepRerun::begin_pass() {
  if (!impl_->passes.standing) return;
  impl_->passes.standing->begin_pass();
  const bool is_asked_for = impl_->locator.options().level == Level::operators;
  if (!is_asked_for && ++impl_->passes.traced_steps > kMostTracedSteps) stop_tracing();
}

void StepRerun::begin_update() {
  if (!impl_->passes.standing) return;
  if (impl_->locator.options().check_params) {
    impl_->passes.standing->enter_phase(Phase::params_after);
  } else {
    impl_->passes.standing->pause();
  }
}

void StepRerun::end_update() {
  if (!impl_->passes.standing) return;
  impl_->passes.standing->enter_phase(std::nullopt);
  impl_->passes.standing->resume();
}

std::int64_t StepRerun::compare(std::shared_ptr<StepPass> pass) {
  auto& impl = *impl_;
  impl.passes.step = std::move(pass);
  const auto forget = c10::make_scope_exit([&] { impl.passes.step.reset(); });
  const auto first = impl.locator.scanned_gradients();
  const auto end = impl.passes.state.end();
  Pass second;
  {
    const auto trace =
        impl.passes.standing ? nullptr : impl.passes.make_trace();  // as in a bad step's re-run
    second = impl.passes.run(&StepPass::run);
  }
  if (!second.problem.empty()) {
    throw Error("The re-run of the step ended with an error: " + second.problem);
  }
  impl.passes.state.go_on_from(end);
  return count_changed(first, second.scanned);
}

}  // namespace nanlocator::inline step_room
