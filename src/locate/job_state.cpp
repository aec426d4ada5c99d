#include "locate/job_state.hpp"

#include <algorithm>

#include "nanlocator/verdict/decision.hpp"

namespace nanlocator::inline locate_room {
namespace {

/// The advice from one origin; `before` belongs to Restart::before_step.
struct Advice {
  Restart restart = Restart::unknown;
  std::optional<std::int64_t> before{};
};

Advice advice_on_stored_value(const Origin& origin,
                              std::optional<std::int64_t> weights_finite_after) {
  const Fact* const update = find_fact(origin.facts, FactKind::update_undefined);
  if (update != nullptr && update->step) return {Restart::before_step, *update->step};
  // The optimizer's state may have been bad before its weights.
  if (origin.cause != Cause::bad_weight || !weights_finite_after) return {Restart::check_first};
  return {Restart::before_step, *weights_finite_after + 1};
}

Advice advice_on(const Origin& origin, const RerunOutcome& rerun,
                 std::optional<std::int64_t> weights_finite_after) {
  switch (origin.cause) {
    case Cause::bad_buffer:
    case Cause::bad_weight:
    case Cause::optimizer_state:
      return advice_on_stored_value(origin, weights_finite_after);
    case Cause::divergence: {
      const Fact* const climb = find_fact(origin.facts, FactKind::climbed);
      return {Restart::before_step, climb == nullptr ? origin.iteration : climb->step};
    }
    case Cause::left_gradients:
    case Cause::not_reproduced:
      return {Restart::latest};
    case Cause::uninitialised_memory:  // the memory held leftover data
    case Cause::race:                  // depends on which access came first
      return {Restart::unknown};
    case Cause::optimizer_update:
      if (origin.detail == Detail::sqrt_of_negative)
        return {Restart::check_first};  // its moments are bad
      break;
    case Cause::memory_corruption:
      return {rerun.reproduced == true && !has_fact(origin.facts, FactKind::gone_in_rerun)
                  ? Restart::repeats
                  : Restart::latest};
    default:
      break;
  }
  if (origin.detail == Detail::rewritten) return {Restart::unknown};  // as for a race
  if (origin.action == Action::find_weight_writer) {
    return {Restart::check_first};  // it may have been saved with such a weight
  }
  if (origin.phase == Phase::params_after) return {Restart::before_step, origin.iteration};
  const bool was_finite_again = rerun.reproduced == false && rerun.not_restored.empty() &&
                                has_fact(origin.facts, FactKind::replayed);
  if (is_deterministic(origin) && !was_finite_again) return {Restart::repeats};
  // The re-run ends with backward: later phases were not executed again.
  if (!rerun.reproduced || origin.phase > Phase::grad_local) return {Restart::unknown};
  if (!*rerun.reproduced && !rerun.not_restored.empty()) return {Restart::unknown};
  const bool is_gone = !*rerun.reproduced || has_fact(origin.facts, FactKind::gone_in_rerun);
  return {is_gone ? Restart::latest : Restart::repeats};
}

/// Empty if a rank did not report it.
std::optional<bool> are_weights_finite(const Incident& incident) {
  const auto ranks = incident.ranks();
  const auto has_bad = [](const RankEvidence& rank) {
    return !rank.bad(Phase::params_before).empty();
  };
  if (std::ranges::any_of(ranks, has_bad)) return false;
  const bool is_known =
      incident.silent().empty() && std::ranges::all_of(ranks, [](const RankEvidence& rank) {
        return rank.scanned(Phase::params_before);
      });
  return is_known ? std::optional(true) : std::nullopt;
}

}  // namespace

JobState job_state_of(const Incident& incident, const std::vector<Origin>& origins,
                      const RerunOutcome& rerun) {
  JobState job;
  const auto ranks = incident.ranks();
  if (ranks.empty()) return job;
  const Ledger& first = ranks.front().ledger();
  job.on_bad = first.on_bad;
  job.framework_skips_update = first.framework_skips_update;
  job.is_discarded = first.is_discarded;
  job.was_traced = std::ranges::all_of(
      ranks, [](const RankEvidence& rank) { return rank.ledger().level == "operators"; });
  job.are_weights_updated = std::ranges::any_of(ranks, [](const RankEvidence& rank) {
    return rank.scanned(Phase::params_after) || !rank.bad(Phase::params_after).empty();
  });
  job.are_weights_finite = are_weights_finite(incident);
  if (origins.empty()) return job;
  job.restart = Restart::latest;
  for (const Origin& origin : origins) {
    const Advice advice = advice_on(origin, rerun, first.weights_finite_after);
    job.restart = std::max(job.restart, advice.restart);
    if (!advice.before) continue;
    job.restart_before = std::min(*advice.before, job.restart_before.value_or(*advice.before));
  }
  const bool is_of_weights = std::ranges::any_of(origins, [](const Origin& origin) {
    return origin.cause == Cause::bad_weight || origin.cause == Cause::optimizer_state ||
           origin.phase == Phase::params_before;
  });
  const bool are_unused =
      job.are_weights_finite == false && !is_of_weights && rerun.reproduced == true;
  if (are_unused) job.are_weights_finite.reset();  // those that the step used may be
  const bool has_bad_weights = job.are_weights_finite == false;
  if (has_bad_weights && job.restart < Restart::before_step) job.restart = Restart::check_first;
  if (job.restart != Restart::before_step) job.restart_before.reset();
  return job;
}

}  // namespace nanlocator::inline locate_room
