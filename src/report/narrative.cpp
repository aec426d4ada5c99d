#include "nanlocator/report/narrative.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <limits>
#include <set>

#include "files/printable.hpp"
#include "files/text.hpp"
#include "nanlocator/record/collective_kind.hpp"
#include "nanlocator/report/sentences.hpp"
#include "record/operator_name.hpp"
#include "report/cause_text.hpp"
#include "report/checkpoint_orders.hpp"
#include "report/error_code.hpp"
#include "report/fact_text.hpp"
#include "report/orders.hpp"
#include "report/phrasebook.hpp"
#include "report/places.hpp"
#include "report/silent_orders.hpp"
#include "report/words.hpp"

namespace nanlocator::inline report_room {
namespace {

// ---- what happened ----

std::string values_of(const Origin& origin) {
  if (!origin.tensor) {
    return origin.phase == Phase::grad_norm ? "a gradient norm that is not finite (NaN or Inf)"
                                            : "NaN or Inf (non-finite)";
  }
  const OriginTensor& tensor = *origin.tensor;
  std::vector<std::string> parts;
  if (tensor.nan > 0) parts.emplace_back("NaN");
  if (tensor.pos_inf > 0) parts.emplace_back("Inf");
  if (tensor.neg_inf > 0) parts.emplace_back("-Inf");
  return (parts.empty() ? "NaN or Inf" : joined(parts)) + " (non-finite)";
}

std::string elements_of(const Origin& origin) {
  if (!origin.tensor) return "";
  const OriginTensor& tensor = *origin.tensor;
  const std::int64_t bad = tensor.nan + tensor.pos_inf + tensor.neg_inf;
  std::int64_t numel = 1;
  for (const std::int64_t size : tensor.shape) {
    if (__builtin_mul_overflow(numel, size, &numel)) return "";
  }
  if (bad == 0 || numel < 2) return "";
  if (bad == numel) return " in every element";
  std::string text = " in " + counted(bad) + " of " + counted(numel) + " elements";
  if (!tensor.first_bad_index.empty()) {
    text += (bad == 1 ? " (at " : " (first at ") + describe_shape(tensor.first_bad_index) + ")";
  }
  return text;
}

std::string operation_text(const Origin& origin) {
  const bool is_backward = origin.direction == Direction::backward;
  if (!origin.custom_function.empty()) {
    return (is_backward ? "the backward of " : "") + origin.custom_function;
  }
  if (is_backward && !origin.forward_op.empty()) {
    return "the backward of " + function_name_of(origin.forward_op);
  }
  if (origin.op.empty()) return origin.module.empty() ? "an operation" : "the module";
  if (function_of(origin.op) == "_to_copy" && origin.tensor && !origin.tensor->dtype.empty()) {
    return "the conversion to " + origin.tensor->dtype;
  }
  return collective_kind_of(origin.op) ? collective_name_of(origin.op)
                                       : function_name_of(origin.op);
}

std::string in_place(const Origin& origin) {
  if (!origin.module.empty()) {
    const bool is_named = origin.direction != Direction::backward || !origin.forward_op.empty() ||
                          !origin.custom_function.empty();
    const bool is_number = origin.module.find_first_not_of("0123456789.") == std::string::npos;
    return (is_named ? " in " : " in the backward of ") + std::string(is_number ? "module " : "") +
           origin.module;
  }
  switch (origin.phase) {
    case Phase::loss:
      return " in the loss";
    case Phase::grad_local:
    case Phase::grad_reduced:
    case Phase::grad_norm: {
      const std::string when = origin.phase == Phase::grad_local     ? " before their reduction"
                               : origin.phase == Phase::grad_reduced ? " after their reduction"
                                                                     : "";
      return origin.parameter.empty() ? " in the gradients" + when
                                      : " in the gradient of " + origin.parameter;
    }
    case Phase::params_after:
      return origin.parameter.empty() ? " in the optimizer's update"
                                      : " in " + origin.parameter + " after the update";
    default:
      return "";
  }
}

/// "an all-reduce of ranks 2 and 6".
std::string group_of(const Verdict& verdict, const Origin& origin) {
  if (origin.facts.empty()) return "a collective";
  const Fact* const differing = find_fact(origin.facts, FactKind::members_got_other_values);
  const Fact& seen = differing != nullptr ? *differing : origin.facts.front();
  const std::string op = !seen.op.empty() ? seen.op : origin.op;
  std::string text = origin.phase == Phase::grad_reduced && op.empty()
                         ? "the reduction of gradients"
                         : collective_name_of(op);
  std::set<int> members(seen.peers.begin(), seen.peers.end());
  members.insert(seen.ranks.begin(), seen.ranks.end());
  if (!seen.group.empty()) text += " (group " + seen.group + ")";
  if (members.size() < 2) return text;
  return text + " of " + ranks_place_of(verdict, {members.begin(), members.end()});
}

std::string peers_of(const Verdict& verdict, const Origin& origin) {
  const Fact* message = find_fact(origin.facts, FactKind::message_changed);
  if (message == nullptr) message = find_fact(origin.facts, FactKind::members_got_other_values);
  return message == nullptr ? "the sender" : ranks_place_of(verdict, message->peers);
}

std::string reached_of(const Verdict& verdict, const Origin& origin) {
  const Spread& spread = verdict.spread;
  if (spread.parameters.empty()) return "";
  const bool is_discarded = has_fact(origin.facts, FactKind::discarded);
  return std::string(is_discarded
                         ? "; the loss is finite all the same, but their backward reached the "
                           "gradients of "
                         : "; it reached the gradients of ") +
         count_text(spread.parameters.size(), "parameter") +
         (spread.ranks.size() > 1 ? " on " + count_text(spread.ranks.size(), "rank") : "");
}

/// " from step 30 to 35".
std::string climb_of(const Origin& origin) {
  const Fact* const climb = find_fact(origin.facts, FactKind::climbed);
  if (climb == nullptr || !climb->step || !climb->last_step) return "";
  return " from " + step_text(*climb->step) + " to " + std::to_string(*climb->last_step);
}

/// ", after the weights of the module had grown to 2.2e+26".
std::string growth_of(const Origin& origin) {
  const auto largest = largest_weight_of(origin);
  if (const Fact* const elsewhere = find_fact(origin.facts, FactKind::large_weight)) {
    return ", while " + elsewhere->parameter + " holds values as large as " +
           short_number(*largest);
  }
  return may_be_of_large_weights(origin) && largest
             ? ", after its weights had grown to " + short_number(*largest)
             : "";
}

/// The step before read it, and its loss and gradients were finite.
bool is_of_that_update(const Origin& origin) {
  const Fact* const fact = find_fact(origin.facts, FactKind::update_undefined);
  return fact != nullptr && fact->step.has_value();
}

std::string what_of(const Verdict& verdict, const Origin* origin) {
  const std::string code = error_code_of(verdict);
  if (origin == nullptr) return filled_phrase(code, "what", {});
  const bool has_reached =
      origin->phase != Phase::params_after && origin->cause != Cause::left_gradients;
  return filled_phrase(
             code, "what",
             {{"values", values_of(*origin)},
              {"elements", elements_of(*origin)},
              {"operation", operation_text(*origin)},
              {"in", in_place(*origin)},
              {"on", on_ranks(verdict, *origin)},
              {"dtype", origin->tensor && !origin->tensor->dtype.empty()
                            ? " of " + origin->tensor->dtype
                            : ""},
              {"when",
               origin->phase == Phase::params_after
                   ? ""
                   : " in " + step_text(origin->iteration - 1) +
                         (is_of_that_update(*origin) || origin->iteration <= 2 ? ""
                                                                               : " or before")},
              {"left_out", has_fact(origin->facts, FactKind::reduction_not_repeated)
                               ? ", which leaves out the program's own reduction of gradients"
                               : ""},
              {"climb", climb_of(*origin)},
              {"recorded",
               is_of_compiled_code(*origin)
                   ? "made in a kernel that torch.compile has fused: which operator is not known"
                   : "the operator was not recorded"},
              {"tensor", origin->tensor && !origin->tensor->shape.empty()
                             ? " (" + origin->tensor->dtype + " " +
                                   describe_shape(origin->tensor->shape) + ")"
                             : ""},
              {"who", ranks_place_of(verdict, origin->candidates)},
              {"parameter", origin->parameter.empty() ? "a parameter" : origin->parameter},
              {"group", group_of(verdict, *origin)},
              {"peers", peers_of(verdict, *origin)}}) +
         growth_of(*origin) + (has_reached ? reached_of(verdict, *origin) : "");
}

// ---- why it is believed ----

const char* same_machine(const Verdict& verdict, const Origin& origin) {
  const RankCoordinates* const known =
      origin.candidates.empty() ? nullptr : find_mentioned(verdict, origin.candidates.front());
  return known != nullptr && is_gpu(*known) ? "the same GPU" : "the same machine";
}

/// Before any operator of the step.
bool was_there(const Origin& origin) {
  return origin.cause == Cause::bad_weight || origin.cause == Cause::optimizer_state ||
         origin.cause == Cause::bad_buffer || origin.cause == Cause::bad_input;
}

/// Values that the job stores: who made them is open.
bool is_stored(const Origin& origin) {
  if (has_fact(origin.facts, FactKind::update_undefined)) return false;
  return was_there(origin) && origin.cause != Cause::bad_input &&
         origin.detail != Detail::made_earlier;
}

/// Found by executing the step again in another way, not as it was.
bool is_shown_by_variants(const Origin& origin) {
  return origin.cause == Cause::race || origin.cause == Cause::uninitialised_memory ||
         origin.cause == Cause::compiled_region;
}

/// "" for an outcome that says nothing about the cause.
std::string outcome_of_variant(const Fact& fact) {
  const bool is_bad = fact.kind == FactKind::variant_bad;
  const auto is_of = [&](RerunVariant variant) { return fact.variant == name_of(variant); };
  if (is_of(RerunVariant::constant_memory) && !is_bad)
    return "finite in a re-run that fills new memory with 1";
  if (is_of(RerunVariant::nan_memory) && is_bad)
    return "bad in a re-run that fills new memory with NaN";
  if (is_of(RerunVariant::eager) && !is_bad) return "finite without torch.compile";
  if (is_of(RerunVariant::compiled) && is_bad) return "bad again with it";
  if (is_of(RerunVariant::serialised) && !is_bad) {
    return "finite when each transfer and each operator is waited for";
  }
  if (is_of(RerunVariant::reordered)) {
    return std::string(is_bad ? "bad" : "finite") + " when the two lines run in the other order";
  }
  return "";
}

/// Threads took the order that gives the step's own outcome.
bool is_own_outcome(const Verdict& verdict, const Fact& fact) {
  return fact.variant == name_of(RerunVariant::reordered) && verdict.rerun.reproduced &&
         *verdict.rerun.reproduced == (fact.kind == FactKind::variant_bad);
}

/// The tests that the cause has passed, in few words; the most telling first.
std::vector<std::string> tests_of(const Verdict& verdict, const Origin& origin) {
  constexpr std::size_t kMost = 3;
  std::vector<std::string> tests;
  const std::string machine = same_machine(verdict, origin);
  for (const Fact& fact : ordered_facts(origin)) {
    // A re-run of values that were there before says nothing: it starts from them.
    const bool is_of_before = fact.kind == FactKind::copies_clean ||
                              fact.kind == FactKind::update_undefined ||
                              fact.kind == FactKind::optimizer_state_bad;
    if (was_there(origin) && !is_of_before) continue;
    if (origin.cause == Cause::empty_loss_mask) break;  // they would prove the division
    const bool is_of_variants = is_shown_by_variants(origin);
    switch (fact.kind) {
      case FactKind::variant_bad:
      case FactKind::variant_finite:
        if (is_own_outcome(verdict, fact)) break;
        if (std::string outcome = is_of_variants ? outcome_of_variant(fact) : "";
            !outcome.empty()) {
          tests.push_back(std::move(outcome));
        }
        break;
      case FactKind::sum_may_exceed_range:
        tests.insert(tests.begin(), "the largest values that the members put in add up to " +
                                        short_number(*fact.value) + ", and the largest " +
                                        fact.dtype + " is " + short_number(*fact.last_value));
        break;
      case FactKind::rerun_identical:
        if (has_fact(origin.facts, FactKind::transfer_not_run_again)) break;
        if (!is_of_variants)
          tests.push_back("a re-run on " + machine + " reproduced it bit for bit");
        break;
      case FactKind::rerun_differs:
        tests.push_back("a re-run on " + machine + " reproduced it");
        break;
      case FactKind::rerun_clean:
      case FactKind::gone_in_rerun:
        tests.push_back(has_fact(origin.facts, FactKind::reduction_not_repeated)
                            ? "the gradients were finite in a re-run on " + machine +
                                  ", which leaves out the program's own reduction"
                        : verdict.rerun.not_restored.empty()
                            ? "it was gone in a re-run on " + machine
                            : "it was gone in a re-run that may have lacked some of the program's "
                              "state, so that "
                              "says nothing about a machine");
        break;
      case FactKind::sum_near_overflow:
        tests.push_back("no NaN, and the largest finite element is close to the largest " +
                        fact.dtype);
        break;
      case FactKind::transfer_bad_again:
        tests.emplace_back("the transfer failed again when it was repeated");
        break;
      case FactKind::replayed:
        if (fact.conclusion == name_of(ReplayConclusion::deterministic_undefined)) {
          tests.emplace_back("this call alone reproduces it, also in float64");
        } else if (fact.conclusion == name_of(ReplayConclusion::deterministic_overflow)) {
          tests.emplace_back("this call alone reproduces it, and is finite in float64");
        } else if (fact.conclusion == name_of(ReplayConclusion::deterministic_kernel)) {
          tests.emplace_back("this call alone reproduces it, and is finite in another kernel");
        } else if (fact.conclusion == name_of(ReplayConclusion::varies)) {
          tests.emplace_back("this call alone gives another result each time");
        }
        break;
      case FactKind::copies_clean:
        tests.push_back(std::string(fact.peers.size() == 1 ? "the copy on " : "the copies on ") +
                        ranks_text(fact.peers) +
                        (fact.peers.size() == 1 ? " is finite" : " are finite"));
        break;
      case FactKind::peers_finite:
        tests.push_back(ranks_text(fact.peers) + " executed the same call and got finite values");
        break;
      case FactKind::update_undefined:
        tests.push_back(fact_text(fact));
        break;
      case FactKind::optimizer_state_bad:
        tests.push_back("the optimizer's " + joined(fact.names) + " of this parameter is bad, too");
        break;
      case FactKind::gradients_left:
        tests.push_back("they were there before its backward; the verdict of step " +
                        std::to_string(fact.step.value_or(0)) + " has what made them, and decides");
        break;
      case FactKind::rerun_not_completed:
        tests.emplace_back("a re-run did not complete");
        break;
      default:
        break;
    }
  }
  if (origin.cause == Cause::empty_loss_mask) {
    tests.emplace_back("no label of this batch counts, so its mean is 0 divided by 0");
  } else if (has_fact(origin.facts, FactKind::made_from_finite)) {
    tests.emplace_back("every input was finite");
  }
  std::vector<std::string> kept;
  for (std::string& each : tests) {
    if (kept.size() < kMost && std::ranges::find(kept, each) == kept.end()) {
      kept.push_back(std::move(each));
    }
  }
  return kept;
}

std::string kind_of(const Origin& origin) {
  if (origin.cause == Cause::unknown || origin.cause == Cause::not_reproduced ||
      (is_stored(origin) && origin.owner != Owner::cluster_operator)) {
    return "unknown";
  }
  if (origin.cause == Cause::empty_loss_mask) return "data";
  if (origin.cause == Cause::divergence) return "learning rate or data";
  const bool has_grown = origin.cause == Cause::operator_overflow &&
                         origin.action != Action::find_weight_writer &&
                         may_be_of_large_weights(origin);
  if (has_grown && has_fact(origin.facts, FactKind::learning_rate)) return "learning rate or code";
  switch (origin.owner) {
    case Owner::model_author:
    case Owner::framework:
    case Owner::vendor:
      return "code";
    case Owner::data:
      return "data";
    case Owner::cluster_operator:
      return "hardware";
    case Owner::nobody:
      return "routine";
    case Owner::unknown:
      return "unknown";
  }
  return "unknown";
}

/// What the alternatives of a machine include.
bool may_be_code(const Origin& origin) {
  constexpr std::array kOfCode = {Suspect::early_reuse, Suspect::collective, Suspect::kernel,
                                  Suspect::race};
  return std::ranges::any_of(origin.alternatives,
                             [&](Suspect each) { return std::ranges::count(kOfCode, each) > 0; });
}

/// Why a restart of the same may do; null if the decision is another one, or the tests say it.
const char* chance_of_restart(const Verdict& verdict, const Origin& origin) {
  const JobDecision& decision = verdict.decision;
  const bool is_of_program = was_there(origin) && origin.detail == Detail::made_earlier;
  if (decision.kind == DecisionKind::older_checkpoint && is_of_program) {
    return "a restart from finite values is worth one try";
  }
  if (decision.kind != DecisionKind::restart_as_is || decision.is_traced) return nullptr;
  switch (origin.cause) {
    case Cause::uninitialised_memory:
      return "a restart usually gets past it, as that memory is finite in most steps; the bug "
             "remains";
    case Cause::race:
      return "a restart has another timing";
    case Cause::left_gradients:
      return "a restart begins without them";
    case Cause::memory_corruption:
      return "a restart has another layout of memory, which a stray write may miss";
    default:
      return nullptr;
  }
}

bool is_elsewhere(const Verdict& verdict, const CheckpointFile& loaded) {
  return verdict.launch->loaded_elsewhere && &loaded == &*verdict.launch->loaded_elsewhere;
}

/// What its author is to look at.
std::vector<std::string> next_of(const Verdict& verdict, const Origin& origin) {
  const CheckpointFile* const loaded = loaded_and_read(verdict, origin);
  if (loaded == nullptr || origin.cause != Cause::bad_weight) return steps_text(origin);
  if (loaded->is_finite == true && has_fact(origin.facts, FactKind::bad_at_start)) {
    return steps_text(origin);
  }
  if (loaded->is_finite == false && is_elsewhere(verdict, *loaded)) {
    return {"find what wrote " + printable(loaded->name) + ", and load another"};
  }
  return {with_checked_updates(loaded->is_finite == true ? loaded->name
                                                         : "the one before " + loaded->name)};
}

std::string cause_of(const Verdict& verdict, const Origin& origin) {
  const CheckpointFile* const loaded = loaded_and_read(verdict, origin);
  if (loaded != nullptr && loaded->is_finite == false) {
    return "checkpoint, proven: " + loaded->name + ", which this run had loaded: " + loaded->found;
  }
  if (origin.detail == Detail::unrecorded) {
    return "unknown; bad data, or code that computed it before the first call of the model, which "
           "is "
           "not recorded in the first step";
  }
  if (origin.detail == Detail::rewritten) {
    return "unknown; bad data, or a buffer that was read before it was filled: a restart has "
           "another "
           "timing";
  }
  if (const Fact* const start = find_fact(origin.facts, FactKind::bad_at_start)) {
    const std::string when = ": " + fact_text(*start);
    if (loaded == nullptr) return "the code that initialises it, or the checkpoint" + when;
    return loaded->name +
           ", which this run had loaded, is finite, so it became bad in memory, by code that "
           "writes to "
           "it after the load or leaves it out" +
           when;
  }
  std::string kind = kind_of(origin);
  std::string open = suspects_text(origin);
  std::string label = "not ruled out: ";
  std::string certainty = origin.cause_confidence == Confidence::high     ? ", proven"
                          : origin.cause_confidence == Confidence::medium ? ", likely"
                                                                          : ", open";
  const bool is_of_writer = origin.cause == Cause::memory_corruption && kind == "code";
  if (is_of_writer || origin.alternatives == std::vector{Suspect::upstream}) label = "open: ";
  if (!origin.alternatives.empty() && certainty == ", proven") {
    certainty = ", likely";
  }
  const bool is_of_transfer =
      origin.cause == Cause::collective_result || origin.cause == Cause::pipeline_transfer;
  if (is_of_transfer && kind == "code") kind = "code or hardware";
  if (kind == "hardware" && may_be_code(origin)) {
    kind = origin.cause == Cause::bad_weight ? "hardware" : "hardware or code";
  }
  const bool is_open_kind = kind.find(" or ") != kind.npos && origin.cause != Cause::divergence;
  if (is_open_kind) certainty = ", open";
  if (kind == "unknown" || kind == "routine") certainty.clear();
  std::vector<std::string> parts = tests_of(verdict, origin);
  const Fact* const rate = find_fact(origin.facts, FactKind::learning_rate);
  if (rate != nullptr && kind.starts_with("learning rate"))
    parts.insert(parts.begin(), fact_text(*rate));
  if (loaded != nullptr) {
    parts.push_back(loaded->name +
                    ", which this run had loaded, is finite, so it became bad in memory");
  }
  const bool is_number = origin.tensor && origin.tensor->shape.empty() && is_conversion(origin);
  const bool is_said = (is_number || kind.starts_with("learning rate or code")) &&
                       origin.alternatives == std::vector{Suspect::upstream};
  if (!open.empty() && !is_said) parts.push_back(label + open);
  const bool is_open = certainty != ", proven";
  if (origin.detail == Detail::made_earlier) {
    parts.emplace_back("what the line below was given is not known");
  }
  if (parts.empty() && origin.cause == Cause::bad_input) {
    parts.emplace_back("it was there before any operator of the step read it");
  }
  if (parts.empty() && is_open && !verdict.rerun.done) {
    const std::string& why = verdict.rerun.why_not;
    parts.push_back("not tested: the step was not executed again" +
                    (why.empty() ? why : ", as " + why));
  }
  std::string text;
  if (origin.cause == Cause::collective_sum &&
      verdict.decision.kind == DecisionKind::restart_as_is) {
    certainty = ", open";
    text = "that reduction was not repeated, so one restart shows whether it comes again";
  }
  for (const std::string& part : parts) append_item(text, part, "; ");
  const char* const separator = kind == "unknown" ? "; " : ": ";
  const char* const chance = chance_of_restart(verdict, origin);
  return kind + certainty + (text.empty() ? "" : separator + text) +
         (chance == nullptr ? std::string() : std::string("; ") + chance);
}

std::string event_of(const Verdict& verdict) {
  std::string text;
  if (const auto& launch = verdict.launch) {
    if (!launch->found.empty()) append_item(text, launch->found + " UTC", " ");
    if (!launch->job_id.empty()) append_item(text, "job " + launch->job_id, " ");
    if (!launch->job_name.empty()) append_item(text, launch->job_name, " ");
  }
  append_item(text, step_text(verdict.iteration), ", ");
  return text;
}

// ---- what the author needs ----

std::string audience_of(const Verdict& verdict, const Origin& origin) {
  const JobDecision& decision = verdict.decision;
  const Owner reader = deciding_step(verdict)           ? origin.owner
                       : decision.page != Owner::nobody ? decision.page
                                                        : decision.ticket;
  switch (reader) {
    case Owner::model_author:
    case Owner::data:
    case Owner::framework:
    case Owner::vendor:
      return "for the " + person_of(reader);
    default:
      return "";
  }
}

/// The line is that of the forward call whose derivative is bad; not of a hook or of a backward
/// that the program wrote.
bool is_of_forward(const Origin& origin) {
  const Fact* const derivative = find_fact(origin.facts, FactKind::derivative_of);
  return origin.cause != Cause::user_hook && origin.custom_function.empty() &&
         derivative != nullptr && !derivative->op.empty();
}

std::string code_place_of(const Verdict& verdict, const Origin& origin) {
  const bool is_of_update =
      origin.cause == Cause::bad_weight && has_fact(origin.facts, FactKind::update_undefined);
  if (!origin.code || is_of_update) return "";  // where it was read first says nothing
  const bool is_only_read = (was_there(origin) && origin.detail != Detail::made_earlier) ||
                            origin.cause == Cause::memory_corruption;
  std::string text = (is_only_read ? "first read at " : "") + code_place(*origin.code);
  if (!origin.code->function.empty()) text += " in " + origin.code->function;
  switch (origin.phase) {
    case Phase::forward:
    case Phase::loss:
      text += ", forward";
      break;
    case Phase::backward:
      text += is_of_forward(origin) ? ", called in forward, bad in backward" : ", backward";
      break;
    default:
      break;
  }
  if (origin.microbatch) text += ", microbatch " + std::to_string(*origin.microbatch);
  const auto& ranks = origin.candidates;
  if (ranks.size() == 1 && verdict.layout && verdict.layout->first_rank.world_size > 1) {
    text += " (" + ranks_place_of(verdict, ranks) + ")";
  }
  return text;
}

/// Marks the expression below the line that is shown; "" if it is unknown, or the whole line.
std::string marker_of(const CodeLine& code) {
  if (!code.expression) return "";
  const auto begin = static_cast<std::size_t>(std::max(code.expression->begin, 0));
  const auto end = static_cast<std::size_t>(std::max(code.expression->end, 0));
  const bool is_plain = std::ranges::all_of(
      code.text, [](unsigned char each) { return each >= 0x20 && each < 0x7f; });
  const bool is_part = begin < end && end <= code.text.size() && end - begin < code.text.size();
  if (!is_plain || !is_part) return "";
  return std::string(std::to_string(code.line).size(), ' ') + " |  " + std::string(begin, ' ') +
         std::string(end - begin, '^');
}

/// Rounded, but not to the edge of a domain: 1.00000012.
std::string beside_one(double value) {
  const std::string text = short_number(value);
  const bool is_rounded_to_one = std::abs(value) != 1 && (text == "1" || text == "-1");
  return is_rounded_to_one ? number_text(value, 9) : text;
}

/// "size is 0, total is 0", by the names of the source line; "" where they are unknown.
std::string named_values_of(const Origin& origin) {
  const Fact* const fact = find_fact(origin.facts, FactKind::values_at_first_bad);
  const std::vector<std::string> names = argument_names_of(origin);
  std::vector<std::string> parts;
  for (std::size_t i = 0; i < names.size(); ++i) {
    const bool is_literal = names[i].find_first_not_of("+-.0123456789e_") == std::string::npos;
    if (!is_literal) parts.push_back(names[i] + " is " + beside_one(fact->values[i].second));
  }
  return joined(parts, ", ");
}

/// "it was given 1 element", of those that one result is made of; "" if that is not known.
std::string elements_given_to(const Origin& origin) {
  const Fact* const input = find_fact(origin.facts, FactKind::input);
  if (input == nullptr || !input->operand || input->operand->dtype.empty() || !origin.tensor)
    return "";
  std::int64_t elements = 1;
  for (const std::int64_t size : input->operand->shape) elements *= size;
  for (const std::int64_t size : origin.tensor->shape) elements /= std::max<std::int64_t>(size, 1);
  return "it was given " + count_text(static_cast<std::size_t>(elements), "element");
}

/// "size is 0, total is 0 at element [0, 3]".
std::string values_here_of(const Origin& origin) {
  const Fact* const values = find_fact(origin.facts, FactKind::values_at_first_bad);
  const bool is_of_masked =
      origin.detail == Detail::masked_row && origin.tensor && values != nullptr &&
      !values->values.empty() &&
      values->values.front().second == -std::numeric_limits<double>::infinity();
  if (is_of_masked) {
    return "every element of its row is -Inf, first at " +
           describe_shape(origin.tensor->first_bad_index);
  }
  if (origin.detail == Detail::too_few_elements || origin.detail == Detail::mean_of_nothing) {
    return elements_given_to(origin);
  }
  const std::string named = named_values_of(origin);
  const std::string call = named.empty() ? first_bad_call_of(origin) : named;
  if (call.empty() || !origin.tensor || origin.tensor->first_bad_index.empty()) return call;
  return call + " at element " + describe_shape(origin.tensor->first_bad_index);
}

/// Maxima of the steps before that explain nothing: of values that did not grow.
bool is_of_usual_size(const Origin& origin, const Fact& fact) {
  constexpr double kGrown = 10;
  const bool is_of_size =
      fact.kind == FactKind::weight_maxima || fact.kind == FactKind::gradient_maxima ||
      fact.kind == FactKind::weights_magnitude || fact.kind == FactKind::large_weight;
  if (!is_of_size || origin.cause != Cause::operator_undefined) return false;
  return fact.values.size() < 2 || fact.values.back().second < kGrown * fact.values.front().second;
}

/// The most telling sentences of the evidence that the block has not said.
std::vector<std::string> reasons_of(const Origin& origin) {
  constexpr std::size_t kMost = 2;
  // Said in the rows above, or of use only with all other evidence.
  constexpr std::array kLeftOut = {FactKind::rerun_identical,
                                   FactKind::rerun_clean,
                                   FactKind::rerun_differs,
                                   FactKind::gone_in_rerun,
                                   FactKind::rerun_not_completed,
                                   FactKind::replayed,
                                   FactKind::sum_may_exceed_range,
                                   FactKind::happened_once,
                                   FactKind::same_on_ranks,
                                   FactKind::values_at_first_bad,
                                   FactKind::input,
                                   FactKind::reached,
                                   FactKind::derivative_of,
                                   FactKind::copies_clean,
                                   FactKind::peers_finite,
                                   FactKind::members_got_the_same,
                                   FactKind::called_in_framework,
                                   FactKind::control_clean,
                                   FactKind::stated_action,
                                   FactKind::update_undefined,
                                   FactKind::became,
                                   FactKind::other_writers_possible,
                                   FactKind::learning_rate,
                                   FactKind::optimizer_state_bad,
                                   FactKind::bad_at_start,
                                   FactKind::loaded_last,
                                   FactKind::samples,
                                   FactKind::discarded};
  std::vector<std::string> reasons;
  for (const Fact& fact : ordered_facts(origin)) {
    const int place = place_of(fact);
    const bool is_said_or_other =
        (fact.kind == FactKind::variant_bad || fact.kind == FactKind::variant_finite) &&
        (!is_shown_by_variants(origin) || !outcome_of_variant(fact).empty());
    const bool is_of_copies =  // the update made every copy
        fact.kind == FactKind::no_copy_elsewhere &&
        (has_fact(origin.facts, FactKind::update_undefined) ||
         has_fact(origin.facts, FactKind::bad_at_start) ||
         has_fact(origin.facts, FactKind::loaded_last));
    const bool is_of_memory =  // its line is shown
        fact.kind == FactKind::allocated_not_written &&
        has_fact(origin.facts, FactKind::read_unwritten_memory);
    const bool is_of_any_sum =  // all members have it, and the re-run did not sum again
        origin.cause == Cause::collective_sum &&
        (fact.kind == FactKind::every_member_bad || fact.kind == FactKind::transfer_not_run_again);
    const bool is_of_before =  // the cause says it
        fact.kind == FactKind::made_before_pass && was_there(origin);
    const bool is_left_out = is_said_or_other || is_of_before || is_of_copies || is_of_memory ||
                             is_of_any_sum || place == 0 || place > 4 ||
                             is_of_usual_size(origin, fact) || fact.source != FactSource::origin ||
                             std::ranges::count(kLeftOut, fact.kind) > 0;
    if (!is_left_out && reasons.size() < kMost) reasons.push_back(fact_text(fact));
  }
  return reasons;
}

/// The first one has the label.
void add_rows(Rows& rows, const char* label, std::vector<std::string> texts) {
  for (std::string& text : texts) {
    rows.emplace_back(&text == &texts.front() ? label : "", std::move(text));
  }
}

void add_details(const Verdict& verdict, const Origin& origin, std::string_view run_dir,
                 Narrative& narrative) {
  narrative.audience = audience_of(verdict, origin);
  narrative.place = code_place_of(verdict, origin);
  if (!narrative.place.empty() && !origin.code->text.empty()) {
    narrative.source = std::to_string(origin.code->line) + " |  " + origin.code->text;
    narrative.marker = marker_of(*origin.code);
  }
  for (std::size_t i = 0; i < std::min<std::size_t>(2, verdict.decision.ranks.size()); ++i) {
    const RankCoordinates* const known = find_mentioned(verdict, verdict.decision.ranks[i]);
    if (known != nullptr && is_gpu(*known)) {
      narrative.details.emplace_back("device", known->describe());
    }
  }
  const Fact* const unwritten = find_fact(origin.facts, FactKind::read_unwritten_memory);
  if (unwritten != nullptr && unwritten->code) {
    const CodeLine& code = *unwritten->code;
    add_row(narrative.details, "memory",
            "allocated at " + code_place(code) +
                (code.function.empty() ? "" : " in " + code.function) + ": " + code.text);
  }
  add_row(narrative.details, "here", values_here_of(origin));
  if (const Fact* const read = find_fact(origin.facts, FactKind::samples)) {
    add_rows(narrative.details, "batch", read->names);
  }
  add_rows(narrative.details, "why", reasons_of(origin));
  const bool has_nan = origin.tensor && origin.tensor->nan > 0;
  if (const Fact* const after = find_fact(origin.facts, FactKind::became);
      after != nullptr && !has_nan) {
    add_row(narrative.details, "then", fact_text(*after));
  }
  std::vector<std::string> next = next_of(verdict, origin);
  if (const RankEnding* const ending = deciding_ending(verdict)) {
    next.insert(next.begin(), "mend first what ended rank " + std::to_string(ending->rank));
  }
  add_rows(narrative.details, "next", next);
  if (!origin.bundle.empty()) {
    add_row(narrative.details, "replay", replay_command(run_dir, origin.bundle));
  }
}

}  // namespace

/// What changes after the block is printed: first of all where the job is to be restarted.
static void add_plan(const Verdict& verdict, std::string_view run_dir, bool is_second, Rows& rows) {
  const std::string command =
      "nanlocator next " + shell_word(std::filesystem::absolute(run_dir).string());
  if (verdict.decision.kind == DecisionKind::do_not_restart) {
    add_row(rows, "plan", fixed_text(verdict) + command + "   (prints the orders as of then)");
  } else {
    const std::string first = is_to_look_first(verdict) ? "after the check: "
                              : is_second               ? "then: "
                                                        : "first: ";
    rows.emplace(rows.begin(), "plan",
                 first + command +
                     "   (changes nothing; where its orders differ, follow them; if it fails, "
                     "follow this message)");
  }
}

/// The state of the job and what is to be done with it, by whoever is on call.
static void add_orders(const Verdict& verdict, std::string_view run_dir, bool has_urgent,
                       Rows& rows) {
  add_row(rows, "state", state_of(verdict));
  add_silent(verdict, rows);
  const bool is_look_first = is_to_look_first(verdict);
  if (is_look_first) add_check(verdict, rows);
  add_checkpoint(verdict, rows);
  add_limit(verdict, rows);
  add_policy(verdict, rows);
  add_skip(verdict, rows);
  add_trace(verdict, rows);
  if (!is_look_first) add_check(verdict, rows);
  if (verdict.origins.size() > 1) {
    add_row(rows, "also",
            count_text(verdict.origins.size() - 1, "other place") +
                " with a fault of its own: nanlocator report --verbose; this one decides");
  }
  if (!run_dir.empty() && verdict.decision.kind != DecisionKind::none_needed)
    add_plan(verdict, run_dir, has_urgent, rows);
}

std::string error_code_of(const Verdict& verdict) {
  if (verdict.status == VerdictStatus::clean) return "clean";
  const Origin* const origin = deciding_origin(verdict);
  if (verdict.decision.ended_rank) return "silent_ranks";
  return origin == nullptr ? "incomplete" : error_code_of(*origin);
}

Narrative narrative_of(const Verdict& verdict, std::string_view run_dir) {
  Narrative narrative;
  const JobDecision& decision = verdict.decision;
  const Origin* const origin = deciding_origin(verdict);
  narrative.severity = severity_of(verdict);
  narrative.code = error_code_of(verdict);
  narrative.event = event_of(verdict);
  narrative.action = action_text_of(verdict);
  const std::vector<int> unexplained = unexplained_ranks(verdict);
  if (!unexplained.empty()) {
    const std::string silent = silent_in_headline(verdict, unexplained);
    const bool is_read = !has_unknown_log(verdict);
    narrative.action = (is_read ? "FIRST nanlocator next (" + silent +
                                      (unexplained.size() > 1 ? " ARE SILENT)" : " IS SILENT)")
                                : "FIRST READ THE LOG OF " + silent) +
                       ", THEN " + narrative.action;
  }
  narrative.restart = restart_word_of(verdict);
  narrative.hosts = hosts_text_of(verdict);
  narrative.load = load_of(verdict);
  narrative.page = has_unknown_log(verdict) ? "by that log" : person_of(decision.page);
  narrative.ticket = decision.ticket == Owner::nobody ? "none" : person_of(decision.ticket);
  if (const auto step = deciding_step(verdict)) {
    add_row(narrative.rows, "decides",
            "the block of " + step_text(*step) + ": nanlocator report " +
                shell_word(std::string(run_dir)) + " --step " + std::to_string(*step));
  }
  if (const RankEnding* const ending = deciding_ending(verdict)) {
    add_row(narrative.rows, "what",
            ending_text(verdict, *ending) + "; in the same step: " + what_of(verdict, origin));
    add_row(narrative.rows, "cause", cause_of_ending(*ending));
  } else {
    add_row(narrative.rows, "what", what_of(verdict, origin));
    if (origin != nullptr) add_row(narrative.rows, "cause", cause_of(verdict, *origin));
  }
  Rows urgent;
  add_row(urgent, "kill", kill_of(verdict));
  add_aside(verdict, urgent);
  if (!deciding_step(verdict)) add_orders(verdict, run_dir, !urgent.empty(), narrative.rows);
  narrative.rows.insert(narrative.rows.begin(), urgent.begin(), urgent.end());
  if (origin != nullptr) add_details(verdict, *origin, run_dir, narrative);
  return narrative;
}

std::string explanation_of(std::string_view code) {
  std::string text(code);
  for (const auto& [field, label] : {std::pair("means", "means"), std::pair("confirm", "confirm"),
                                     std::pair("fix", "fix"), std::pair("unlike", "is not")}) {
    text += "\n  " + std::string(label) + std::string(10 - std::string_view(label).size(), ' ') +
            std::string(phrase(code, field));
  }
  return text + "\n";
}

std::vector<std::string> explained_codes() {
  return codes();
}

}  // namespace nanlocator::inline report_room
