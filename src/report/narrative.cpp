#include "nanlocator/report/narrative.hpp"

#include <algorithm>
#include <array>
#include <cctype>
#include <filesystem>
#include <iterator>
#include <optional>
#include <set>

#include "files/printable.hpp"
#include "files/text.hpp"
#include "nanlocator/locate/cause_table.hpp"
#include "nanlocator/record/collective_kind.hpp"
#include "nanlocator/report/sentences.hpp"
#include "report/cause_text.hpp"
#include "report/fact_text.hpp"
#include "report/phrasebook.hpp"
#include "report/words.hpp"

namespace nanlocator::inline report_room {
namespace {

const Origin* deciding_origin(const Verdict& verdict) {
  const auto index = static_cast<std::size_t>(verdict.decision.origin.value_or(0));
  if (index < verdict.origins.size()) return &verdict.origins[index];
  return verdict.origins.empty() ? nullptr : &verdict.origins.front();
}

// ---- codes ----

std::string error_code_of(Detail detail) {
  switch (detail) {
    case Detail::sqrt_of_negative:
      return "sqrt_negative";
    case Detail::log_of_zero:
      return "log_zero";
    case Detail::log_of_negative:
      return "log_negative";
    case Detail::division_by_zero:
      return "div_zero";
    case Detail::zero_over_zero:
      return "zero_over_zero";
    case Detail::power_of_zero:
      return "pow_zero";
    case Detail::power_of_negative:
      return "pow_negative";
    case Detail::outside_domain:
      return "domain";
    case Detail::derivative_at_pole:
      return "infinite_slope";
    case Detail::masked_row:
      return "masked_row";
    case Detail::mean_of_nothing:
      return "empty_mean";
    case Detail::custom_code:
      return "custom_op";
    case Detail::exceeds_range:
      return "overflow";
    case Detail::none:
      return "undefined";
  }
  return "undefined";
}

std::string code_of_unknown(const Origin& origin) {
  if (origin.action == Action::check_clip) return "all_gradients";
  if (origin.action == Action::ask_silent_ranks) return "silent_ranks";
  if (has_fact(origin.facts, FactKind::norm_overflows)) return "norm_overflow";
  return origin.detail == Detail::none ? "needs_trace" : error_code_of(origin.detail);
}

std::string error_code_of(const Origin& origin) {
  switch (origin.cause) {
    case Cause::bad_weight:
      return has_fact(origin.facts, FactKind::copies_clean) ? "weight_copy" : "bad_weight";
    case Cause::bad_buffer:
      return origin.parameter.empty() ? "kept_tensor" : "bad_buffer";
    case Cause::bad_input:
      return "bad_data";
    case Cause::empty_loss_mask:
      return "no_labels";
    case Cause::operator_overflow:
      return origin.action == Action::find_weight_writer ? "weight_jump" : "overflow";
    case Cause::operator_undefined:
      return error_code_of(origin.detail);
    case Cause::operator_bug:
      return origin.detail == Detail::custom_code ? "custom_op" : "wrong_kernel";
    case Cause::kernel_bug:
      return "kernel_bug";
    case Cause::uninitialised_memory:
      return "unwritten";
    case Cause::compiled_region:
      return "compiled";
    case Cause::memory_corruption:
      return "overwritten";
    case Cause::not_reproduced:
      return "not_reproduced";
    case Cause::race:
      return "race";
    case Cause::collective_result:
      return has_fact(origin.facts, FactKind::members_got_other_values) ? "collective_differs"
                                                                        : "collective_wrong";
    case Cause::collective_sum:
      return "sum_overflow";
    case Cause::pipeline_transfer:
      return "transfer_wrong";
    case Cause::recompute_mismatch:
      return "recompute";
    case Cause::optimizer_update:
      return "bad_update";
    case Cause::optimizer_state:
      return "bad_moments";
    case Cause::divergence:
      return "diverged";
    case Cause::user_hook:
      return "hook";
    case Cause::bad_scalar:
      return "bad_number";
    case Cause::loss_scale:
      return "loss_scale";
    case Cause::unknown:
      return code_of_unknown(origin);
  }
  return "needs_trace";
}

// ---- ranks, hosts, people ----

bool is_gpu(const RankCoordinates& coordinates) {
  return coordinates.device.starts_with("cuda:");
}

/// "GPU3" of "cuda:3 GPU-6f2e... 0000:1b:00.0".
std::string gpu_of(const RankCoordinates& coordinates) {
  const std::string& device = coordinates.device;
  return "GPU" + device.substr(5, device.find(' ') - 5);
}

std::string ranks_place_of(const Verdict& verdict, const std::vector<int>& ranks) {
  constexpr std::size_t kMost = 2;
  if (ranks.size() > kMost) return "ranks " + short_list(ranks);
  std::vector<std::string> places;
  for (const int rank : ranks) {
    const RankCoordinates* const known = find_mentioned(verdict, rank);
    places.push_back(known == nullptr ? "rank " + std::to_string(rank) : rank_place_of(*known));
  }
  return joined(places);
}

/// " on rank 3 = a17:GPU3", " on one of 4 ranks: 0-3"; "" if there is only one.
std::string on_ranks(const Verdict& verdict, const Origin& origin) {
  const bool is_alone = verdict.layout && verdict.layout->first_rank.world_size == 1;
  if (origin.candidates.empty() || is_alone) return "";
  const bool is_one_of = origin.candidates.size() > 1 && !origin.is_on_every_candidate;
  if (!is_one_of) return " on " + ranks_place_of(verdict, origin.candidates);
  return " on one of " + count_text(origin.candidates.size(), "rank") + ": " +
         short_list(origin.candidates);
}

std::vector<std::string> hosts_of(const Verdict& verdict, const std::vector<int>& ranks) {
  std::set<std::string> hosts;
  for (const int rank : ranks) {
    const RankCoordinates* const known = find_mentioned(verdict, rank);
    if (known != nullptr && !known->host.empty()) hosts.insert(known->host);
  }
  return {hosts.begin(), hosts.end()};
}

bool is_one_host(const Verdict& verdict) {
  return verdict.layout && verdict.layout->first_rank.world_size <= verdict.layout->ranks_per_host;
}

/// "a17 and a18"; on a job of one host its devices: "GPU3 of a17"; else the ranks.
std::string suspects_text(const Verdict& verdict) {
  const std::vector<int>& ranks = verdict.decision.ranks;
  const auto hosts = hosts_of(verdict, ranks);
  if (hosts.empty()) return ranks_text(ranks);
  if (!is_one_host(verdict)) return joined(hosts);
  std::set<std::string> devices;
  for (const int rank : ranks) {
    const RankCoordinates* const known = find_mentioned(verdict, rank);
    if (known != nullptr && is_gpu(*known)) devices.insert(gpu_of(*known));
  }
  if (devices.empty()) return joined(hosts);
  return joined({devices.begin(), devices.end()}) + " of " + hosts.front();
}

/// One rotation each.
std::string person_of(Owner owner) {
  switch (owner) {
    case Owner::model_author:
      return "model author";
    case Owner::data:
      return "data owner";
    case Owner::cluster_operator:
      return "cluster on-call";
    case Owner::framework:
      return "framework team";
    case Owner::vendor:
      return "kernel author";
    case Owner::unknown:
      return "model author";
    case Owner::nobody:
      return "nobody";
  }
  return "nobody";
}

std::string in_capitals(std::string text) {
  std::ranges::transform(text, text.begin(),
                         [](unsigned char each) { return static_cast<char>(std::toupper(each)); });
  return text;
}

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
  if (!tensor.first_bad_index.empty()) text += " from " + describe_shape(tensor.first_bad_index);
  return text;
}

/// "an all-reduce" of "c10d::allreduce_".
std::string collective_name_of(const std::string& op) {
  switch (collective_kind_of(op).value_or(CollectiveKind::exchange)) {
    case CollectiveKind::all_reduce:
      return "an all-reduce";
    case CollectiveKind::reduce_scatter:
      return "a reduce-scatter";
    case CollectiveKind::reduce:
      return "a reduce";
    case CollectiveKind::all_gather:
      return "an all-gather";
    case CollectiveKind::broadcast:
      return "a broadcast";
    case CollectiveKind::scatter:
      return "a scatter";
    case CollectiveKind::exchange:
      return op.empty() ? "a collective" : "an all-to-all";
    default:
      return "a transfer";
  }
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
  return collective_kind_of(origin.op) ? collective_name_of(origin.op)
                                       : function_name_of(origin.op);
}

std::string in_place(const Origin& origin) {
  if (!origin.module.empty()) {
    const bool is_named = origin.direction != Direction::backward || !origin.forward_op.empty() ||
                          !origin.custom_function.empty();
    return (is_named ? " in " : " in the backward of ") + origin.module;
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

std::string reached_of(const Verdict& verdict) {
  const Spread& spread = verdict.spread;
  if (spread.parameters.empty()) return "";
  return "; it reached the gradients of " + count_text(spread.parameters.size(), "parameter") +
         (spread.ranks.size() > 1 ? " on " + count_text(spread.ranks.size(), "rank") : "");
}

std::string what_of(const Verdict& verdict, const Origin* origin) {
  const std::string code = error_code_of(verdict);
  if (origin == nullptr) return filled_phrase(code, "what", {});
  return filled_phrase(
             code, "what",
             {{"values", values_of(*origin)},
              {"elements", elements_of(*origin)},
              {"operation", operation_text(*origin)},
              {"in", in_place(*origin)},
              {"on", on_ranks(verdict, *origin)},
              {"who", ranks_place_of(verdict, origin->candidates)},
              {"parameter", origin->parameter.empty() ? "a parameter" : origin->parameter},
              {"group", group_of(verdict, *origin)},
              {"peers", peers_of(verdict, *origin)}}) +
         reached_of(verdict);
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
  return was_there(origin) && origin.cause != Cause::bad_input &&
         (origin.cause != Cause::bad_buffer || !origin.parameter.empty());
}

/// The tests that the cause has passed, in few words; the most telling first.
std::vector<std::string> tests_of(const Verdict& verdict, const Origin& origin) {
  constexpr std::size_t kMost = 3;
  std::vector<std::string> tests;
  const std::string machine = same_machine(verdict, origin);
  for (const Fact& fact : ordered_facts(origin)) {
    // A re-run of values that were there before says nothing: it starts from them.
    if (was_there(origin) && fact.kind != FactKind::copies_clean) continue;
    switch (fact.kind) {
      case FactKind::rerun_identical:
        tests.push_back("the same came back, bit for bit, in a re-run on " + machine);
        break;
      case FactKind::rerun_differs:
        tests.push_back("it came back in a re-run on " + machine);
        break;
      case FactKind::rerun_clean:
      case FactKind::gone_in_rerun:
        tests.push_back("it was gone in a re-run on " + machine);
        break;
      case FactKind::transfer_bad_again:
        tests.emplace_back("the transfer failed again when it was repeated");
        break;
      case FactKind::replayed:
        if (fact.conclusion == name_of(ReplayConclusion::deterministic_undefined)) {
          tests.emplace_back("the call alone gives it again, in float64, too");
        } else if (fact.conclusion == name_of(ReplayConclusion::deterministic_overflow)) {
          tests.emplace_back("the call alone gives it again and is finite in float64");
        } else if (fact.conclusion == name_of(ReplayConclusion::deterministic_kernel)) {
          tests.emplace_back("the call alone gives it again and is finite in another kernel");
        } else if (fact.conclusion == name_of(ReplayConclusion::varies)) {
          tests.emplace_back("the call alone gives another result each time");
        }
        break;
      case FactKind::copies_clean:
        tests.push_back("the copies on " + ranks_text(fact.peers) + " are finite");
        break;
      case FactKind::peers_finite:
        tests.push_back(ranks_text(fact.peers) + " executed the same call and got finite values");
        break;
      case FactKind::rerun_not_completed:
        tests.emplace_back("a re-run did not complete");
        break;
      default:
        break;
    }
  }
  if (has_fact(origin.facts, FactKind::made_from_finite)) {
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

std::string cause_of(const Verdict& verdict, const Origin& origin) {
  std::string kind = kind_of(origin);
  std::string open = suspects_text(origin);
  std::string label = "not ruled out: ";
  std::string certainty = origin.cause_confidence == Confidence::high     ? ", proven"
                          : origin.cause_confidence == Confidence::medium ? ", likely"
                                                                          : ", open";
  if (origin.alternatives == std::vector{Suspect::upstream}) {
    label = "open: ";  // the mechanism is known
  } else if (!origin.alternatives.empty() && certainty == ", proven") {
    certainty = ", likely";
  }
  const bool is_of_transfer =
      origin.cause == Cause::collective_result || origin.cause == Cause::pipeline_transfer;
  if (is_of_transfer && kind == "code") kind = "code or hardware";
  if (kind == "hardware" && may_be_code(origin)) {
    kind = origin.cause == Cause::bad_weight ? "hardware" : "hardware or code";
  }
  if (kind.find(" or ") != kind.npos) certainty = ", open";
  if (kind == "unknown" || kind == "routine") certainty.clear();
  std::vector<std::string> parts = tests_of(verdict, origin);
  if (!open.empty()) parts.push_back(label + open);
  if (parts.empty() && !verdict.rerun.done) parts.emplace_back("the step was not executed again");
  std::string text;
  for (const std::string& part : parts) append_item(text, part, "; ");
  return kind + certainty + (text.empty() ? "" : ": " + text);
}

// ---- state and checkpoint ----

std::string step_text(std::int64_t step) {
  return "step " + std::to_string(step);
}

std::string weights_text(const Verdict& verdict) {
  const JobState& job = verdict.job;
  if (job.are_weights_finite == false) return "weights bad before the step";
  if (job.are_weights_updated == true && job.on_bad == "report") {
    return "weights changed by the bad step";
  }
  if (job.are_weights_finite == true) {
    return verdict.iteration > 1 ? "weights finite, as after " + step_text(verdict.iteration - 1)
                                 : "weights finite, as before the first step";
  }
  return "whether all weights are finite is not known";
}

std::string running_text(const Verdict& verdict) {
  const JobState& job = verdict.job;
  const std::string policy = " (on_bad=" + job.on_bad + ")";
  const std::string step = step_text(verdict.iteration);
  if (verdict.status == VerdictStatus::benign) return "running; the scaler leaves this step out";
  if (job.are_weights_updated == true) return "running; the weights have the update of " + step;
  if (verdict.rerun.reproduced == false && job.on_bad != "skip") {
    return "running, with the finite gradients of the re-run" + policy + "; weights good";
  }
  if (job.on_bad == "skip" || job.framework_skips_update) {
    return "running, without the update of " + step + policy + "; weights good";
  }
  return "running" + policy;
}

std::string state_of(const Verdict& verdict) {
  const JobState& job = verdict.job;
  std::string text;
  switch (course_of(verdict)) {
    case Course::unknown:
      return "";
    case Course::stops:
      text = job.are_weights_updated == true
                 ? "stopped after the update of " + step_text(verdict.iteration)
                 : "stopped before the update of " + step_text(verdict.iteration);
      break;
    case Course::goes_on_damaged:
      text = "running on bad weights (on_bad=" + job.on_bad + "): what it saves from now on is bad";
      break;
    case Course::goes_on:
      text = running_text(verdict);
      break;
  }
  if (course_of(verdict) != Course::goes_on) text += "; " + weights_text(verdict);
  if (verdict.decision.kind == DecisionKind::do_not_restart) {
    text += verdict.decision.recurrence == Recurrence::same_place
                ? "; an earlier attempt of this run failed in the same way"
                : "; it fails again with the same data";
  } else if (verdict.decision.recurrence == Recurrence::same_device) {
    text += "; the same device failed in an earlier attempt of this run";
  }
  return text;
}

bool needs_checkpoint(const Verdict& verdict) {
  return verdict.decision.kind != DecisionKind::none_needed;
}

const CheckpointFile* checkpoint_to_load(const Verdict& verdict) {
  if (!verdict.launch) return nullptr;
  const auto newest = verdict.decision.newest_step;
  for (const CheckpointFile& each : verdict.launch->checkpoints) {
    if (!newest || each.step <= *newest) return &each;
  }
  return nullptr;
}

/// Checkpoints from its update on may hold the fault.
std::string first_bad_step(const Verdict& verdict) {
  return std::to_string(verdict.decision.newest_step.value_or(verdict.iteration - 1) + 1);
}

/// Nothing of the fault can be in a checkpoint yet.
bool may_load_newest(const Verdict& verdict) {
  const auto newest = verdict.decision.newest_step;
  return course_of(verdict) == Course::stops && (!newest || *newest == verdict.iteration - 1);
}

/// Weights may have grown for many steps before an operator overflowed: finite is not good.
bool may_be_of_large_weights(const Verdict& verdict) {
  constexpr double kUsual = 100;
  const Origin* const origin = deciding_origin(verdict);
  if (origin == nullptr) return false;
  if (origin->cause == Cause::divergence) return true;
  const Fact* const weights = find_fact(origin->facts, FactKind::weights_magnitude);
  return origin->cause == Cause::operator_overflow && weights != nullptr &&
         std::ranges::any_of(weights->values,
                             [](const auto& weight) { return weight.second > kUsual; });
}

std::string load_of(const Verdict& verdict) {
  if (!needs_checkpoint(verdict)) return "not needed";
  if (verdict.decision.kind == DecisionKind::do_not_restart) return "nothing now";
  if (verdict.decision.is_to_check) return "only one checked finite";
  if (const CheckpointFile* const file = checkpoint_to_load(verdict)) return file->name;
  if (may_load_newest(verdict)) return verdict.iteration <= 1 ? "as started" : "the newest";
  const auto newest = verdict.decision.newest_step;
  if (!newest) return "the newest";
  return *newest < 1 ? "as started" : step_text(*newest) + " or older";
}

std::string joined_path(const std::string& folder, const std::string& name) {
  return folder.empty() ? name : (std::filesystem::path(folder) / name).string();
}

std::string check_command(const std::string& path) {
  return "nanlocator check-checkpoint " + shell_word(path);
}

/// What to load once the job may start again.
std::string loaded_text(const Verdict& verdict) {
  const JobDecision& decision = verdict.decision;
  const std::string folder = verdict.launch ? verdict.launch->checkpoint_dir : "";
  const CheckpointFile* const file = checkpoint_to_load(verdict);
  const std::string all =
      folder.empty() ? check_command("FOLDER") : check_command(folder) + " --all";
  if (decision.is_to_check) return "LOAD the newest that this finds finite: " + all;
  if (may_be_of_large_weights(verdict)) {
    return "LOAD one from before the weights grew, finite is not enough: " + all;
  }
  if (file != nullptr) {
    const std::string path = joined_path(folder, file->name);
    return "LOAD " + path + " (after " + step_text(file->step) + "; first: " + check_command(path) +
           ")";
  }
  if (decision.newest_step && *decision.newest_step < 1) {
    return "LOAD what this run was started from: no step of it was finished";
  }
  if (may_load_newest(verdict)) return "LOAD the newest: nothing bad can have been saved";
  return "LOAD the newest from before the update of step " + first_bad_step(verdict) +
         ", NEVER LOAD anything newer";
}

std::string checkpoint_of(const Verdict& verdict) {
  if (!needs_checkpoint(verdict)) return "";
  const JobDecision& decision = verdict.decision;
  const bool is_down = decision.kind == DecisionKind::do_not_restart;
  std::string text = (is_down ? "when it is mended, " : "") + loaded_text(verdict);
  std::vector<std::string> newer;
  for (const CheckpointFile& each :
       verdict.launch ? verdict.launch->checkpoints : std::vector<CheckpointFile>{}) {
    if (decision.newest_step && each.step > *decision.newest_step) newer.push_back(each.name);
  }
  if (!newer.empty() && !may_load_newest(verdict)) {
    text += ", NEVER LOAD " + newer.back() + (newer.size() > 1 ? " or anything newer" : "");
  }
  return text;
}

/// How to end a job that trains on bad weights.
std::string kill_of(const Verdict& verdict) {
  if (course_of(verdict) != Course::goes_on_damaged) return "";
  const auto& launch = verdict.launch;
  if (launch && launch->scheduler == "slurm") {
    return "scancel --signal=KILL --full " + launch->job_id +
           "   (not plain scancel: it sends SIGTERM, at which the job may save)";
  }
  return "SIGKILL to its processes (at SIGTERM it may save)";
}

// ---- the action ----

std::string severity_of(const Verdict& verdict) {
  if (verdict.status == VerdictStatus::clean || verdict.status == VerdictStatus::benign) {
    return "INFO";
  }
  switch (course_of(verdict)) {
    case Course::goes_on:
      return "WARNING";
    case Course::goes_on_damaged:
      return "FATAL";
    default:
      return "ERROR";
  }
}

std::string action_text_of(const Verdict& verdict) {
  const JobDecision& decision = verdict.decision;
  const bool is_running_damaged = course_of(verdict) == Course::goes_on_damaged;
  const std::string kill = is_running_damaged ? "KILL IT NOW, THEN " : "";
  switch (decision.kind) {
    case DecisionKind::none_needed:
      return decision.ticket == Owner::nobody ? "NO ACTION" : "LET IT RUN, FILE A TICKET";
    case DecisionKind::restart_as_is:
      return kill + (decision.is_traced ? "RUN ONE TRACED STEP" : "RESTART ONCE AS IT IS");
    case DecisionKind::exclude:
      return kill + "RESTART WITHOUT " + suspects_text(verdict);
    case DecisionKind::skip_batch:
      return kill + "RESTART, SKIPPING THIS BATCH";
    case DecisionKind::older_checkpoint: {
      if (decision.is_traced) return kill + "RUN ONE TRACED STEP";
      const CheckpointFile* const file =
          decision.is_to_check ? nullptr : checkpoint_to_load(verdict);
      return kill + "RESTART FROM " +
             (decision.is_to_check ? "A CHECKPOINT THAT IS CHECKED FINITE"
              : file != nullptr    ? file->name
              : may_load_newest(verdict)
                  ? "THE NEWEST CHECKPOINT"
                  : "A CHECKPOINT FROM BEFORE STEP " + first_bad_step(verdict));
    }
    case DecisionKind::do_not_restart:
      return (is_running_damaged ? "KILL IT NOW, PAGE THE " : "LEAVE IT DOWN, PAGE THE ") +
             in_capitals(person_of(decision.page));
  }
  return "";
}

std::string restart_word_of(const Verdict& verdict) {
  const JobDecision& decision = verdict.decision;
  if (decision.is_traced) return "ONLY TRACED";
  switch (decision.kind) {
    case DecisionKind::none_needed:
    case DecisionKind::do_not_restart:
      return "NO";
    case DecisionKind::restart_as_is:
      return "ONCE";
    default:
      return "YES";
  }
}

bool leaves_suspects_out(const JobDecision& decision) {
  return decision.kind == DecisionKind::exclude || decision.kind == DecisionKind::older_checkpoint;
}

std::string hosts_text_of(const Verdict& verdict) {
  const JobDecision& decision = verdict.decision;
  if (decision.ranks.empty()) {
    return decision.is_traced || decision.kind == DecisionKind::none_needed ? "as before"
                                                                            : "none suspected";
  }
  return (leaves_suspects_out(decision) ? "without " : "as before, suspect ") +
         suspects_text(verdict);
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

std::string audience_of(const JobDecision& decision) {
  const Owner reader = decision.page != Owner::nobody ? decision.page : decision.ticket;
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

std::string code_place_of(const Verdict& verdict, const Origin& origin) {
  if (!origin.code) return "";
  const bool is_only_read = was_there(origin) || origin.cause == Cause::memory_corruption;
  std::string text = (is_only_read ? "first read at " : "") + code_place(*origin.code);
  if (!origin.code->function.empty()) text += " in " + origin.code->function;
  switch (origin.phase) {
    case Phase::forward:
    case Phase::loss:
      text += ", forward";
      break;
    case Phase::backward:
      text += ", called in forward, bad in backward";
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

/// "0 / 0 at element [0, 3]".
std::string values_here_of(const Origin& origin) {
  const std::string call = first_bad_call_of(origin);
  if (call.empty() || !origin.tensor || origin.tensor->first_bad_index.empty()) return call;
  return call + " at element " + describe_shape(origin.tensor->first_bad_index);
}

/// The most telling sentences of the evidence that the block has not said.
std::vector<std::string> reasons_of(const Origin& origin) {
  constexpr std::size_t kMost = 2;
  // Said in the rows above, or of use only with all other evidence.
  constexpr std::array kLeftOut = {
      FactKind::rerun_identical, FactKind::rerun_clean,          FactKind::rerun_differs,
      FactKind::gone_in_rerun,   FactKind::rerun_not_completed,  FactKind::replayed,
      FactKind::same_on_ranks,   FactKind::values_at_first_bad,  FactKind::input,
      FactKind::reached,         FactKind::derivative_of,        FactKind::copies_clean,
      FactKind::peers_finite,    FactKind::members_got_the_same, FactKind::called_in_framework,
      FactKind::control_clean,   FactKind::stated_action};
  std::vector<std::string> reasons;
  for (const Fact& fact : ordered_facts(origin)) {
    const int place = place_of(fact);
    const bool is_of_other_variant =
        (fact.kind == FactKind::variant_bad || fact.kind == FactKind::variant_finite) &&
        origin.cause != Cause::compiled_region && origin.cause != Cause::uninitialised_memory &&
        origin.cause != Cause::race;
    const bool is_left_out = is_of_other_variant || place == 0 || place > 4 ||
                             fact.source != FactSource::origin ||
                             std::ranges::count(kLeftOut, fact.kind) > 0;
    if (!is_left_out && reasons.size() < kMost) reasons.push_back(fact_text(fact));
  }
  return reasons;
}

using Rows = std::vector<std::pair<std::string, std::string>>;

void add_row(Rows& rows, const char* label, std::string text) {
  if (!text.empty()) rows.emplace_back(label, std::move(text));
}

/// The first one has the label.
void add_rows(Rows& rows, const char* label, std::vector<std::string> texts) {
  for (std::string& text : texts) {
    rows.emplace_back(&text == &texts.front() ? label : "", std::move(text));
  }
}

/// `nanlocator netcheck` on these hosts alone.
std::string check_of_hosts(const std::vector<std::string>& hosts, int ranks_per_host) {
  return netcheck_command(ranks_per_host, static_cast<int>(hosts.size()), hosts.front());
}

/// What tells a machine from code, and what its outcomes mean.
void add_check(const Verdict& verdict, Rows& rows) {
  const JobDecision& decision = verdict.decision;
  if (decision.ranks.empty() || !verdict.layout) return;
  const auto hosts = hosts_of(verdict, decision.ranks);
  if (hosts.empty()) return;
  const std::string suspects = suspects_text(verdict);
  if (!leaves_suspects_out(decision)) {
    add_row(rows, "check",
            "the error counters on " + joined(hosts) +
                " now: nvidia-smi -q -d ECC; dmesg -T | grep -i xid");
    add_row(rows, "if errors", "restart without " + suspects);
    add_row(rows, "if AGAIN",
            "on " + suspects +
                ": it stays out; on other hosts: page the model "
                "author");
    return;
  }
  add_row(rows, "check",
          check_of_hosts(hosts, verdict.layout->ranks_per_host) + "   (on " + joined(hosts) +
              (hosts.size() > 1 ? ", started on each" : "") +
              ", out of the job; the restart does not wait for it)");
  add_row(rows, "if FAIL", "what it names stays out until it is repaired");
  add_row(rows, "if PASS",
          suspects +
              " may come back; a second event there takes it out; the same "
              "elsewhere: the code or a shared link");
}

void add_details(const Verdict& verdict, const Origin& origin, std::string_view run_dir,
                 Narrative& narrative) {
  narrative.audience = audience_of(verdict.decision);
  narrative.place = code_place_of(verdict, origin);
  if (origin.code && !origin.code->text.empty()) {
    narrative.source = std::to_string(origin.code->line) + " |  " + origin.code->text;
  }
  for (std::size_t i = 0; i < std::min<std::size_t>(2, verdict.decision.ranks.size()); ++i) {
    const RankCoordinates* const known = find_mentioned(verdict, verdict.decision.ranks[i]);
    if (known != nullptr && is_gpu(*known)) {
      narrative.details.emplace_back("device", known->describe());
    }
  }
  add_row(narrative.details, "here", values_here_of(origin));
  add_rows(narrative.details, "why", reasons_of(origin));
  add_rows(narrative.details, "next", steps_text(origin));
  if (!origin.bundle.empty()) {
    add_row(narrative.details, "replay", replay_command(run_dir, origin.bundle));
  }
}

}  // namespace

std::string rank_place_of(const RankCoordinates& coordinates) {
  const std::string rank = "rank " + std::to_string(coordinates.rank);
  if (coordinates.host.empty()) return rank;
  if (!is_gpu(coordinates)) return rank + " on " + coordinates.host;
  return rank + " = " + coordinates.host + ":" + gpu_of(coordinates);
}

std::string error_code_of(const Verdict& verdict) {
  if (verdict.status == VerdictStatus::clean) return "clean";
  const Origin* const origin = deciding_origin(verdict);
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
  narrative.restart = restart_word_of(verdict);
  narrative.hosts = hosts_text_of(verdict);
  narrative.load = load_of(verdict);
  narrative.page = person_of(decision.page);
  narrative.ticket = decision.ticket == Owner::nobody ? "none" : person_of(decision.ticket);
  add_row(narrative.rows, "what", what_of(verdict, origin));
  if (origin != nullptr) add_row(narrative.rows, "cause", cause_of(verdict, *origin));
  add_row(narrative.rows, "state", state_of(verdict));
  add_row(narrative.rows, "kill", kill_of(verdict));
  add_row(narrative.rows, "checkpoint", checkpoint_of(verdict));
  if (decision.is_traced) {
    const CheckpointFile* const file = checkpoint_to_load(verdict);
    add_row(narrative.rows, "trace",
            "NANLOCATOR_LEVEL=operators in the job's environment, from " +
                (file == nullptr ? std::string("the checkpoint") : file->name) + " to " +
                step_text(verdict.iteration) +
                "; it is slow, stops there, and its block names the line");
    add_row(narrative.rows, "if finite", "take the variable out and go on: it happened once");
  }
  add_check(verdict, narrative.rows);
  if (verdict.origins.size() > 1) {
    add_row(narrative.rows, "also",
            count_text(verdict.origins.size() - 1, "other place") +
                " where NaN or Inf came first: nanlocator report --verbose");
  }
  if (!verdict.silent_ranks.empty()) {
    add_row(narrative.rows, "silent",
            "no answer from " + count_text(verdict.silent_ranks.size(), "rank") + ": " +
                short_list(verdict.silent_ranks));
  }
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
