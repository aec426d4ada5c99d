#include "nanlocator/step/step_rerun.hpp"

#include <ATen/core/grad_mode.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "nanlocator/watch/boundary_watch.hpp"
#include "nanlocator/watch/position.hpp"
#include "step/birth_bundles.hpp"
#include "step/rerun_guard.hpp"
#include "tensor/tensor_access.hpp"

namespace nanlocator::inline step_room {
namespace {

constexpr std::uint64_t kOnlyGroup = 0;

/// Limit of steps traced to catch the next bad one. A fault that has not come back by then is not
/// worth the slower steps.
constexpr int kMostTracedSteps = 100;

struct Pass {
  std::vector<NamedTensor> losses;
  std::vector<GradientScanner::Scanned> scanned;
  std::vector<std::int64_t> bad_parameters;  // with bad local gradients
  bool is_bad = false;
  bool has_first_positions = false;  // its positions mean the same places as the first pass's
  std::string problem;               // error that ended it early
  std::exception_ptr error;          // the same
};

template <typename T>
struct ResetAtExit {
  explicit ResetAtExit(std::unique_ptr<T>& owner_) : owner(owner_) {}
  ~ResetAtExit() { owner.reset(); }
  std::unique_ptr<T>& owner;
};

/// Switched on while it lives, even if an interrupt ends the pass.
class Switched {
 public:
  using Set = void (Framework::*)(bool);
  /// `framework` null: does nothing.
  Switched(Framework* framework, Set set) : framework_(framework), set_(set) {
    if (framework_ != nullptr) (framework_->*set_)(true);
  }
  ~Switched() {
    try {
      if (framework_ != nullptr) (framework_->*set_)(false);
    } catch (...) {
    }
  }
  Switched(const Switched&) = delete;  // switches off once
  Switched& operator=(const Switched&) = delete;

 private:
  Framework* framework_;
  Set set_;
};

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

}  // namespace

struct StepRerun::Impl {
  explicit Impl(GradientLocator& locator_)
      : locator(locator_), threads(locator_.options().threads) {}

  GradientLocator& locator;
  int threads;
  std::shared_ptr<Framework> framework;
  std::shared_ptr<StepPass> step;             // the pass to execute again
  std::shared_ptr<BoundaryWatch> boundaries;  // for its crossings; may be null
  StepState state;
  std::unique_ptr<GradientScanner> scanner;  // of the current pass
  std::set<Phase> scanned_by_owner;
  bool are_gradients_changed = false;   // since they were scanned
  bool is_failure_own = false;          // not caused by a peer's end
  std::exception_ptr own_error;         // the error of this rank's re-run
  std::optional<double> gradient_norm;  // of the current pass
  std::vector<std::string> not_restored;
  std::set<std::int64_t> bad_at_first;      // ids of gradients, in the first pass
  std::unique_ptr<OperatorTrace> standing;  // traces steps that cannot be executed again
  int traced_steps = 0;                     // number since it began

  /// Executes the step again from its start, then calls `when_bad` if its gradients are bad. Does
  /// not throw errors of the step or of a device.
  Pass run(const std::function<std::vector<NamedTensor>(StepPass&)>& forward_backward,
           const std::function<void(const Pass&)>& when_bad = {}) {
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
      if (pass.is_bad && when_bad) when_bad(pass);
    } catch (const std::exception& error) {
      pass.problem = first_line(error);
      pass.error = std::current_exception();
      const auto why_aborted = guard ? guard->problem() : "";
      if (!why_aborted.empty()) pass.problem = "its collectives were aborted, as " + why_aborted;
      // If a thread of the program has changed the data, the failure is not the step's error.
      const std::string changed = changed_data_after_failure();
      if (!changed.empty()) pass.problem += " (" + changed + ")";
      is_failure_own = why_aborted.empty() && changed.empty() && !is_failure_of_peers(pass.problem);
    } catch (...) {  // an interrupt; it also ends the step
      guard.reset();
      locator.rerun_has_failed("it was interrupted");
      throw;
    }
    return pass;
  }

