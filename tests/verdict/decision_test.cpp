#include "nanlocator/verdict/decision.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "nanlocator/verdict/cause_table.hpp"
#include "nanlocator/verdict/verdict.hpp"

namespace nanlocator {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

RankCoordinates on(const std::string& host, int rank) {
  return {.rank = rank,
          .world_size = 16,
          .host = host,
          .local_rank = rank % 8,
          .device = "cuda:" + std::to_string(rank % 8) + " GPU-" + host + std::to_string(rank % 8)};
}

/// One origin on rank 3 of a17 in step 10 of a job that stops.
Verdict verdict_of(Cause cause, Facts facts = {}, Detail detail = Detail::none) {
  Verdict verdict;
  verdict.iteration = 10;
  verdict.status = VerdictStatus::located;
  Origin origin;
  origin.iteration = 10;
  origin.phase = Phase::forward;
  origin.candidates = {3};
  origin.module = "body";
  origin.op = "aten::mm";
  origin.cause = cause;
  origin.detail = detail;
  origin.facts = std::move(facts);
  complete(origin);
  verdict.origins = {std::move(origin)};
  verdict.job.on_bad = "stop";
  verdict.job.are_weights_finite = true;
  verdict.layout =
      JobLayout{.first_rank = on("a17", 0), .ranks_per_host = 8, .mentioned = {on("a17", 3)}};
  return verdict;
}

TEST(Decision, CodeThatFailsAgainStaysDown) {
  const JobDecision decision =
      decide(verdict_of(Cause::operator_undefined, {}, Detail::log_of_negative));
  EXPECT_EQ(decision.kind, DecisionKind::do_not_restart);
  EXPECT_EQ(decision.page, Owner::model_author);
  EXPECT_EQ(decision.ticket, Owner::nobody);
  EXPECT_THAT(decision.ranks, IsEmpty());
  EXPECT_EQ(decision.newest_step, 9);
}

/// A finding that only a traced restart would explain, and the end of rank 1.
Verdict unexplained_but_ended(EndingKind kind) {
  Verdict verdict = verdict_of(Cause::unknown);
  verdict.silent_ranks = {1};
  verdict.launch = Launch{.endings = {{1, kind, "..."}}};
  verdict.decision = decide(verdict);
  return verdict;
}

TEST(Decision, ARankThatEndedByItselfDecidesWhereNothingElseDoes) {
  const JobDecision code = unexplained_but_ended(EndingKind::code).decision;
  EXPECT_EQ(code.kind, DecisionKind::do_not_restart);
  EXPECT_EQ(code.page, Owner::model_author);
  EXPECT_EQ(code.ticket, Owner::nobody);
  const JobDecision machine = unexplained_but_ended(EndingKind::machine).decision;
  EXPECT_EQ(machine.kind, DecisionKind::exclude);
  EXPECT_THAT(machine.ranks, ElementsAre(1));
  EXPECT_EQ(machine.ticket, Owner::cluster_operator);
  const JobDecision killed = unexplained_but_ended(EndingKind::killed).decision;
  EXPECT_EQ(killed.kind, DecisionKind::restart_as_is);
  EXPECT_FALSE(killed.is_traced);
  for (const JobDecision& each : {code, machine, killed}) EXPECT_EQ(each.ended_rank, 1);
}

TEST(Decision, AConsequenceAndAProvenOriginLeaveItAsItIs) {
  for (const EndingKind kind : {EndingKind::other, EndingKind::of_peers}) {
    const JobDecision decision = unexplained_but_ended(kind).decision;
    EXPECT_TRUE(decision.is_traced);
    EXPECT_EQ(decision.ended_rank, std::nullopt);
  }
  Verdict proven = verdict_of(Cause::operator_undefined, {}, Detail::log_of_negative);
  const JobDecision before = decide(proven);
  proven.launch = Launch{.endings = {{1, EndingKind::machine, "..."}}};
  EXPECT_EQ(decide(proven), before);
}

TEST(Decision, ABadBatchIsSkippedAndNobodyIsWoken) {
  for (const Cause cause : {Cause::bad_input, Cause::empty_loss_mask}) {
    const JobDecision decision = decide(verdict_of(cause));
    EXPECT_EQ(decision.kind, DecisionKind::skip_batch);
    EXPECT_EQ(decision.page, Owner::nobody);
    EXPECT_EQ(decision.ticket, Owner::data);
  }
}

TEST(Decision, WhatHappenedOnceIsTriedOnceMore) {
  const JobDecision decision =
      decide(verdict_of(Cause::not_reproduced, {{.kind = FactKind::rerun_clean}}));
  EXPECT_EQ(decision.kind, DecisionKind::restart_as_is);
  EXPECT_FALSE(decision.is_traced);
  EXPECT_THAT(decision.ranks, ElementsAre(3));
  EXPECT_THAT(decision.rests_on, ElementsAre(FactKind::rerun_clean));
}

TEST(Decision, TheSameDeviceTwiceIsLeftOut) {
  const Verdict earlier = verdict_of(Cause::not_reproduced);
  Verdict now = verdict_of(Cause::not_reproduced);
  now.origins[0].module = "head";
  const JobDecision decision = decide(now, {{earlier}});
  EXPECT_EQ(decision.recurrence, Recurrence::same_device);
  EXPECT_EQ(decision.kind, DecisionKind::exclude);
  EXPECT_THAT(decision.ranks, ElementsAre(3));
}

TEST(Decision, TheSamePlaceOnAnotherDeviceIsNotTriedAThirdTime) {
  const Verdict earlier = verdict_of(Cause::not_reproduced);
  Verdict now = verdict_of(Cause::not_reproduced);
  now.layout->mentioned = {on("a18", 3)};
  const JobDecision decision = decide(now, {{earlier}});
  EXPECT_EQ(decision.recurrence, Recurrence::same_place);
  EXPECT_EQ(decision.kind, DecisionKind::do_not_restart);
  EXPECT_EQ(decision.page, Owner::model_author);
}

TEST(Decision, AnotherFaultIsNoRecurrence) {
  const Verdict earlier = verdict_of(Cause::bad_input);
  EXPECT_EQ(decide(verdict_of(Cause::not_reproduced), {{earlier}}).recurrence, Recurrence::none);
}

TEST(Decision, TheSameCauseInAnotherLineIsNoRecurrence) {
  Verdict earlier = verdict_of(Cause::bad_input);
  Verdict now = earlier;
  earlier.origins[0].code = CodeLine{"linear.py", 9, "train", "model(x)"};
  now.origins[0].code = CodeLine{"convolution.py", 9, "train", "model(x)"};
  EXPECT_EQ(decide(now, {{earlier}}).recurrence, Recurrence::none);
  now.origins[0].code = earlier.origins[0].code;
  EXPECT_EQ(decide(now, {{earlier}}).recurrence, Recurrence::same_place);
}

TEST(Decision, AKernelThatIsWrongOnOneDeviceLeavesItOutFirst) {
  const Verdict first = verdict_of(Cause::operator_bug);
  EXPECT_EQ(decide(first).kind, DecisionKind::exclude);
  Verdict again = first;
  again.layout->mentioned = {on("a18", 3)};
  EXPECT_EQ(decide(again, {{first}}).kind, DecisionKind::do_not_restart);
}

TEST(Decision, BothEndsOfATransferAreLeftOut) {
  const JobDecision decision = decide(verdict_of(
      Cause::pipeline_transfer, {{.kind = FactKind::message_changed, .ranks = {3}, .peers = {2}}}));
  EXPECT_EQ(decision.kind, DecisionKind::exclude);
  EXPECT_THAT(decision.ranks, ElementsAre(2, 3));
}

TEST(Decision, BadWeightsNeedACheckpointFromBefore) {
  Verdict verdict = verdict_of(Cause::bad_weight);
  verdict.job.are_weights_finite = false;
  verdict.job.restart = Restart::before_step;
  verdict.job.restart_before = 8;
  EXPECT_EQ(decide(verdict).kind, DecisionKind::older_checkpoint);
  EXPECT_EQ(decide(verdict).newest_step, 7);
  EXPECT_FALSE(decide(verdict).is_to_check);
  verdict.job.restart = Restart::check_first;
  verdict.job.restart_before.reset();
  EXPECT_EQ(decide(verdict).newest_step, std::nullopt);
  EXPECT_TRUE(decide(verdict).is_to_check);
}

TEST(Decision, AnUnknownOperatorIsTraced) {
  const JobDecision decision = decide(verdict_of(Cause::unknown));
  EXPECT_EQ(decision.kind, DecisionKind::restart_as_is);
  EXPECT_TRUE(decision.is_traced);
}

TEST(Decision, TheGravestOfSeveralOriginsDecides) {
  Verdict verdict = verdict_of(Cause::not_reproduced);
  verdict.origins.push_back(verdict_of(Cause::user_hook).origins[0]);
  const JobDecision decision = decide(verdict);
  EXPECT_EQ(decision.kind, DecisionKind::do_not_restart);
  EXPECT_EQ(decision.origin, 1);
}

TEST(Decision, AJobThatGoesOnNeedsNone) {
  Verdict verdict = verdict_of(Cause::user_hook);
  verdict.job.on_bad = "skip";
  const JobDecision decision = decide(verdict);
  EXPECT_EQ(decision.kind, DecisionKind::none_needed);
  EXPECT_EQ(decision.page, Owner::nobody);
  EXPECT_EQ(decision.ticket, Owner::model_author);
}

TEST(Decision, AJobOnBadWeightsIsRestarted) {
  Verdict verdict = verdict_of(Cause::not_reproduced);
  verdict.job.on_bad = "report";
  verdict.spread.parameters = {"body.weight"};
  EXPECT_EQ(course_of(verdict), Course::goes_on_damaged);
  EXPECT_EQ(decide(verdict).kind, DecisionKind::older_checkpoint);
  EXPECT_EQ(decide(verdict).newest_step, 9);
}

}  // namespace
}  // namespace nanlocator
