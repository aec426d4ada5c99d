#include "nanlocator/report/sentences.hpp"

#include <algorithm>
#include <iterator>
#include <set>
#include <string_view>

#include "files/printable.hpp"
#include "files/text.hpp"
#include "nanlocator/verdict/cause_table.hpp"
#include "report/cause_text.hpp"
#include "report/fact_text.hpp"
#include "report/words.hpp"

namespace nanlocator::inline report_room {
namespace {

constexpr std::size_t kMostCleanNames = 4;

/// The tensor's bad values: "NaN", "Inf", "-Inf", or "NaN and Inf".
std::string what_of(const Origin& origin) {
  if (!origin.tensor)
    return origin.phase == Phase::grad_norm ? "a bad gradient norm" : "NaN or Inf";
  const OriginTensor& tensor = *origin.tensor;
  const std::string inf = tensor.pos_inf == 0   ? "-Inf"
                          : tensor.neg_inf == 0 ? "Inf"
                                                : "Inf and -Inf";
  const bool has_inf = tensor.pos_inf + tensor.neg_inf > 0;
  if (tensor.nan > 0) return has_inf ? "NaN and " + inf : "NaN";
  return has_inf ? inf : "NaN or Inf";
}

/// Bad before any code of the step ran, so that the step's operations are not the cause.
bool was_there_before(const Origin& origin) {
  return origin.cause == Cause::bad_weight || origin.cause == Cause::bad_buffer ||
         origin.cause == Cause::bad_input;
}

}  // namespace

std::string who_of(const Origin& origin) {
  if (origin.coordinates) return origin.coordinates->describe();
  if (origin.candidates.empty()) return "an unknown rank";
  if (origin.candidates.size() == 1) return "rank " + std::to_string(origin.candidates.front());
  const std::string list = short_list(origin.candidates);
  std::string text = origin.is_on_every_candidate
                         ? "ranks " + list
                         : "one of " + count_text(origin.candidates.size(), "rank") + ": " + list;
  if (origin.data_parallel_replica) {
    text += " (dp" + std::to_string(*origin.data_parallel_replica) + ")";
  }
  return text;
}

namespace {

/// In backward, readers know the forward operator.
std::string born_in_backward(const Origin& origin) {
  const std::string& of =
      origin.custom_function.empty() ? origin.forward_op : origin.custom_function;
  return (of.empty() ? " born in backward on " : " born in backward of " + of + " on ");
}

}  // namespace

std::string headline_of(const Verdict&, const Origin& origin) {
  const std::string what = what_of(origin);
  const std::string who = who_of(origin);
  switch (origin.cause) {  // a value from before the step was not born in the phase that met it
    case Cause::bad_weight:
      return what + " in the parameters of " + who + " before forward";
    case Cause::bad_buffer:
      if (origin.detail == Detail::made_earlier) {
        return what + " in a tensor that " + who + " computed earlier";
      }
      return what + (origin.parameter.empty() ? " in a tensor that a module of " + who + " keeps"
                                              : " in a buffer of " + who + " before forward");
    case Cause::bad_input:
      return what + " in the data of " + who;
    case Cause::pipeline_transfer:
      return who + " received " + what + " in " + std::string(name_of(origin.phase));
    case Cause::collective_result:
      if (has_fact(origin.facts, FactKind::members_got_other_values)) {
        return "a collective gave " + who + " other values than its peers: " + what +
               " born of them in " + std::string(name_of(origin.phase));
      }
      if (origin.phase > Phase::backward) break;
      return who + " got " + what + " out of a collective in " + std::string(name_of(origin.phase));
    case Cause::memory_corruption:
      return what + " in memory of " + who + " that no operator wrote";
    default:
      break;
  }
  switch (origin.phase) {
    case Phase::params_before:
      return what + " in the parameters of " + who + " before forward";
    case Phase::forward:
      return what + " born in forward on " + who;
    case Phase::loss:
      return what + " born in the loss on " + who;
    case Phase::backward:
      return what + born_in_backward(origin) + who;
    case Phase::grad_local:
      return what + " in the gradients of " + who + " before the data-parallel reduction";
    case Phase::grad_reduced:
      if (const Fact* const fact = find_fact(origin.facts, FactKind::clean_before_reduction);
          fact != nullptr && fact->ranks.size() < origin.candidates.size()) {
        return ranks_text(fact->ranks) + " got " + what +
               " out of the data-parallel reduction of " + ranks_text(fact->peers);
      }
      return what + " in the gradients of " + who + " after the data-parallel reduction";
    case Phase::grad_norm:
      return origin.tensor
                 ? what + " in the gradients of " + who + " where the optimizer reads them"
                 : what + "; its largest gradient is on " + who;
    case Phase::params_after:
      return what + " in the parameters of " + who + " after the optimizer step";
  }
  return what + " on " + who;
}

namespace {

/// "2 origins, on ranks 0, 3".
std::string origins_text(const Verdict& verdict) {
  std::set<int> ranks;
  for (const Origin& origin : verdict.origins) {
    ranks.insert(origin.candidates.begin(), origin.candidates.end());
  }
  std::string text = count_text(verdict.origins.size(), "origin");
  if (ranks.empty()) return text;
  return text + ", on " + (ranks.size() == 1 ? "rank " : "ranks ") +
         short_list({ranks.begin(), ranks.end()});
}

}  // namespace

std::string outcome_of(const Verdict& verdict) {
  if (verdict.origins.size() == 1) return headline_of(verdict, verdict.origins.front());
  if (!verdict.origins.empty()) return origins_text(verdict);
  return verdict.status == VerdictStatus::clean ? "no NaN or Inf in what was seen"
                                                : "no origin found; the evidence is incomplete";
}

std::string headline_of(const Verdict& verdict) {
  return "step " + std::to_string(verdict.iteration) + ": " + outcome_of(verdict);
}

std::string code_of(const Origin& origin) {
  // A value that no operator of the program computed has no code line.
  const bool is_computed = !origin.op.empty() && origin.tensor &&
                           origin.tensor->role.kind() != RoleKind::sent &&
                           origin.tensor->role.kind() != RoleKind::received;
  if (!origin.code) return is_computed ? "not recorded" : "";
  const bool is_only_read = (was_there_before(origin) && origin.detail != Detail::made_earlier) ||
                            origin.cause == Cause::memory_corruption;
  const bool is_forward_call = is_computed && origin.direction == Direction::backward &&
                               !origin.forward_op.empty() && origin.custom_function.empty();
  return (is_only_read      ? "first read at "
          : is_forward_call ? "forward call at "
                            : "") +
         code_text(*origin.code);
}

Facts ordered_facts(const Origin& origin) {
  Facts facts = origin.facts;
  std::ranges::stable_sort(facts, {}, [](const Fact& fact) { return place_of(fact); });
  return facts;
}

std::vector<std::string> evidence_of(const Verdict&, const Origin& origin) {
  std::vector<std::string> sentences;
  for (const Fact& fact : ordered_facts(origin)) {
    if (fact.kind == FactKind::stated_action) continue;
    sentences.push_back(fact_text(fact));
  }
  return sentences;
}

std::string mentioned_ranks_of(const Verdict& verdict, std::size_t evidence) {
  constexpr std::size_t kMost = 8;
  if (!verdict.layout) return "";
  std::set<int> named;
  for (const Origin& origin : verdict.origins) {
    named.insert(origin.candidates.begin(), origin.candidates.end());
    const Facts facts = ordered_facts(origin);
    for (std::size_t i = 0; i < std::min(evidence, facts.size()); ++i) {
      named.insert(facts[i].ranks.begin(), facts[i].ranks.end());
      named.insert(facts[i].peers.begin(), facts[i].peers.end());
    }
  }
  std::vector<RankCoordinates> ranks;
  std::ranges::copy_if(verdict.layout->mentioned, std::back_inserter(ranks),
                       [&](const RankCoordinates& each) { return named.contains(each.rank); });
  const bool is_in_headline =
      ranks.size() == 1 && verdict.origins.size() == 1 && verdict.origins.front().coordinates;
  const bool is_in_link =
      ranks.size() == 2 && std::ranges::any_of(verdict.origins, [&](const Origin& origin) {
        return !link_of(verdict, origin).empty();
      });
  if (ranks.empty() || is_in_link || is_in_headline || ranks.front().describe_axes().empty())
    return "";
  const bool has_hosts = std::ranges::any_of(
      ranks, [&](const RankCoordinates& each) { return each.host != ranks.front().host; });
  std::string text;
  for (std::size_t i = 0; i < std::min(kMost, ranks.size()); ++i) {
    append_item(text, std::to_string(ranks[i].rank) + " is " + ranks[i].describe_axes() +
                          (has_hosts ? " on host " + ranks[i].host : ""));
  }
  return ranks.size() > kMost ? text + ", ... (verdict.json has more)" : text;
}

std::string common_cause_of(const Verdict& verdict) {
  std::set<int> ranks;
  for (const Origin& origin : verdict.origins) {
    if (origin.cause != Cause::not_reproduced) return "";
    ranks.insert(origin.candidates.begin(), origin.candidates.end());
  }
  if (verdict.origins.size() < 2 || ranks.size() < 2) return "";
  return "several ranks in one step: a race, a buffer that they share, or the host is likelier "
         "than a fault of each device";
}

std::string machine_check_command(const JobLayout& layout) {
  const RankCoordinates& first = layout.first_rank;
  if (first.world_size < 2) return "";
  const int hosts = (first.world_size + layout.ranks_per_host - 1) / layout.ranks_per_host;
  std::string command =
      netcheck_command(layout.ranks_per_host, hosts, first.host.empty() ? "HOST" : first.host);
  const auto add = [&](const char* option, int size) {
    if (size > 1) command += std::string(" --") + option + " " + std::to_string(size);
  };
  add("tp", first.tp.size);
  add("pp", first.pp.size);
  add("cp", first.cp.size);
  add("ep", first.ep.size);
  return command;
}

namespace {

/// True if the weights of the operator's module are no larger than trained weights are: it
/// overflowed for another reason.
bool has_usual_weights(const Origin& origin) {
  constexpr double kLargest = 100;
  const Fact* const weights = find_fact(origin.facts, FactKind::weights_magnitude);
  return weights != nullptr && std::ranges::all_of(weights->values, [](const auto& weight) {
           return weight.second <= kLargest;
         });
}

/// True if weights may have grown until an operator overflowed.
bool has_overflow_of_weights(const Verdict& verdict) {
  return std::ranges::any_of(verdict.origins, [](const Origin& origin) {
    return origin.cause == Cause::operator_overflow && !has_usual_weights(origin);
  });
}

bool has_race(const Verdict& verdict) {
  return std::ranges::any_of(verdict.origins,
                             [](const Origin& origin) { return origin.cause == Cause::race; });
}

std::string checkpoint_before(std::int64_t step) {
  return step > 1 ? "a checkpoint of step " + std::to_string(step - 1) + " or earlier"
                  : "the weights before the first step";
}

/// "layers.3.weight": the weight to look for in a checkpoint. With other causes the parameter
/// itself is not bad.
std::string bad_weights_of(const Verdict& verdict) {
  for (const Origin& origin : verdict.origins) {
    if (origin.cause == Cause::bad_weight && !origin.parameter.empty()) return origin.parameter;
  }
  return "what is bad here";
}

bool has_bad_gradients(const Verdict& verdict) {
  return !verdict.spread.parameters.empty();
}

}  // namespace

std::vector<Step> steps_of(const Verdict& verdict, const Origin& origin) {
  std::vector<Step> steps;
  for (auto& text : steps_text(origin)) steps.push_back({std::move(text)});
  const bool is_software = origin.owner == Owner::framework || origin.action == Action::stated ||
                           origin.action == Action::find_writer || steps.empty();
  const Course course = course_of(verdict);
  if (is_software || !row_of(origin.cause).may_be_machine || !verdict.layout) return steps;
  std::string command = machine_check_command(*verdict.layout);
  if (command.empty()) return steps;
  const bool is_one_host = verdict.layout->first_rank.world_size <= verdict.layout->ranks_per_host;
  const std::string when = course == Course::goes_on ? "when the job has ended, " : "";
  const bool may_be_link =
      origin.alternatives.size() > 1 &&
      std::ranges::find(origin.alternatives, Suspect::link) != origin.alternatives.end();
  const bool is_asked_about =
      origin.action == Action::test_links || origin.action == Action::test_transfer;
  const auto at = course == Course::stops && may_be_link ? steps.begin()
                  : is_asked_about                       ? steps.begin() + 1
                                                         : steps.end();
  steps.insert(at, {when + (is_one_host ? "check the machine and its links"
                                        : "check the machines and their links, on each host"),
                    std::move(command)});
  return steps;
}

std::string action_of(const Verdict& verdict, const Origin& origin) {
  std::string text;
  for (const Step& step : steps_of(verdict, origin)) {
    text += (text.empty() ? "" : "; ") + step.text;
    if (!step.command.empty()) text += ": " + step.command;
  }
  return text;
}

namespace {

/// The known hosts and devices of `ranks`.
std::string places_text(const Verdict& verdict, const std::vector<int>& ranks) {
  constexpr std::size_t kMost = 4;
  std::vector<std::string> places;
  for (const int rank : ranks) {
    if (places.size() == kMost) break;
    const RankCoordinates* const known = find_mentioned(verdict, rank);
    places.push_back(known == nullptr ? "rank " + std::to_string(rank) : known->describe());
  }
  if (ranks.size() > kMost) places.push_back(counted(std::ssize(ranks) - kMost) + " more");
  return joined(places);
}

}  // namespace

std::string link_of(const Verdict& verdict, const Origin& origin) {
  const bool may_be_link =
      std::ranges::find(origin.alternatives, Suspect::link) != origin.alternatives.end();
  if (!may_be_link || !verdict.layout) return "";
  for (const FactKind kind : {FactKind::message_changed, FactKind::own_copy_bad,
                              FactKind::collective_changed, FactKind::clean_before_reduction}) {
    const Fact* const fact = find_fact(origin.facts, kind);
    if (fact == nullptr) continue;
    std::vector<int> others;
    std::ranges::set_difference(fact->peers, fact->ranks, std::back_inserter(others));
    if (others.empty()) return "between " + places_text(verdict, fact->ranks);
    if (kind != FactKind::message_changed) {  // the sender is unknown
      return "between " + places_text(verdict, fact->ranks) + " and " +
             places_text(verdict, others);
    }
    return "from " + places_text(verdict, others) + " to " + places_text(verdict, fact->ranks);
  }
  return "";
}

namespace {

/// The tensors that are scanned in a phase.
std::string scan_of(Phase phase) {
  switch (phase) {
    case Phase::params_before:
      return "the weights before forward";
    case Phase::loss:
      return "the loss";
    case Phase::grad_local:
      return "gradients before their reduction";
    case Phase::grad_reduced:
      return "gradients after their reduction";
    case Phase::grad_norm:
      return "gradients as the optimizer reads them";
    case Phase::params_after:
      return "the weights after the update";
    default:
      return "outputs of modules and messages between ranks in " + std::string(name_of(phase));
  }
}

/// True if only the gradients of the affected parameters are bad.
bool are_only_gradients(const Verdict& verdict) {
  return verdict.job.are_weights_finite == true && verdict.job.are_weights_updated != true;
}

}  // namespace

std::string spread_of(const Verdict& verdict) {
  if (verdict.spread.ranks.empty()) return "";
  if (verdict.spread.ranks.size() == 1 && verdict.spread.parameters.empty()) return "";
  std::string text =
      verdict.spread.parameters.empty()
          ? "it reached " + count_text(verdict.spread.ranks.size(), "rank")
          : "consequence: bad " +
                std::string(are_only_gradients(verdict) ? "gradients of "
                                                        : "values or gradients of ") +
                count_text(verdict.spread.parameters.size(), "parameter") + " on " +
                count_text(verdict.spread.ranks.size(), "rank");
  if (verdict.spread.first_seen) {
    text += "; the first scan that saw it: " + scan_of(*verdict.spread.first_seen);
  }
  if (verdict.origins.size() != 1) return text;
  for (std::size_t i = 0; i < std::min(kMostCleanNames, verdict.clean.size()); ++i) {
    text += (i == 0 ? "; neighbours that stayed clean: " : ", ") + verdict.clean[i];
  }
  if (verdict.clean.size() > kMostCleanNames) text += ", ...";
  return text;
}

std::string job_of(const Verdict& verdict) {
  const JobState& job = verdict.job;
  const std::string step = "step " + std::to_string(verdict.iteration);
  const std::string policy = " (on_bad=" + job.on_bad + ")";
  const Course course = course_of(verdict);
  if (course == Course::unknown) return "";
  if (verdict.status == VerdictStatus::benign) return "goes on: the scaler skips this step";
  if (course == Course::goes_on_damaged) {
    return "still running, on bad weights: stop it now without a last checkpoint (SIGKILL, where "
           "SIGTERM makes it save one)" +
           policy;
  }
  if (course != Course::stops && job.are_weights_updated == true) {
    return "goes on; the weights have the update of " + step + policy;
  }
  if (job.is_discarded) return "goes on: the program itself discarded what " + step + " computed";
  if (job.on_bad == "skip") return "goes on without the update of " + step + policy;
  const bool is_clean_now = verdict.rerun.reproduced == false;
  if (course != Course::stops && job.framework_skips_update && !is_clean_now &&
      has_bad_gradients(verdict)) {
    return "goes on; the framework leaves out the update of " + step + policy;
  }
  if (course != Course::stops) {
    return (is_clean_now ? "goes on with the finite gradients of the re-run" : "goes on") + policy;
  }
  if (!job.are_weights_updated) return "stops" + policy;
  return (*job.are_weights_updated ? "stops; the weights have the update of " + step
                                   : "stops; nothing of " + step + " was applied") +
         policy;
}

std::string restart_of(const Verdict& verdict) {
  const JobState& job = verdict.job;
  const Course course = course_of(verdict);
  if (course == Course::unknown || verdict.status == VerdictStatus::benign) return "";
  if (course == Course::goes_on) return "not needed: nothing bad of this step was applied";
  const std::string step = std::to_string(verdict.iteration);
  const std::string finite =
      job.are_weights_finite == true ? "every weight was finite before step " + step + "; " : "";
  if (course == Course::goes_on_damaged && job.restart < Restart::before_step) {
    return "needed, from " + checkpoint_before(verdict.iteration) +
           ": the weights are bad from the update of step " + step + " on" +
           (job.restart == Restart::repeats ? "; the same batch will make it bad again: correct "
                                              "the cause first, or leave it out"
                                            : "");
  }
  switch (job.restart) {
    case Restart::latest:
      return "from the latest checkpoint: " + finite + "the fault did not come again";
    case Restart::unknown:
      if (has_race(verdict)) {
        return "from the latest checkpoint: " + finite +
               "the fault comes and goes with the timing, so it may come again until the race is "
               "mended";
      }
      return "from the latest checkpoint: " + finite +
             (verdict.rerun.reproduced == false
                  ? "the fault did not come again in the re-run, which may not have executed all"
                  : "whether the fault comes again is not known");
    case Restart::repeats:
      return "not yet: step " + step +
             " will be bad again with the same data and weights; when that is fixed, from " +
             (has_overflow_of_weights(verdict) ? "a checkpoint whose weights have their usual size"
                                               : "the latest checkpoint");
    case Restart::before_step:
      return "only from " + checkpoint_before(job.restart_before.value_or(verdict.iteration)) +
             "; do not save these weights";
    case Restart::check_first:
      return "only from a checkpoint in which " + bad_weights_of(verdict) +
             " is finite: check that first; do not save this state";
  }
  return "";
}

std::vector<std::string> notes_of(const Verdict& verdict) {
  std::vector<std::string> notes = verdict.notes;
  for (const Fact& fact : verdict.facts) notes.push_back(fact_text(fact));
  return notes;
}

}  // namespace nanlocator::inline report_room
