#include "nanlocator/verdict/decision.hpp"

#include <algorithm>
#include <iterator>
#include <set>
#include <string>
#include <utility>

#include "nanlocator/verdict/verdict.hpp"

namespace nanlocator::inline verdict_room {
namespace {

template <FactKind... kinds>
bool shows(const Origin& origin) {
  return (has_fact(origin.facts, kinds) || ...);
}

bool was_bad_in_replay(const Fact& fact) {
  return fact.kind == FactKind::replayed && fact.conclusion != name_of(ReplayConclusion::varies) &&
         fact.conclusion != name_of(ReplayConclusion::not_replayed);
}

bool came_again(const Origin& origin) {
  return shows<FactKind::rerun_identical, FactKind::rerun_differs, FactKind::transfer_bad_again>(
             origin) &&
         !shows<FactKind::gone_in_rerun>(origin);
}

/// True if one device, and no code that others execute, too, may have made it. Once is no proof.
bool may_be_one_machine(const Origin& origin) {
  switch (origin.cause) {
    case Cause::bad_weight:
      return shows<FactKind::copies_clean>(origin);
    case Cause::memory_corruption:
    case Cause::not_reproduced:
    case Cause::pipeline_transfer:
    case Cause::collective_result:
    case Cause::operator_bug:
      return origin.owner == Owner::cluster_operator || origin.action == Action::report_kernel ||
             origin.action == Action::check_collective_code;
    default:
      return false;
  }
}

// ---- the proposal for one origin ----

struct Proposal {
  DecisionKind kind = DecisionKind::restart_as_is;
  Owner caller = Owner::model_author;  // paged if the job stays down, else the owner of the ticket
  bool is_traced = false;
  bool is_before_step = false;  // the step itself made the weights bad
};

Owner author_of(const Origin& origin) {
  return origin.owner == Owner::unknown || origin.owner == Owner::cluster_operator ||
                 origin.owner == Owner::nobody
             ? Owner::model_author
             : origin.owner;
}

/// A fault that comes again with the same data is the author's; any other is tried once more.
Proposal if_it_comes_again(const Origin& origin, bool is_again) {
  return {is_again ? DecisionKind::do_not_restart : DecisionKind::restart_as_is, author_of(origin)};
}

Proposal proposal_for_stored_value(const Origin& origin) {
  if (shows<FactKind::update_undefined>(origin)) {
    return {DecisionKind::do_not_restart, Owner::model_author};
  }
  return {DecisionKind::older_checkpoint,
          shows<FactKind::copies_clean>(origin) ? Owner::cluster_operator : Owner::model_author};
}

/// One that fails again, bit for bit, is rather the code: a buffer that is read before the transfer
/// has ended.
Proposal proposal_for_collective(const Origin& origin) {
  const bool are_few = !origin.candidates.empty() && origin.candidates.size() <= 2;
  if (origin.owner == Owner::framework || came_again(origin)) {
    return {DecisionKind::do_not_restart, Owner::framework};
  }
  return {are_few ? DecisionKind::exclude : DecisionKind::restart_as_is, Owner::cluster_operator};
}

/// A call gives it again on the inputs of the first pass, which the re-run did not have.
bool is_of_lost_state(const Origin& origin) {
  return shows<FactKind::not_restored>(origin) &&
         std::ranges::any_of(origin.facts, was_bad_in_replay);
}

Proposal proposal_for_update(const Origin& origin) {
  if (origin.action == Action::check_update && origin.detail == Detail::sqrt_of_negative) {
    return {DecisionKind::older_checkpoint, Owner::model_author};
  }
  const bool is_again = std::ranges::any_of(origin.facts, was_bad_in_replay);
  return {is_again ? DecisionKind::do_not_restart : DecisionKind::older_checkpoint,
          Owner::model_author, false, true};
}

Proposal proposal_for(const Origin& origin) {
  switch (origin.cause) {
    case Cause::bad_weight:
    case Cause::bad_buffer:  // without a name, it may be a buffer of a module that is not watched
    case Cause::optimizer_state:
      return proposal_for_stored_value(origin);
    case Cause::bad_input:
      if (origin.detail == Detail::rewritten) {
        return {DecisionKind::restart_as_is, Owner::model_author};
      }
      if (origin.detail == Detail::unrecorded) {
        return {DecisionKind::do_not_restart, Owner::model_author};
      }
      [[fallthrough]];
    case Cause::empty_loss_mask:
      return {DecisionKind::skip_batch, Owner::data};
    case Cause::loss_scale:
      return {DecisionKind::none_needed, Owner::nobody};
    case Cause::left_gradients:
      return {DecisionKind::restart_as_is, Owner::model_author};
    case Cause::divergence:
      return {DecisionKind::do_not_restart, Owner::model_author};
    case Cause::operator_overflow:
      if (origin.action == Action::find_weight_writer) {
        return {DecisionKind::older_checkpoint, Owner::model_author};
      }
      return if_it_comes_again(origin, is_deterministic(origin) || came_again(origin));
    case Cause::operator_undefined:
    case Cause::user_hook:
    case Cause::bad_scalar:
    case Cause::compiled_region:
    case Cause::collective_sum:
    case Cause::recompute_mismatch:
    case Cause::kernel_bug:
      return if_it_comes_again(origin,
                               !shows<FactKind::gone_in_rerun, FactKind::rerun_clean>(origin) ||
                                   is_of_lost_state(origin));
    case Cause::operator_bug:
      if (origin.detail == Detail::custom_code) return if_it_comes_again(origin, true);
      // Finite with the same inputs elsewhere: the kernel, or this device.
      if (origin.candidates.size() > 1) return if_it_comes_again(origin, came_again(origin));
      return {DecisionKind::exclude, Owner::cluster_operator};
    case Cause::memory_corruption:  // who wrote is not known: a race may write elsewhere next time
      return {DecisionKind::restart_as_is,
              origin.action == Action::find_writer ? author_of(origin) : Owner::cluster_operator};
    case Cause::not_reproduced:
      return {DecisionKind::restart_as_is,
              origin.action == Action::test_device ? Owner::cluster_operator : author_of(origin)};
    case Cause::race:
    case Cause::uninitialised_memory:
      return {DecisionKind::restart_as_is, author_of(origin)};
    case Cause::collective_result:
      return proposal_for_collective(origin);
    case Cause::pipeline_transfer:
      if (origin.owner == Owner::framework) return if_it_comes_again(origin, true);
      return {DecisionKind::exclude, Owner::cluster_operator};
    case Cause::optimizer_update:
      return proposal_for_update(origin);
    case Cause::unknown:
      if (shows<FactKind::norm_overflows>(origin)) return {};  // a trace shows nothing of it
      return {DecisionKind::restart_as_is, Owner::model_author, true,
              origin.phase == Phase::params_after};
  }
  return {};
}

/// The ranks at both ends of what may be a link, or those of the origin.
std::vector<int> suspects_of(const Origin& origin) {
  constexpr std::size_t kMost = 8;  // more cannot be taken out on a suspicion
  std::set<int> ranks(origin.candidates.begin(), origin.candidates.end());
  if (const Fact* const message = find_fact(origin.facts, FactKind::message_changed)) {
    ranks.insert(message->peers.begin(), message->peers.end());
  }
  if (ranks.size() > kMost) return {};
  return {ranks.begin(), ranks.end()};
}

// ---- earlier attempts ----

struct Device {
  std::string host, device;
  friend auto operator<=>(const Device&, const Device&) = default;
};

std::set<Device> devices_of(const Verdict& verdict, const std::vector<int>& ranks) {
  std::set<Device> devices;
  for (const int rank : ranks) {
    const RankCoordinates* const known = find_mentioned(verdict, rank);
    if (known != nullptr && !known->host.empty()) devices.insert({known->host, known->device});
  }
  return devices;
}

/// Another script has other lines, also in the same folder; so has one that was mended since.
bool is_at_same_place(const Origin& a, const Origin& b) {
  const bool are_lines_known = a.code && b.code;
  const bool is_same_line =
      !are_lines_known || (a.code->file == b.code->file && a.code->line == b.code->line);
  return is_same_line && a.cause == b.cause && a.detail == b.detail && a.phase == b.phase &&
         a.module == b.module && a.op == b.op && a.parameter == b.parameter;
}

Recurrence recurrence_in(const Verdict& verdict, const Origin& origin, const Verdict& earlier) {
  const auto devices = devices_of(verdict, suspects_of(origin));
  const bool may_be_machine = may_be_one_machine(origin);
  Recurrence found = Recurrence::none;
  for (const Origin& before : earlier.origins) {
    const auto devices_before = devices_of(earlier, suspects_of(before));
    std::set<Device> common;
    std::ranges::set_intersection(devices, devices_before, std::inserter(common, common.end()));
    const bool was_gone =  // in a re-run that could not tell a device from what code reads
        before.cause == Cause::unknown &&
        shows<FactKind::rerun_clean, FactKind::gone_in_rerun>(before);
    if (may_be_machine && (may_be_one_machine(before) || was_gone) && !common.empty()) {
      return Recurrence::same_device;
    }
    if (is_at_same_place(origin, before)) found = Recurrence::same_place;
  }
  return found;
}

/// The same machine twice is left out; the same fault twice is not tried a third time.
void add_recurrence(const Verdict& verdict, std::span<const Verdict> earlier,
                    JobDecision& decision) {
  const Origin& origin = verdict.origins[static_cast<std::size_t>(*decision.origin)];
  for (const Verdict& each : earlier) {
    const Recurrence found = recurrence_in(verdict, origin, each);
    if (found != Recurrence::none) decision.recurrence = found;
    if (found == Recurrence::same_device) break;  // it explains the place
  }
  if (decision.kind == DecisionKind::none_needed) return;
  if (decision.recurrence == Recurrence::same_device && decision.kind < DecisionKind::skip_batch &&
      !decision.ranks.empty()) {
    decision.kind = DecisionKind::exclude;
  }
  if (decision.recurrence == Recurrence::same_place) {
    decision.kind = DecisionKind::do_not_restart;
    decision.is_traced = false;
    decision.page = author_of(origin);
    decision.ticket = Owner::nobody;
  }
}

// ---- the decision ----

void set_checkpoint(const Verdict& verdict, bool is_before_step, JobDecision& decision) {
  const JobState& job = verdict.job;
  decision.newest_step = verdict.iteration - 1;
  if (job.restart_before) decision.newest_step = *job.restart_before - 1;
  decision.is_to_check = job.restart == Restart::check_first && !is_before_step;
  // The value was there before the step: which step brought it is not known.
  if (decision.is_to_check && job.are_weights_finite != true) decision.newest_step.reset();
}

/// A tensor that the program made before the first step, by code alone: it was seen to load
/// nothing.
bool is_made_by_start(const Verdict& verdict, const JobDecision& decision) {
  if (!decision.origin || !verdict.launch || verdict.iteration > 1) return false;
  const Origin& origin = verdict.origins[static_cast<std::size_t>(*decision.origin)];
  const Launch& launch = *verdict.launch;
  return origin.cause == Cause::bad_buffer && origin.parameter.empty() &&
         launch.checkpoints.empty() && launch.loaded.empty() && !launch.loaded_elsewhere;
}

/// No checkpoint cures it.
void leave_to_author(JobDecision& decision) {
  decision.kind = DecisionKind::do_not_restart;
  decision.is_to_check = false;
  decision.is_traced = false;
  decision.page = Owner::model_author;
  decision.ticket = Owner::nobody;
}

/// Where the checkpoints decide, and were read.
void use_checkpoints(const Verdict& verdict, JobDecision& decision) {
  if (is_made_by_start(verdict, decision)) leave_to_author(decision);
  const bool is_read = decision.is_to_check && verdict.launch && verdict.launch->steps_before;
  if (!is_read || verdict.launch->checkpoints.empty()) return;
  const auto& found = verdict.launch->checkpoints;
  const auto finite = std::ranges::find(found, true, &CheckpointFile::is_finite);
  if (finite != found.end()) {
    decision.newest_step = finite->step - *verdict.launch->steps_before;
    decision.is_to_check = false;
  } else if (std::ranges::all_of(
                 found, [](const CheckpointFile& each) { return each.is_finite == false; })) {
    leave_to_author(decision);
  }
}

/// A rank that ended by itself is the better reason where only a further attempt was to tell more.
void use_endings(const Verdict& verdict, JobDecision& decision) {
  if (!verdict.launch || verdict.launch->endings.empty()) return;
  const auto& endings = verdict.launch->endings;
  const RankEnding& decisive = *std::ranges::max_element(endings, {}, &RankEnding::kind);
  if (!is_open_to_endings(decision) || decisive.kind < EndingKind::killed) return;
  decision.ended_rank = decisive.rank;
  decision.is_traced = false;
  decision.ticket = Owner::model_author;
  if (decisive.kind == EndingKind::code) {
    decision.kind = DecisionKind::do_not_restart;
    decision.page = std::exchange(decision.ticket, Owner::nobody);
  } else if (decisive.kind == EndingKind::machine) {
    decision.kind = DecisionKind::exclude;
    decision.ticket = Owner::cluster_operator;
    for (const RankEnding& each : endings) {
      if (each.kind == EndingKind::machine) decision.ranks.push_back(each.rank);
    }
  }
}

/// The facts that separate a decision from another one.
bool is_of_weight(FactKind kind) {
  switch (kind) {
    case FactKind::rerun_identical:
    case FactKind::rerun_differs:
    case FactKind::rerun_clean:
    case FactKind::gone_in_rerun:
    case FactKind::happened_once:
    case FactKind::replayed:
    case FactKind::kernel_replayed:
    case FactKind::transfer_bad_again:
    case FactKind::copies_clean:
    case FactKind::every_copy_bad:
    case FactKind::optimizer_state_bad:
    case FactKind::finite_after_update:
    case FactKind::message_changed:
    case FactKind::collective_changed:
    case FactKind::climbed:
    case FactKind::gradients_left:
    case FactKind::update_undefined:
    case FactKind::missing_operator:
      return true;
    default:
      return false;
  }
}

}  // namespace

const RankCoordinates* find_mentioned(const Verdict& verdict, int rank) noexcept {
  if (!verdict.layout) return nullptr;
  const auto& known = verdict.layout->mentioned;
  const auto found = std::ranges::find(known, rank, &RankCoordinates::rank);
  return found == known.end() ? nullptr : &*found;
}

bool is_open_to_endings(const JobDecision& decision) noexcept {
  return decision.kind == DecisionKind::restart_as_is && decision.ranks.empty() &&
         decision.recurrence == Recurrence::none && !decision.ended_rank;
}

bool is_deterministic(const Origin& origin) {
  switch (origin.cause) {
    case Cause::bad_input:
      return origin.detail != Detail::rewritten;
    case Cause::empty_loss_mask:
    case Cause::operator_undefined:
    case Cause::user_hook:
    case Cause::bad_scalar:
      return true;
    default:
      return shows<FactKind::transfer_bad_again>(origin) ||
             std::ranges::any_of(origin.facts, was_bad_in_replay);
  }
}

std::optional<std::int64_t> deciding_step(const Verdict& verdict) {
  const auto index = static_cast<std::size_t>(verdict.decision.origin.value_or(0));
  if (index >= verdict.origins.size()) return std::nullopt;
  const Fact* const left = find_fact(verdict.origins[index].facts, FactKind::gradients_left);
  return left == nullptr ? std::nullopt : left->step;
}

void follow(const Verdict& deciding, Verdict& verdict) {
  const auto origin = verdict.decision.origin;
  verdict.decision = deciding.decision;
  verdict.decision.origin = origin;
}

Course course_of(const Verdict& verdict) {
  const std::string& on_bad = verdict.job.on_bad;
  if (on_bad.empty() || verdict.status == VerdictStatus::clean) return Course::unknown;
  if (verdict.status == VerdictStatus::benign) return Course::goes_on;
  const bool is_clean_now = verdict.rerun.reproduced == false;
  if (on_bad == "stop" || (on_bad == "recover" && !is_clean_now)) return Course::stops;
  const bool is_applied = on_bad == "report" && !is_clean_now &&
                          !verdict.spread.parameters.empty() && !verdict.job.framework_skips_update;
  const bool is_damaged = is_applied || verdict.job.restart >= Restart::before_step;
  return is_damaged ? Course::goes_on_damaged : Course::goes_on;
}

JobDecision decide(const Verdict& verdict, std::span<const Verdict> earlier) {
  JobDecision decision;
  if (verdict.status == VerdictStatus::clean || verdict.status == VerdictStatus::benign) {
    return decision;
  }
  const Course course = course_of(verdict);
  Proposal proposal{DecisionKind::restart_as_is, Owner::model_author, true};  // without any origin
  for (std::size_t i = 0; i < verdict.origins.size(); ++i) {
    const Proposal each = proposal_for(verdict.origins[i]);
    const bool leads = !decision.origin || each.kind > proposal.kind ||
                       (each.kind == proposal.kind && proposal.is_traced && !each.is_traced);
    if (leads) {
      proposal = each;
      decision.origin = static_cast<int>(i);
    }
  }
  decision.kind = proposal.kind;
  decision.is_traced = proposal.is_traced && !verdict.job.was_traced;
  set_checkpoint(verdict, proposal.is_before_step, decision);
  const bool is_down = decision.kind == DecisionKind::do_not_restart;
  (is_down ? decision.page : decision.ticket) = proposal.caller;
  if (decision.origin) {
    for (const Origin& origin : verdict.origins) {
      if (proposal_for(origin).kind == DecisionKind::exclude || may_be_one_machine(origin)) {
        const auto suspects = suspects_of(origin);
        decision.ranks.insert(decision.ranks.end(), suspects.begin(), suspects.end());
      }
    }
    std::ranges::sort(decision.ranks);
    const auto twice = std::ranges::unique(decision.ranks);
    decision.ranks.erase(twice.begin(), twice.end());
    for (const Fact& fact : verdict.origins[static_cast<std::size_t>(*decision.origin)].facts) {
      if (is_of_weight(fact.kind)) decision.rests_on.push_back(fact.kind);
    }
    add_recurrence(verdict, earlier, decision);
  }
  if (course == Course::stops) use_endings(verdict, decision);
  if (course == Course::stops) use_checkpoints(verdict, decision);
  if (course == Course::goes_on) {  // nobody is woken for a job that trains well
    decision.kind = DecisionKind::none_needed;
    decision.is_traced = false;
    decision.newest_step.reset();
    decision.is_to_check = false;
    if (decision.page != Owner::nobody)
      decision.ticket = std::exchange(decision.page, Owner::nobody);
  } else if (course == Course::goes_on_damaged && decision.kind < DecisionKind::older_checkpoint &&
             decision.kind != DecisionKind::skip_batch) {
    decision.kind = DecisionKind::older_checkpoint;
  }
  return decision;
}

}  // namespace nanlocator::inline verdict_room
