#include "step/rerun_experiments.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "nanlocator/scan/dtype.hpp"
#include "step/birth_bundles.hpp"
#include "tensor/tensor_access.hpp"

namespace nanlocator::inline step_room {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

using Evidence = RerunEvidence;

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

/// Eager execution, if the pass that explains the step was executed eagerly.
Framework* framework_if_eager(const RerunPasses& passes, const Evidence& evidence) {
  return evidence.is_eager && !evidence.is_of_compiled_code ? passes.framework.get() : nullptr;
}

bool is_any_birth(const Evidence& evidence, bool (*is)(const Birth&)) {
  const auto& explanation = evidence.explaining.explanation;
  return explanation && std::ranges::any_of(explanation->births, is, &TracedBirth::birth);
}

/// True for NaN that a square or a product of large inputs may have made inside of the operator
/// (layer_norm gives no Inf): of a dtype in which such values are unusual, and no mask's limit.
bool may_be_of_large_inputs(const Birth& birth) {
  return birth.kind == BirthKind::nan &&
         std::ranges::any_of(birth.operands, [](const Operand& operand) {
           const auto largest = largest_finite(operand.dtype);
           return largest && *largest > 1e30 && operand.stats && operand.stats->has_finite() &&
                  operand.stats->absmax > std::sqrt(*largest) / 16 &&
                  operand.stats->absmax < 0.9 * *largest;
         });
}

/// True for births off the dispatcher, with inputs of unknown writers, or from finite values that
/// were too large.
bool may_be_of_memory(const Birth& birth) {
  return birth.kind == BirthKind::opaque || birth.kind == BirthKind::kernel ||
         birth.kind == BirthKind::inf || may_be_of_large_inputs(birth);
}

// --- is it bad again, and what with? ---

bool run_first(RerunPasses& passes, Evidence& evidence) {
  evidence.explaining = passes.run_traced();
  evidence.findings.changed = count_changed(passes.first_pass, evidence.explaining.pass.scanned);
  if (passes.has_ended_early(evidence.explaining.pass)) return false;
  evidence.is_bad_again = passes.locator.is_true_anywhere(evidence.explaining.pass.is_bad);
  if (!evidence.is_bad_again)
    evidence.explaining.explanation.reset();  // what was sent was harmless
  return true;
}

bool run_eagerly(RerunPasses& passes, Evidence& evidence) {
  evidence.is_eager = true;
  const Switched eager(passes.framework.get(), &Framework::set_eager);
  if (!run_first(passes, evidence)) return false;
  evidence.findings.variants.push_back({RerunVariant::eager, evidence.is_bad_again});
  return true;
}

/// A further traced pass with one change. Empty if it ended early.
std::optional<TracedPass> run_variant(RerunVariant variant, std::optional<double> fresh_memory,
                                      RerunPasses& passes, Evidence& evidence) {
  std::optional<TracedPass> further = passes.run_traced(fresh_memory);
  if (passes.has_ended_early(further->pass)) return std::nullopt;
  const bool is_bad = passes.locator.is_true_anywhere(further->pass.is_bad);
  evidence.findings.variants.push_back({variant, is_bad});
  return further;
}

/// Twice: an intermittent fault is not the compiler's.
bool run_compiled(RerunPasses& passes, Evidence& evidence) {
  auto further = run_variant(RerunVariant::compiled, {}, passes, evidence);
  if (!further) return false;
  auto& variants = evidence.findings.variants;
  if (!variants.back().is_bad) return true;
  const Pass once_more = passes.run(&StepPass::run);
  if (passes.has_ended_early(once_more)) return false;
  variants.push_back({RerunVariant::compiled, passes.locator.is_true_anywhere(once_more.is_bad)});
  if (!variants.back().is_bad) return true;
  evidence.explaining = std::move(*further);
  evidence.is_bad_again = evidence.is_of_compiled_code = true;
  return true;
}

/// True if there is such a birth at the same place of the program, with the same history of
/// memory.
bool has_birth(const std::optional<Explanation>& explanation, const Birth& birth) {
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
void leave_out(std::optional<Explanation>& explanation, const std::vector<bool>& these) {
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

/// Removes harmless garbage: bad content of fresh memory. `further`, in which that content was
/// finite, is still bad because of the other births. DeepSpeed sends such padding to other ranks.
void leave_out_garbage(TracedPass& traced, const TracedPass& further, GradientLocator& locator) {
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

bool run_with_constant_memory(RerunPasses& passes, Evidence& evidence) {
  const auto further = run_variant(RerunVariant::constant_memory, 1.0, passes, evidence);
  if (!further) return false;
  evidence.is_finite_if_constant = !evidence.findings.variants.back().is_bad;
  if (!evidence.is_finite_if_constant) {
    leave_out_garbage(evidence.explaining, *further, passes.locator);
  }
  return true;
}

bool run_with_nan_memory(RerunPasses& passes, Evidence& evidence) {
  auto further = run_variant(RerunVariant::nan_memory, kNan, passes, evidence);
  if (!further) return false;
  if (!evidence.findings.variants.back().is_bad) return true;
  const auto& explanation = further->explanation;
  const bool has_unwritten =
      explanation && std::ranges::any_of(explanation->births, [](const TracedBirth& traced) {
        return traced.birth.kind == BirthKind::unwritten;
      });
  evidence.is_memory_unwritten = passes.locator.is_true_anywhere(has_unwritten);
  if (evidence.is_memory_unwritten) evidence.explaining = std::move(*further);
  return true;
}

// --- does an order decide? ---

/// Passes without any work during transfers or kernels. If the step is finite in all of them and
/// bad otherwise, it had a race.
bool run_serialised(RerunPasses& passes, Evidence& evidence) {
  constexpr int kPasses = 2;
  auto& variants = evidence.findings.variants;
  const Switched serialised(passes.framework.get(), &Framework::set_serialised);
  for (int i = 0; i < kPasses; ++i) {
    const Pass pass = passes.run(&StepPass::run);
    if (passes.has_ended_early(pass)) return false;
    variants.push_back({RerunVariant::serialised, passes.locator.is_true_anywhere(pass.is_bad)});
    if (variants.back().is_bad) break;
  }
  return true;
}

struct Ordered {
  bool has_come_here = false;  // the other order, on this rank
  bool has_come = false;       // on any rank
  bool is_bad = false;         // on any rank
};

/// One pass with `order` reversed, or unchanged if null. Empty if it ended early.
std::optional<Ordered> run_ordered(const ThreadOrder* order, RerunPasses& passes,
                                   const Evidence& evidence) {
  TraceOptions options;
  options.keep_calls = false;
  if (evidence.is_memory_unwritten) options.fresh_memory = kNan;
  if (order != nullptr) options.reordered = *order;
  const auto trace = passes.make_trace(std::move(options));
  const Pass pass = passes.run(&StepPass::run);
  if (passes.has_ended_early(pass)) return std::nullopt;
  const bool has_come_here = trace && trace->has_reordered();
  const bool has_come = passes.locator.is_true_anywhere(has_come_here);
  return Ordered{has_come_here, has_come, passes.locator.is_true_anywhere(pass.is_bad)};
}

/// Reverses one by one the orders in which the step and other threads used the same memory, until
/// one determines the outcome: a different outcome each time it is reversed, and the re-run's own
/// outcome in between and afterwards.
bool run_reordered(RerunPasses& passes, Evidence& evidence) {
  constexpr std::size_t kMostOrders = 8;
  constexpr int kRounds = 2;
  const Switched eager(framework_if_eager(passes, evidence), &Framework::set_eager);
  auto& findings = evidence.findings;
  const auto& orders = evidence.explaining.thread_orders;
  const bool was_bad = *findings.reproduced;
  for (std::size_t i = 0; i < kMostOrders; ++i) {
    const ThreadOrder* order = i < orders.size() ? &orders[i] : nullptr;
    if (!passes.locator.is_true_anywhere(order != nullptr)) return true;
    bool makes_outcome = true, has_come_here = false;
    for (int round = 0; round < kRounds && makes_outcome; ++round) {
      const auto turned = run_ordered(order, passes, evidence);
      if (!turned) return false;
      if (turned->has_come) findings.variants.push_back({RerunVariant::reordered, turned->is_bad});
      has_come_here = turned->has_come_here;
      makes_outcome = turned->has_come && turned->is_bad != was_bad;
      if (!makes_outcome) break;
      const auto as_it_comes = run_ordered(nullptr, passes, evidence);
      if (!as_it_comes) return false;
      makes_outcome = as_it_comes->is_bad == was_bad;
    }
    if (!makes_outcome) continue;
    if (has_come_here) findings.unordered.push_back(order->access);
    return true;
  }
  return true;
}

// --- was it only once? ---

void note_not_restored(const RerunPasses& passes, Evidence& evidence) {
  auto& noted = evidence.findings.not_restored = passes.not_restored;
  if (!evidence.unseen_reads.empty()) noted.push_back(evidence.unseen_reads);
}

/// A pass without a trace.
bool run_control(RerunPasses& passes, Evidence& evidence) {
  const Pass control = passes.run(&StepPass::run);
  if (passes.has_ended_early(control)) return false;
  evidence.findings.control_reproduced = passes.locator.is_true_anywhere(control.is_bad);
  evidence.are_gradients_finite = evidence.findings.control_reproduced == false;
  note_not_restored(passes, evidence);  // what varies by re-run is known now
  const Pass& first = evidence.explaining.pass;
  if (evidence.are_gradients_finite && have_other_norms(first.scanned, control.scanned)) {
    evidence.findings.not_restored.emplace_back(
        "something unknown, by which the gradients of two re-runs differ");
  }
  return true;
}

/// Only if the run stops anyway, because the sanitizer's hooks stay in the process.
bool can_sanitise(const RerunPasses& passes) {
  return passes.locator.options().on_bad == Policy::stop && passes.framework->has_streams();
}

/// One pass under PyTorch's stream sanitizer, which observes the step from Python and may itself
/// fail; that is no error of the step.
bool run_sanitised(RerunPasses& passes, Evidence& evidence) {
  std::vector<UnorderedAccess> accesses;
  Pass pass = passes.run([&](StepPass& again) {
    if (!can_sanitise(passes)) return again.run();
    std::vector<NamedTensor> losses;
    accesses = passes.framework->sanitise_streams([&] { losses = again.run(); });
    return losses;
  });
  if (!pass.problem.empty()) pass.problem = "under the stream sanitizer: " + pass.problem;
  pass.is_failure_own = false;
  if (passes.has_ended_early(pass)) return false;
  auto& findings = evidence.findings;
  const bool is_bad = passes.locator.is_true_anywhere(pass.is_bad);
  findings.variants.push_back({RerunVariant::sanitised, is_bad});
  evidence.are_gradients_finite = evidence.are_gradients_finite && !is_bad;
  if (!accesses.empty()) findings.concurrent.push_back(Concurrent::stream);
  findings.unordered.insert(findings.unordered.end(), accesses.begin(), accesses.end());
  return true;
}

// --- what is kept for the bundles, and for peers ---

/// Asks about the first birth that peers may know about: an operator's output, whose inputs came
/// from collectives, or a weight, which peers may hold copies of.
void ask_peers(const Explanation& explanation, GradientLocator& locator) {
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
bool is_whole(const std::string& name, const ParameterMap& map) {
  const auto* const parameter = map.find(name);
  return parameter == nullptr || parameter->shard_group == RankList();
}

void answer(const PeerQuestion& question, RerunPasses& passes) {
  constexpr std::int64_t kSamples = 8;
  std::vector<CollectiveResult> results;
  if (passes.boundaries) results = passes.boundaries->take_results();
  std::vector<WeightValue> weights;
  try {
    for (const auto& [name, tensor] : passes.framework->parameters()) {
      const bool is_asked_for =
          name == question.parameter && !name.empty() && why_not_scannable(tensor) == nullptr &&
          is_whole(name, passes.locator.map()) && question.element < tensor.numel();
      if (!is_asked_for) continue;
      const at::NoGradGuard no_grad;
      const at::Tensor elements = tensor.reshape({-1});
      const auto add = [&](std::int64_t element) {
        weights.push_back({name, element, elements[element].item<double>()});
      };
      add(question.element);
      // By these it is seen whether the ranks hold copies of one weight.
      const std::int64_t last = tensor.numel() - 1;
      for (std::int64_t i = 0; i < kSamples; ++i) add(i * last / (kSamples - 1));
    }
  } catch (const std::exception& error) {
    passes.locator.add_note("The weight " + question.parameter +
                            " could not be compared with another rank's: " + first_line(error));
  }
  passes.locator.set_answers(std::move(weights), std::move(results));
}

std::vector<Birth> births_of_kernel_calls(const Evidence& evidence) {
  const auto& explanation = evidence.explaining.explanation;
  return explanation ? births_of_kernels(*explanation) : std::vector<Birth>{};
}

/// One more pass, in which the integration keeps the calls behind these births, and what this rank
/// receives, if a peer asks for it.
bool keep_calls_of(const std::vector<Birth>& births, const std::optional<PeerQuestion>& question,
                   RerunPasses& passes, const Evidence& evidence) {
  const Switched eager(framework_if_eager(passes, evidence), &Framework::set_eager);
  const Pass kept = passes.run([&](StepPass& again) {
    if (question && passes.boundaries) {
      // Counted as a new step: the ledger already has the first pass's observations.
      passes.boundaries->begin_step();
      passes.boundaries->keep_results(*question);
    }
    passes.framework->keep_calls(births, [&] { (void)again.run(); });
    return std::vector<NamedTensor>{};
  });
  return !passes.has_ended_early(kept);
}

bool keep_kernel_calls(RerunPasses& passes, Evidence& evidence) {
  return keep_calls_of(births_of_kernel_calls(evidence), std::nullopt, passes, evidence);
}

bool keep_calls(RerunPasses& passes, Evidence& evidence) {
  const auto& explanation = evidence.explaining.explanation;
  std::vector<Birth> births = births_of_kernel_calls(evidence);
  if (explanation && !evidence.is_memory_unwritten) {
    ask_peers(*explanation, passes.locator);
    const auto computed = births_with_calls(*explanation);
    births.insert(births.end(), computed.begin(), computed.end());
  }
  const bool has_call = passes.locator.is_true_anywhere(!births.empty());
  const auto question = passes.locator.peer_question();
  if (has_call && !keep_calls_of(births, question, passes, evidence)) return false;
  if (question) answer(*question, passes);
  return true;
}

// --- the tables ---

/// A further pass, or several that are judged together.
struct Experiment {
  /// The same on all ranks.
  bool (*is_due)(const RerunPasses&, const Evidence&);
  /// True if this rank needs it; if one does, all take part. Null: all need it.
  bool (*is_needed_here)(const RerunPasses&, const Evidence&);
  /// False, on all ranks, if a pass ended early.
  bool (*run)(RerunPasses&, Evidence&);
};

/// Is the step bad again: as it is, as compiled code, because of memory that it did not write?
constexpr Experiment kReproducing[] = {
    {[](const RerunPasses&, const Evidence&) { return true; },
     [](const RerunPasses& passes, const Evidence&) {
       return passes.framework->has_compiled_parts() && !passes.step->repeats_compiled_code();
     },
     run_eagerly},
    {[](const RerunPasses&, const Evidence& evidence) { return !evidence.is_eager; }, nullptr,
     run_first},
    {[](const RerunPasses&, const Evidence& evidence) {
       return evidence.is_eager && !evidence.is_bad_again;
     },
     nullptr, run_compiled},
    {[](const RerunPasses&, const Evidence& evidence) { return evidence.is_bad_again; },
     [](const RerunPasses&, const Evidence& evidence) {
       return is_any_birth(evidence, may_be_of_memory);
     },
     run_with_constant_memory},
    {[](const RerunPasses&, const Evidence& evidence) {
       return !evidence.is_bad_again || evidence.is_finite_if_constant;
     },
     nullptr, run_with_nan_memory},
};

/// If it is: because of an order, and what else is needed to tell. If it is not: was it the order,
/// the trace, or only once?
constexpr Experiment kExplaining[] = {
    {[](const RerunPasses& passes, const Evidence& evidence) {
       return evidence.is_bad_again && passes.framework->can_serialise();
     },
     [](const RerunPasses&, const Evidence& evidence) {
       return !evidence.explaining.unordered.empty();
     },
     run_serialised},
    {[](const RerunPasses&, const Evidence&) { return true; }, nullptr, run_reordered},
    {[](const RerunPasses& passes, const Evidence& evidence) {
       return evidence.is_bad_again && passes.framework->keeps_calls();
     },
     nullptr, keep_calls},
    {[](const RerunPasses& passes, const Evidence& evidence) {
       return !evidence.is_bad_again && evidence.is_memory_unwritten &&
              passes.framework->keeps_calls();
     },
     [](const RerunPasses&, const Evidence& evidence) {
       return !births_of_kernel_calls(evidence).empty();
     },
     keep_kernel_calls},
    {[](const RerunPasses&, const Evidence& evidence) { return !evidence.is_bad_again; }, nullptr,
     run_control},
    {[](const RerunPasses& passes, const Evidence& evidence) {
       return evidence.findings.control_reproduced == true && passes.framework->can_serialise();
     },
     [](const RerunPasses& passes, const Evidence& evidence) {
       return evidence.explaining.has_overlap || passes.framework->has_streams();
     },
     run_serialised},
    {[](const RerunPasses&, const Evidence& evidence) { return !evidence.is_bad_again; },
     [](const RerunPasses& passes, const Evidence&) { return can_sanitise(passes); },
     run_sanitised},
};

/// Every rank takes the same path, because a pass may contain collectives. False if a pass ended
/// early.
bool run_all(std::span<const Experiment> experiments, RerunPasses& passes, Evidence& evidence) {
  for (const Experiment& each : experiments) {
    if (!each.is_due(passes, evidence)) continue;
    const bool is_needed = each.is_needed_here == nullptr ||
                           passes.locator.is_true_anywhere(each.is_needed_here(passes, evidence));
    if (is_needed && !each.run(passes, evidence)) return false;
  }
  return true;
}

}  // namespace

bool run_experiments(RerunPasses& passes, RerunEvidence& evidence) {
  const bool is_known = run_all(kReproducing, passes, evidence);
  if (is_known && !evidence.is_bad_again && !evidence.is_memory_unwritten) {
    evidence.unseen_reads = passes.step->unseen_reads();
  }
  const TracedPass& explaining = evidence.explaining;
  Rerun& findings = evidence.findings;
  note_not_restored(passes, evidence);
  findings.without_reduction = passes.step->leaves_out_reduction();
  findings.gradients = static_cast<std::int64_t>(explaining.pass.scanned.size());
  findings.bad_parameters = explaining.pass.bad_parameters;
  findings.unordered = explaining.unordered;
  findings.concurrent = explaining.concurrent;
  if (!is_known) return false;
  findings.reproduced = evidence.is_bad_again || evidence.is_memory_unwritten;
  return run_all(kExplaining, passes, evidence);
}

}  // namespace nanlocator::inline step_room
