#include "step/rerun_passes.hpp"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <utility>

#include "nanlocator/watch/position.hpp"
#include "step/rerun_guard.hpp"
#include "tensor/tensor_access.hpp"

namespace nanlocator::inline step_room {
namespace {

template <typename T>
struct ResetAtExit {
  explicit ResetAtExit(std::unique_ptr<T>& owner_) : owner(owner_) {}
  ~ResetAtExit() { owner.reset(); }
  std::unique_ptr<T>& owner;
};

/// Owns the armed trace that waits for a bad step. There is one trace per process, and a step that
/// is bad now has priority. Training threads only, one at a time.
RerunPasses* waiting = nullptr;

}  // namespace

std::int64_t count_changed(const std::vector<GradientScanner::Scanned>& first,
                           const std::vector<GradientScanner::Scanned>& second) {
  std::map<std::int64_t, std::uint64_t> before;
  for (const auto& gradient : first) before[gradient.parameter] = gradient.fingerprint;
  std::int64_t changed = 0;
  for (const auto& gradient : second) {
    const auto found = before.find(gradient.parameter);
    if (found == before.end() || found->second != gradient.fingerprint) ++changed;
  }
  return changed;
}

bool have_other_norms(const std::vector<GradientScanner::Scanned>& first,
                      const std::vector<GradientScanner::Scanned>& second) {
  constexpr double kOfRounding = 0.01;  // bfloat16 has 8 bits
  const auto norm_of = [](const std::vector<GradientScanner::Scanned>& gradients) {
    double sum = 0;
    for (const auto& each : gradients) sum += each.sum_of_squares;
    return std::sqrt(sum);
  };
  const double a = norm_of(first), b = norm_of(second);
  return std::isfinite(a) && std::isfinite(b) && std::abs(a - b) > kOfRounding * std::max(a, b);
}

RerunPasses::RerunPasses(GradientLocator& locator_)
    : locator(locator_), threads(locator_.options().threads) {}

RerunPasses::~RerunPasses() {
  stop_tracing();
}

/// Out of memory, or a kernel that has failed: the program must learn of it. Other errors only show
/// that the step cannot be executed again, since the program got no error from it.
static bool is_of_machine(std::string_view problem) {
  constexpr auto kOfMachine = std::to_array<std::string_view>(
      {"MemoryError", "OutOfMemoryError", "AcceleratorError", "CUDA error", "out of memory"});
  return std::ranges::any_of(kOfMachine, [&](std::string_view each) {
    return problem.find(each) != std::string_view::npos;
  });
}

Pass RerunPasses::run(const ForwardBackward& forward_backward,
                      const std::function<void(const Pass&)>& then) {
  Pass pass;
  const ResetAtExit<GradientScanner> is_over(scanner);  // even if an interrupt ends the pass
  scanned_by_owner.clear();
  are_gradients_changed = false;
  gradient_norm.reset();
  auto guard = locator.guard_rerun([aborting = framework] { aborting->abort_collectives(); });
  try {
    scanner = std::make_unique<GradientScanner>(locator.map(), threads);
    scanner->begin_step();
    not_restored = state.restore();
    if (auto changed = changed_data(); !changed.empty()) not_restored.push_back(changed);
    step->clear_gradients();
    {
      const at::AutoGradMode with_gradients(true);
      if (boundaries) {
        boundaries->begin_rerun();
      } else {
        forget_position();
      }
      pass.losses = forward_backward(*step);
      pass.has_first_positions = boundaries && boundaries->has_same_crossings();
    }
    scan_results(pass);
    if (then) then(pass);
  } catch (const std::exception& error) {
    pass.problem = first_line(error);
    pass.error = std::current_exception();
    const auto why_aborted = guard ? guard->problem() : "";
    if (!why_aborted.empty()) pass.problem = "its collectives were aborted, as " + why_aborted;
    // If a thread of the program has changed the data, the failure is not the step's error.
    const std::string changed = changed_data_after_failure();
    if (!changed.empty()) pass.problem += " (" + changed + ")";
    pass.is_failure_own = why_aborted.empty() && changed.empty() && is_of_machine(pass.problem);
  } catch (...) {  // an interrupt; it also ends the step
    guard.reset();
    locator.rerun_has_failed("it was interrupted");
    throw;
  }
  return pass;
}

/// The first wait for the device, which reports a failed kernel.
void RerunPasses::scan_results(Pass& pass) {
  if (const Phase phase = framework->gradient_phase(); !scanned_by_owner.contains(phase)) {
    scanner->scan(phase, kOnlyGroup, "grad", framework->gradients());
  }
  std::vector<LossView> losses;
  for (const auto& loss : pass.losses) losses.push_back({loss.tensor, {}, {}, {}});
  scanner->scan_losses(losses);
  pass.scanned = scanner->scanned_gradients();
  pass.is_bad = scanner->flag(at::kCPU).item<std::int32_t>() != 0;
  if (pass.is_bad) pass.bad_parameters = bad_local_gradients();
  pass.is_bad = pass.is_bad || (gradient_norm && !std::isfinite(*gradient_norm));
}

std::string RerunPasses::changed_data() const {
  constexpr std::size_t kMostNamed = 4;
  std::string text;
  const auto sentences = step->changed_data();
  for (std::size_t i = 0; i < std::min(sentences.size(), kMostNamed); ++i) {
    text += (i == 0 ? "the data: " : "; ") + sentences[i];
  }
  return text;
}

std::string RerunPasses::changed_data_after_failure() const noexcept {
  try {
    return changed_data();
  } catch (...) {
    return {};
  }
}

/// Ids of parameters, ascending. Uses the reduced gradients if no others could be scanned.
std::vector<std::int64_t> RerunPasses::bad_local_gradients() {
  const Phase phase = scanned_by_owner.contains(Phase::grad_local) ? Phase::grad_local
                                                                   : framework->gradient_phase();
  std::set<std::int64_t> bad;
  for (const auto& sighting : scanner->collect(locator.iteration()).sightings) {
    if (sighting.phase == phase && sighting.parameter_id) {
      bad.insert(*sighting.parameter_id);
    }
  }
  return {bad.begin(), bad.end()};
}

void RerunPasses::trace_from_now_on() {
  if (!standing) standing = make_trace();
  if (standing) waiting = this;
  traced_steps = 0;
}

void RerunPasses::stop_tracing() noexcept {
  standing.reset();
  if (waiting == this) waiting = nullptr;
}

std::unique_ptr<OperatorTrace> RerunPasses::make_trace(TraceOptions options) {
  if (waiting != nullptr && waiting->locator.options().level != Level::operators) {
    waiting->stop_tracing();
  }
  options.program_code = framework->program_code();
  options.threads = threads;
  options.keep_calls = options.keep_calls && !options.fresh_memory;
  std::unique_ptr<OperatorTrace> trace;
  try {
    trace = std::make_unique<OperatorTrace>(std::move(options));
  } catch (const UsageError& error) {
    locator.add_note(std::string("Operators are not traced: ") + error.what());
    return nullptr;
  }
  for (const auto& [name, tensor] : framework->parameters()) {
    trace->declare(tensor, DeclaredAs::parameter, name);
  }
  for (const auto& held : {framework->buffers(), framework->model_tensors().buffers}) {
    for (const auto& [name, tensor] : held) trace->declare(tensor, DeclaredAs::buffer, name);
  }
  for (const auto& [name, tensor] : named(framework->gradients())) {
    trace->declare(tensor, DeclaredAs::gradient, name);
  }
  trace->begin_pass();
  return trace;
}

TracedPass RerunPasses::run_traced(std::optional<double> fresh_memory) {
  TracedPass traced;
  TraceOptions options;
  options.fresh_memory = fresh_memory;
  options.follows_threads = true;
  const auto trace = make_trace(std::move(options));
  traced.pass = run(&StepPass::run, [&](const Pass& pass) {
    if (!trace) return;
    auto bad = framework->gradients();
    if (are_gradients_changed) {
      std::erase_if(bad, [&](const GradientView& view) {
        return !std::ranges::binary_search(pass.bad_parameters, view.parameter);
      });
    }
    traced.explanation =
        pass.is_bad ? trace->explain(pass.losses, named(bad)) : trace->explain_sent();
    if (pass.has_first_positions) return;
    for (auto& each : traced.explanation->births) each.birth.sighting.position.reset();
  });
  if (trace) {
    traced.unordered = trace->unordered_accesses();
    traced.has_overlap = trace->has_overlap();
    traced.thread_orders = trace->thread_orders();
    std::set<std::int64_t> bad_at_first;
    for (const auto& gradient : first_pass) {
      if (!gradient.is_finite) bad_at_first.insert(gradient.parameter);
    }
    const auto gradients = framework->gradients();
    if (std::ranges::any_of(gradients, [&](const GradientView& view) {
          return bad_at_first.contains(view.parameter) && trace->was_in_transfer(view.tensor);
        })) {
      traced.concurrent.push_back(Concurrent::transfer);
    }
    if (!traced.thread_orders.empty()) traced.concurrent.push_back(Concurrent::thread);
  }
  return traced;
}

std::vector<NamedTensor> RerunPasses::named(const std::vector<GradientView>& views) const {
  std::vector<NamedTensor> named;
  for (const auto& view : views) {
    named.push_back({locator.map().at(view.parameter).name, view.tensor});
  }
  return named;
}

bool RerunPasses::has_ended_early(const Pass& pass) {
  if (pass.error) {
    if (pass.is_failure_own) own_error = pass.error;
    locator.rerun_has_failed(pass.problem);
  }
  try {
    if (!locator.has_rerun_ended_early()) return false;
  } catch (const AgreementError& silence) {  // the verdict names the lost rank
    if (!pass.error) throw;
    (void)locator.conclude_alone(silence.what(), Failure::of_peers);
    std::rethrow_exception(pass.error);
  }
  clear_gradients();
  return true;
}

void RerunPasses::clear_gradients() {
  try {
    step->clear_gradients();
    locator.add_note("The gradients were cleared, as the re-run did not complete.");
  } catch (const std::exception& error) {
    locator.add_note(std::string("The gradients could not be cleared: ") + error.what());
  }
}

}  // namespace nanlocator::inline step_room
