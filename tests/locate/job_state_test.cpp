#include "locate/job_state.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace nanlocator {
namespace {

Ledger ledger_of(std::optional<std::int64_t> weights_finite_after = {}) {
  Ledger ledger;
  ledger.run_id = "run";
  ledger.iteration = 12;
  ledger.coverage = {{Phase::params_before, {0}}};
  ledger.backward_order = {{.id = 0, .name = "w", .shape = {4}}};
  ledger.weights_finite_after = weights_finite_after;
  return ledger;
}

Origin origin_of(Cause cause, Phase phase, Facts facts = {}) {
  Origin origin;
  origin.iteration = 12;
  origin.cause = cause;
  origin.phase = phase;
  origin.facts = std::move(facts);
  return origin;
}

JobState state_of(const std::vector<Origin>& origins, std::optional<bool> reproduced = {},
                  std::optional<std::int64_t> weights_finite_after = {}) {
  const std::vector ledgers = {ledger_of(weights_finite_after)};
  return job_state_of(Incident(ledgers, 1), origins, {reproduced.has_value(), reproduced, {}});
}

TEST(JobState, AFaultThatIsGoneInTheRerunLeavesTheLatestCheckpoint) {
  const auto gone = origin_of(Cause::not_reproduced, Phase::backward);
  EXPECT_EQ(state_of({gone}, false).restart, Restart::latest);
  EXPECT_EQ(state_of({gone}, false).are_weights_finite, true);
}

TEST(JobState, WhatIsBadAgainInTheRerunIsBadAgainAfterARestart) {
  const auto bad = origin_of(Cause::unknown, Phase::forward);
  EXPECT_EQ(state_of({bad}, true).restart, Restart::repeats);
  EXPECT_EQ(state_of({bad}).restart, Restart::unknown);
  const auto once = origin_of(Cause::unknown, Phase::forward, {{.kind = FactKind::gone_in_rerun}});
  EXPECT_EQ(state_of({once}, true).restart, Restart::latest);
}

TEST(JobState, OfWhatTheRerunDidNotExecuteItSaysNothing) {
  const auto reduced = origin_of(Cause::collective_result, Phase::grad_reduced);
  EXPECT_EQ(state_of({reduced}, true).restart, Restart::unknown);
  EXPECT_EQ(state_of({reduced}, false).restart, Restart::unknown);
}

TEST(JobState, ABadWeightNeedsACheckpointFromBeforeItWasBad) {
  const auto weight = origin_of(Cause::bad_weight, Phase::params_before);
  EXPECT_EQ(state_of({weight}, true).restart, Restart::check_first);
  const auto known = state_of({weight}, true, 9);
  EXPECT_EQ(known.restart, Restart::before_step);
  EXPECT_EQ(known.restart_before, 10) << "what was saved after step 9 was finite";
}

TEST(JobState, ATensorThatAModuleKeepsMayBeInACheckpoint) {
  Origin kept = origin_of(Cause::bad_buffer, Phase::forward);
  EXPECT_EQ(state_of({kept}, true).restart, Restart::check_first);
  kept.parameter = "norm.running_mean";
  EXPECT_EQ(state_of({kept}, true).restart, Restart::check_first);
}

TEST(JobState, TheWorstOfSeveralOriginsCounts) {
  const auto gone = origin_of(Cause::not_reproduced, Phase::backward);
  const auto climb = origin_of(Cause::divergence, Phase::forward,
                               {{.kind = FactKind::climbed, .step = 4, .last_step = 11}});
  const auto update = origin_of(Cause::optimizer_update, Phase::params_after);
  auto state = state_of({gone, update, climb});
  EXPECT_EQ(state.restart, Restart::before_step);
  EXPECT_EQ(state.restart_before, 4);
  state = state_of({climb, origin_of(Cause::optimizer_state, Phase::params_after)});
  EXPECT_EQ(state.restart, Restart::check_first);
  EXPECT_FALSE(state.restart_before);
}

TEST(JobState, NoCheckpointIsCalledSafeWhereAWeightIsBad) {
  std::vector ledgers = {ledger_of()};
  Sighting weight;
  weight.phase = Phase::params_before;
  weight.role = "weight";
  weight.parameter_id = 0;
  weight.shape = {4};
  weight.stats = {.numel = 4, .nan = 1, .first_bad = 2};
  ledgers[0].sightings = {weight};
  const auto gone = origin_of(Cause::not_reproduced, Phase::backward);
  const auto state = job_state_of(Incident(ledgers, 1), {gone}, {true, false, {}});
  EXPECT_EQ(state.are_weights_finite, false);
  EXPECT_EQ(state.restart, Restart::check_first);
}

TEST(JobState, WithASilentRankNobodyKnowsWhetherAllWeightsAreFinite) {
  std::vector ledgers = {ledger_of()};
  ledgers[0].coordinates.world_size = 2;
  ledgers[0].coordinates.dp = {0, 2};
  EXPECT_FALSE(job_state_of(Incident(ledgers, 2), {}, {}).are_weights_finite);
}

}  // namespace
}  // namespace nanlocator