  /// The first wait for the device, which reports a failed kernel.
  void scan_results(Pass& pass) {
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

  std::string changed_data() const {
    constexpr std::size_t kMostNamed = 4;
    std::string text;
    const auto sentences = step->changed_data();
    for (std::size_t i = 0; i < std::min(sentences.size(), kMostNamed); ++i) {
      text += (i == 0 ? "the data: " : "; ") + sentences[i];
    }
    return text;
  }

  std::string changed_data_after_failure() const noexcept {
    try {
      return changed_data();
    } catch (...) {
      return {};
    }
  }

  /// Ids of parameters, ascending. Uses the reduced gradients if no others could be scanned.
  std::vector<std::int64_t> bad_local_gradients() {
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

  /// The owner of an armed trace that waits for a bad step. There is one trace per process, and a
  /// step that is bad now has priority. Training threads only, one at a time.
  static inline Impl* waiting = nullptr;

  ~Impl() { stop_tracing(); }

  void stop_tracing() noexcept {
    standing.reset();
    if (waiting == this) waiting = nullptr;
  }

  /// Null, with a note, if another optimizer of this process traces all its steps.
  std::unique_ptr<OperatorTrace> make_trace(TraceOptions options = {}) {
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

  struct Traced {
    Pass pass;
    std::optional<Explanation> explanation;
    std::vector<UnorderedAccess> unordered;
    bool has_overlap = false;            // operators ran during transfers between ranks
    std::vector<Concurrent> concurrent;  // with bad tensors of the first pass
    std::vector<ThreadOrder> thread_orders;
  };

  /// One pass under its own trace, explained if it is bad.
  Traced run_traced(std::optional<double> fresh_memory = {}) {
    Traced traced;
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
      traced.explanation = trace->explain(pass.losses, named(bad));
      if (pass.has_first_positions) return;
      for (auto& each : traced.explanation->births) each.birth.sighting.position.reset();
    });
    if (trace) {
      traced.unordered = trace->unordered_accesses();
      traced.has_overlap = trace->has_overlap();
      traced.thread_orders = trace->thread_orders();
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

  // Results so far of the current re-run.
  Traced latest;
  Rerun known;

  Traced run_eagerly() {
    const Switched eager(framework.get(), &Framework::set_eager);
    return run_traced();
  }

  /// The same on all ranks.
  bool may_be_race(bool is_seen_here) {
    return framework->can_serialise() && locator.is_true_anywhere(is_seen_here);
  }

  /// Passes without any work during transfers or kernels. If the step is finite in all of them and
  /// bad otherwise, it had a race. False if one of them ended early.
  bool run_serialised(Rerun& rerun) {
    constexpr int kPasses = 2;
    const Switched serialised(framework.get(), &Framework::set_serialised);
    for (int i = 0; i < kPasses; ++i) {
      const Pass pass = run(&StepPass::run);
      if (has_ended_early(pass)) {
        give_up();
        return false;
      }
      rerun.variants.push_back({RerunVariant::serialised, locator.is_true_anywhere(pass.is_bad)});
      if (rerun.variants.back().is_bad) break;
    }
    return true;
  }

  /// One pass under PyTorch's stream sanitizer, only if the run stops anyway, because its hooks
  /// stay in the process. It observes the step from Python and may itself fail, which is no error
  /// of the step. False if it has not left finite gradients.
  bool run_sanitised(Rerun& rerun) {
    const bool has_streams = locator.options().on_bad == Policy::stop && framework->has_streams();
    if (!locator.is_true_anywhere(has_streams)) return true;
    std::vector<UnorderedAccess> accesses;
    Pass pass = run([&](StepPass& again) {
      if (!has_streams) return again.run();
      std::vector<NamedTensor> losses;
      accesses = framework->sanitise_streams([&] { losses = again.run(); });
      return losses;
    });
    if (!pass.problem.empty()) pass.problem = "under the stream sanitizer: " + pass.problem;
    if (has_ended_early(pass)) {
      own_error = nullptr;
      give_up();
      return false;
    }
    const bool is_bad = locator.is_true_anywhere(pass.is_bad);
    rerun.variants.push_back({RerunVariant::sanitised, is_bad});
    if (!accesses.empty()) rerun.concurrent.push_back(Concurrent::stream);
    rerun.unordered.insert(rerun.unordered.end(), accesses.begin(), accesses.end());
    return !is_bad;
  }

  struct Ordered {
    bool has_come_here = false;  // the other order, on this rank
    bool has_come = false;       // on any rank
    bool is_bad = false;         // on any rank
  };

  /// One pass with `order` reversed, or unchanged if null. Empty if it ended early.
  std::optional<Ordered> run_ordered(const ThreadOrder* order, std::optional<double> fresh_memory) {
    TraceOptions options;
    options.keep_calls = false;
    options.fresh_memory = fresh_memory;
    if (order != nullptr) options.reordered = *order;
    const auto trace = make_trace(std::move(options));
    const Pass pass = run(&StepPass::run);
    if (has_ended_early(pass)) {
      give_up();
      return std::nullopt;
    }
    const bool has_come_here = trace && trace->has_reordered();
    const bool has_come = locator.is_true_anywhere(has_come_here);
    return Ordered{has_come_here, has_come, locator.is_true_anywhere(pass.is_bad)};
  }

  /// Reverses one by one the orders in which the step and other threads used the same memory, until
  /// one determines the outcome: a different outcome each time it is reversed, and the re-run's own
  /// outcome in between and afterwards. False if a pass ended early.
  bool run_reordered(const std::vector<ThreadOrder>& orders, std::optional<double> fresh_memory,
                     Rerun& rerun) {
    constexpr std::size_t kMostOrders = 8;
    constexpr int kRounds = 2;
    const bool was_bad = *rerun.reproduced;
    for (std::size_t i = 0; i < kMostOrders; ++i) {
      const ThreadOrder* order = i < orders.size() ? &orders[i] : nullptr;
      if (!locator.is_true_anywhere(order != nullptr)) return true;
      bool makes_outcome = true, has_come_here = false;
      for (int round = 0; round < kRounds && makes_outcome; ++round) {
        const auto turned = run_ordered(order, fresh_memory);
        if (!turned) return false;
        if (turned->has_come) rerun.variants.push_back({RerunVariant::reordered, turned->is_bad});
        has_come_here = turned->has_come_here;
        makes_outcome = turned->has_come && turned->is_bad != was_bad;
        if (!makes_outcome) break;
        const auto as_it_comes = run_ordered(nullptr, fresh_memory);
        if (!as_it_comes) return false;
        makes_outcome = as_it_comes->is_bad == was_bad;
      }
      if (!makes_outcome) continue;
      if (has_come_here) rerun.unordered.push_back(order->access);
      return true;
    }
    return true;
  }

  /// True for births that unwritten memory may explain: off the dispatcher, with inputs of unknown
  /// writers, or from finite values that were too large.
  static bool may_be_of_memory(const std::optional<Explanation>& explanation) {
    return explanation && std::ranges::any_of(explanation->births, [](const auto& traced) {
             const BirthKind kind = traced.birth.kind;
             return kind == BirthKind::opaque || kind == BirthKind::kernel ||
                    kind == BirthKind::inf;
           });
  }

  static bool has_unwritten(const std::optional<Explanation>& explanation) {
    return explanation && std::ranges::any_of(explanation->births, [](const auto& traced) {
             return traced.birth.kind == BirthKind::unwritten;
           });
  }

  enum class Outcome {
    ended_early,  // on some rank
    finite,
    bad,        // for a reason unrelated to the change
    explained,  // bad because of the change; its trace replaces the earlier one
  };

  /// A further pass with one change. If the outcome is `explained`, `traced` is replaced by it.
  Outcome run_variant(RerunVariant variant, Traced& traced, Rerun& rerun) {
    std::optional<double> fresh_memory;
    if (variant == RerunVariant::constant_memory) fresh_memory = 1;
    if (variant == RerunVariant::nan_memory) {
      fresh_memory = std::numeric_limits<double>::quiet_NaN();
    }
    Traced further = run_traced(fresh_memory);
    if (has_ended_early(further.pass)) {
      give_up();
      return Outcome::ended_early;
    }
    const bool is_bad = locator.is_true_anywhere(further.pass.is_bad);
    rerun.variants.push_back({variant, is_bad});
    if (!is_bad) return Outcome::finite;
    bool is_explained = false;
    if (variant == RerunVariant::nan_memory) {
      is_explained = locator.is_true_anywhere(has_unwritten(further.explanation));
    } else if (variant == RerunVariant::compiled) {  // an intermittent fault is not the compiler's
      const Pass once_more = run(&StepPass::run);
      if (has_ended_early(once_more)) {
        give_up();
        return Outcome::ended_early;
      }
      is_explained = locator.is_true_anywhere(once_more.is_bad);
      rerun.variants.push_back({variant, is_explained});
    }
    if (!is_explained) {
      if (variant == RerunVariant::constant_memory) leave_out_garbage(traced, further);
      return Outcome::bad;
    }
    traced = std::move(further);
    return Outcome::explained;
  }

  /// Removes harmless garbage: bad content of fresh memory. `further`, in which that content was
  /// finite, is still bad because of the other births. DeepSpeed sends such padding to other ranks.
  void leave_out_garbage(Traced& traced, const Traced& further) {
    std::vector<bool> is_garbage;
    if (traced.explanation) {
      for (const TracedBirth& each : traced.explanation->births) {
        is_garbage.push_back(each.birth.last_seen == LastSeen::allocated &&
                             !has_birth(further.explanation, each.birth));
      }
    }
    const bool is_all = std::ranges::find(is_garbage, false) == is_garbage.end();
    if (locator.is_true_anywhere(!is_all)) leave_out(traced.explanation, is_garbage);
  }

  /// True if there is such a birth at the same place of the program, with the same history of
  /// memory.
  static bool has_birth(const std::optional<Explanation>& explanation, const Birth& birth) {
    return explanation && std::ranges::any_of(explanation->births, [&](const TracedBirth& each) {
             const Birth& other = each.birth;
             return other.kind == birth.kind && other.last_seen == birth.last_seen &&
                    other.writer == birth.writer && other.reader == birth.reader &&
                    other.inside == birth.inside && other.stack == birth.stack &&
                    other.sighting.op == birth.sighting.op &&
                    other.sighting.module == birth.sighting.module;
           });
  }

  /// Removes these births; a birth whose parent is removed loses it.
  static void leave_out(std::optional<Explanation>& explanation, const std::vector<bool>& these) {
    if (!explanation) return;
    std::vector<std::optional<int>> places;
    std::vector<TracedBirth> left;
    for (std::size_t i = 0; i < these.size(); ++i) {
      places.push_back(these[i] ? std::nullopt : std::optional(static_cast<int>(left.size())));
      if (!these[i]) left.push_back(std::move(explanation->births[i]));
    }
    for (TracedBirth& each : left) {
      auto& parent = each.birth.parent;
      if (parent) parent = places[static_cast<std::size_t>(*parent)];
    }
    explanation->masked += static_cast<std::int64_t>(these.size() - left.size());
    explanation->births = std::move(left);
  }

  [[nodiscard]] std::vector<NamedTensor> named(const std::vector<GradientView>& views) const {
    std::vector<NamedTensor> named;
    for (const auto& view : views) {
      named.push_back({locator.map().at(view.parameter).name, view.tensor});
    }
    return named;
  }

  bool has_ended_early(const Pass& pass) {
    if (!pass.error) return locator.has_rerun_ended_early();
    if (is_failure_own) own_error = pass.error;
    locator.rerun_has_failed(pass.problem);
    try {
      return locator.has_rerun_ended_early();
    } catch (const AgreementError& silence) {  // the verdict names the lost rank
      (void)locator.conclude_alone(silence.what(), Failure::of_peers);
      std::rethrow_exception(pass.error);
    }
  }

  /// Gradients of an incomplete pass must not be used.
  void give_up() {
    try {
      step->clear_gradients();
      locator.add_note("The gradients were cleared, as the re-run did not complete.");
    } catch (const std::exception& error) {
      locator.add_note(std::string("The gradients could not be cleared: ") + error.what());
    }
  }

  /// Asks about the first birth that peers may know about: an operator's output, whose inputs came
  /// from collectives, or a weight, which peers may hold copies of.
  void ask_peers(const Explanation& explanation) {
    for (const auto& traced : explanation.births) {
      const Birth& birth = traced.birth;
      const bool is_computed = birth.kind == BirthKind::nan || birth.kind == BirthKind::inf ||
                               birth.kind == BirthKind::nan_from_inf;
      const bool is_weight = birth.kind == BirthKind::weight && birth.sighting.stats.first_bad >= 0;
      if (!is_computed && !is_weight) continue;
      PeerQuestion question{.rank = locator.map().coordinates().rank,
                            .microbatch = birth.sighting.microbatch,
                            .parameter = {}};
      if (is_weight) {
        question.parameter = birth.sighting.parameter;
        question.element = birth.sighting.stats.first_bad;
      }
      locator.ask_peers(question);
      return;
    }
  }

  /// False for a weight in shards: another rank's element index has a different meaning.
  bool is_whole(const std::string& name) const {
    const auto* const parameter = locator.map().find(name);
    return parameter == nullptr || parameter->shard_group == RankList();
  }

  void answer(const PeerQuestion& question) {
    std::vector<CollectiveResult> results;
    if (boundaries) results = boundaries->take_results();
    std::vector<WeightValue> weights;
    try {
      for (const auto& [name, tensor] : framework->parameters()) {
        const bool is_asked_for = name == question.parameter && !name.empty() &&
                                  why_not_scannable(tensor) == nullptr && is_whole(name) &&
                                  question.element < tensor.numel();
        if (!is_asked_for) continue;
        const at::NoGradGuard no_grad;
        const auto value = tensor.reshape({-1})[question.element].item<double>();
        weights.push_back({name, question.element, value});
      }
    } catch (const std::exception& error) {
      locator.add_note("The weight " + question.parameter +
                       " could not be compared with another rank's: " + first_line(error));
    }
    locator.set_answers(std::move(weights), std::move(results));
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
      births = keep_births(explanation, locator, locator.iteration(), *framework);
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
  return impl_->state;
}

void StepRerun::set_framework(std::shared_ptr<Framework> framework) {
  impl_->framework = std::move(framework);
  impl_->state.set_buffers([asked = impl_->framework] { return asked->buffers(); });
  if (is_tracing()) {
    stop_tracing();
    trace_from_now_on();
  }
}

void StepRerun::save() {
  if (impl_->locator.options().rerun != RerunPolicy::never) impl_->state.save();
}

std::exception_ptr StepRerun::take_error() noexcept {
  return std::exchange(impl_->own_error, nullptr);
}

bool StepRerun::is_running() const noexcept {
  return impl_->scanner != nullptr;
}

void StepRerun::scan(Phase phase, std::uint64_t group, std::string_view role,
                     std::span<const GradientView> views) {
  if (!is_running()) throw UsageError("StepRerun::scan: no re-run of a step is running.");
  impl_->scanned_by_owner.insert(phase);
  impl_->scanner->scan(phase, group, role, views);
}

void StepRerun::set_gradient_norm(double norm) {
  impl_->gradient_norm = norm;
}

void StepRerun::scan_before_change(std::span<const GradientView> views) {
  scan(impl_->framework->gradient_phase(), kOnlyGroup, "grad", views);
  impl_->are_gradients_changed = true;
}

void StepRerun::forget_scans() noexcept {
  impl_->scanned_by_owner.clear();
  impl_->are_gradients_changed = false;
}

bool StepRerun::run_again() {
  auto& impl = *impl_;
  auto& locator = impl.locator;
  const auto first = locator.scanned_gradients();
  impl.bad_at_first.clear();
  for (const auto& gradient : first) {
    if (!gradient.is_finite) impl.bad_at_first.insert(gradient.parameter);
  }
  locator.keep_first_pass();
  impl.own_error = nullptr;
  Rerun& rerun = impl.known = {};

  const auto go_on = c10::make_scope_exit([&, end = impl.state.end(), was_tracing = is_tracing()] {
    try {
      if (was_tracing) trace_from_now_on();
      impl.state.go_on_from(end);
    } catch (...) {
      // Training reports a failed device.
    }
  });
  impl.stop_tracing();  // one trace at a time
  // Every rank must take the same path from here, because a pass may contain collectives.
  const bool is_eager = locator.is_true_anywhere(impl.framework->has_compiled_parts());
  Impl::Traced& traced = impl.latest = is_eager ? impl.run_eagerly() : impl.run_traced();
  rerun.changed = count_changed(first, traced.pass.scanned);
  bool has_ended_early = impl.has_ended_early(traced.pass);
  bool is_of_compiled_code = false;
  bool is_bad_again = !has_ended_early && locator.is_true_anywhere(traced.pass.is_bad);
  if (has_ended_early) impl.give_up();
  auto outcome = Impl::Outcome::finite;
  if (is_eager && !has_ended_early) {
    rerun.variants.push_back({RerunVariant::eager, is_bad_again});
    if (!is_bad_again) {
      outcome = impl.run_variant(RerunVariant::compiled, traced, rerun);
      is_bad_again = is_of_compiled_code = outcome == Impl::Outcome::explained;
      has_ended_early = outcome == Impl::Outcome::ended_early;
    }
  }
  bool may_be_of_memory = !has_ended_early && !is_bad_again;
  if (is_bad_again && locator.is_true_anywhere(impl.may_be_of_memory(traced.explanation))) {
    outcome = impl.run_variant(RerunVariant::constant_memory, traced, rerun);
    may_be_of_memory = outcome == Impl::Outcome::finite;
  }
  if (may_be_of_memory) outcome = impl.run_variant(RerunVariant::nan_memory, traced, rerun);
  has_ended_early = has_ended_early || outcome == Impl::Outcome::ended_early;
  const bool is_memory_unwritten = may_be_of_memory && outcome == Impl::Outcome::explained;
  rerun.not_restored = impl.not_restored;
  rerun.gradients = static_cast<std::int64_t>(traced.pass.scanned.size());
  rerun.bad_parameters = traced.pass.bad_parameters;
  if (!has_ended_early) rerun.reproduced = is_bad_again || is_memory_unwritten;
  rerun.unordered = traced.unordered;
  rerun.concurrent = traced.concurrent;
  const auto& explanation = traced.explanation;
  if (!has_ended_early && is_bad_again && impl.may_be_race(!rerun.unordered.empty())) {
    has_ended_early = !impl.run_serialised(rerun);
  }
  if (!has_ended_early) {
    const bool is_run_eagerly = is_eager && !is_of_compiled_code;
    const Switched eager(is_run_eagerly ? impl.framework.get() : nullptr, &Framework::set_eager);
    has_ended_early = !impl.run_reordered(
        traced.thread_orders,
        is_memory_unwritten ? std::optional(std::numeric_limits<double>::quiet_NaN())
                            : std::nullopt,
        rerun);
  }

  /// One more pass, in which the integration keeps the calls behind these births. False if it ended
  /// early.
  const auto keep_calls = [&](const std::vector<Birth>& births,
                              const std::optional<PeerQuestion>& question) {
    const bool is_kept_eagerly = is_eager && !is_of_compiled_code;
    const Switched eager(is_kept_eagerly ? impl.framework.get() : nullptr, &Framework::set_eager);
    const auto kept = impl.run([&](StepPass& again) {
      if (question && impl.boundaries) {
        // Counted as a new step: the ledger already has the first pass's observations.
        impl.boundaries->begin_step();
        impl.boundaries->keep_results(*question);
      }
      impl.framework->keep_calls(births, [&] { (void)again.run(); });
      return std::vector<NamedTensor>{};
    });
    const bool has_ended = impl.has_ended_early(kept);
    if (has_ended) impl.give_up();
    return !has_ended;
  };
  std::vector<Birth> births;
  if (explanation && impl.framework->keeps_calls()) births = births_of_kernels(*explanation);

  if (!has_ended_early && !is_bad_again) {
    const bool has_kernel = impl.framework->keeps_calls() && is_memory_unwritten &&
                            locator.is_true_anywhere(!births.empty());
    if (has_kernel) has_ended_early = !keep_calls(births, std::nullopt);
    bool are_gradients_finite = false;
    if (!has_ended_early) {
      const auto control = impl.run(&StepPass::run);
      if (impl.has_ended_early(control)) {
        impl.give_up();
      } else {
        rerun.control_reproduced = locator.is_true_anywhere(control.is_bad);
        rerun.not_restored = impl.not_restored;  // what varies by re-run is known now
        const bool has_streams = impl.framework->has_streams();
        const bool has_overlap =
            rerun.control_reproduced == true && impl.may_be_race(traced.has_overlap || has_streams);
        are_gradients_finite = (!has_overlap || impl.run_serialised(rerun)) &&
                               impl.run_sanitised(rerun) && !*rerun.control_reproduced;
      }
    }
    if (are_gradients_finite) {
      locator.add_note("The gradients in memory are now the finite ones of the re-run.");
    }
  } else if (!has_ended_early && impl.framework->keeps_calls()) {
    if (explanation && !is_memory_unwritten) {
      impl.ask_peers(*explanation);
      const auto computed = births_with_calls(*explanation);
      births.insert(births.end(), computed.begin(), computed.end());
    }
    const bool has_call = locator.is_true_anywhere(!births.empty());
    const auto question = locator.peer_question();
    const bool has_ended = has_call && !keep_calls(births, question);
    if (question && !has_ended) impl.answer(*question);
  }
  const bool is_clean_now = rerun.control_reproduced == false;
  locator.set_rerun(rerun);
  if (explanation) impl.keep(*explanation);
  return is_clean_now;
}

bool StepRerun::rerun_or_trace(BadStep bad) {
  auto& impl = *impl_;
  const auto& options = impl.locator.options();
  const bool is_past_limit = impl.locator.incidents() >= options.max_incidents;
  if (is_past_limit && options.on_bad != Policy::recover) return false;
  if (options.rerun != RerunPolicy::never && bad.can_rerun == CanRerun::yes) {
    bad.results.clear();  // frees the first pass's gradients before the second pass
    impl.step = std::move(bad.pass);
    impl.boundaries = std::move(bad.boundaries);
    const auto forget = c10::make_scope_exit([&] {
      impl.latest = {};
      impl.boundaries.reset();
      impl.step.reset();
    });
    try {
      return run_again();
    } catch (const AgreementError& error) {  // a rank was lost between two passes
      Pass lost;
      lost.problem = first_line(error);
      lost.error = std::current_exception();
      impl.is_failure_own = false;
      impl.locator.set_rerun(impl.known);
      if (impl.latest.explanation) impl.publish(*impl.latest.explanation);
      (void)impl.has_ended_early(lost);
      impl.give_up();
      if (impl.latest.explanation) impl.keep(*impl.latest.explanation);
    }
    return false;
  }
  if (impl.standing) {
    impl.keep(impl.standing->explain({}, impl.named(bad.results)));
    if (options.level != Level::operators) impl.stop_tracing();
    return false;
  }
  if (options.rerun == RerunPolicy::never) return false;
  trace_from_now_on();
  if (!impl.standing) return false;
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
  if (!impl_->standing) impl_->standing = impl_->make_trace();
  if (impl_->standing) Impl::waiting = impl_.get();
  impl_->traced_steps = 0;
}

void StepRerun::stop_tracing() noexcept {
  impl_->stop_tracing();
}

bool StepRerun::is_tracing() const noexcept {
  return impl_->standing != nullptr;
}

void StepRerun::begin_pass() {
  if (!impl_->standing) return;
  impl_->standing->begin_pass();
  const bool is_asked_for = impl_->locator.options().level == Level::operators;
  if (!is_asked_for && ++impl_->traced_steps > kMostTracedSteps) stop_tracing();
}

void StepRerun::begin_update() {
  if (!impl_->standing) return;
  if (impl_->locator.options().check_params) {
    impl_->standing->enter_phase(Phase::params_after);
  } else {
    impl_->standing->pause();
  }
}

void StepRerun::end_update() {
  if (!impl_->standing) return;
  impl_->standing->enter_phase(std::nullopt);
  impl_->standing->resume();
}

std::int64_t StepRerun::compare(std::shared_ptr<StepPass> pass) {
  auto& impl = *impl_;
  impl.step = std::move(pass);
  const auto forget = c10::make_scope_exit([&] { impl.step.reset(); });
  const auto first = impl.locator.scanned_gradients();
  const auto end = impl.state.end();
  Pass second;
  {
    const auto trace = impl.standing ? nullptr : impl.make_trace();  // as in a bad step's re-run
    second = impl.run(&StepPass::run);
  }
  if (!second.problem.empty()) {
    throw Error("The re-run of the step ended with an error: " + second.problem);
  }
  impl.state.go_on_from(end);
  return count_changed(first, second.scanned);
}

}  // namespace nanlocator::inline step_room
