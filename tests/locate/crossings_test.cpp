// Faults in transfers between ranks, from the planted fault to the verdict.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <limits>
#include <optional>
#include <random>

#include "locate/crossing_simulator/pass.hpp"
#include "locate/text_of_verdict.hpp"
#include "nanlocator/locate/locate.hpp"
#include "nanlocator/report/verdict_json.hpp"
#include "support/fact_matchers.hpp"

namespace nanlocator {
namespace {

using pipeline::Fault;
using pipeline::ledgers_with_repeat;
using pipeline::Pass;
using pipeline::Plant;
using pipeline::TracedBirth;
using simulator::Layout;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const auto kOfFirstPass = Field(&Fact::source, FactSource::first_pass);

Layout four_by_two() {
  return {.tp = 2, .pp = 2, .dp = 2, .microbatches = 3};
}

Verdict locate_all(const Layout& layout, const std::vector<Fault>& faults) {
  return locate(Pass(layout, faults, 1).ledgers(), layout.world());
}

// ---- the simulator's positions (nanlocator/watch/position.hpp) ----

TEST(CrossingSimulator, TheCrossingsOfARankAreNumberedInTheirOrder) {
  const Layout layout = four_by_two();
  const Fault fault{.plant = Plant::operator_forward, .tp = 1, .microbatch = 0};
  for (const Ledger& ledger : Pass(layout, {fault}, 3).ledgers()) {
    std::int64_t last_sent = -1, number = 0;
    for (const CrossingCoverage& lane : ledger.crossings) number += lane.count;
    std::optional<std::int64_t> before = 0;
    for (const Sighting& each : ledger.sightings) {
      if (!each.crossing) {
        EXPECT_EQ(each.position, std::nullopt);
        continue;
      }
      EXPECT_GE(each.position, before);
      EXPECT_LE(each.position, number);
      before = each.position;
      if (each.role != "sent") continue;
      EXPECT_GT(*each.position, last_sent);  // no two crossings have the same number
      last_sent = *each.position;
    }
    if (ledger.coordinates.dp.rank == 0) EXPECT_GE(last_sent, 0) << ledger.coordinates.rank;
  }
}

TEST(CrossingSimulator, ABirthIsSeenByNothingBeforeTheNextCrossing) {
  const Layout layout = four_by_two();
  for (const auto plant : {Plant::operator_forward, Plant::operator_backward}) {
    const Fault fault{.plant = plant, .tp = 1, .dp = 1, .microbatch = 2, .is_repeated = true};
    const auto ledgers = ledgers_with_repeat(layout, {fault}, 7);
    const Ledger& guilty = ledgers.at(static_cast<std::size_t>(rank_of(layout, fault)));
    ASSERT_EQ(guilty.births.size(), 1U);
    ASSERT_FALSE(guilty.sightings.empty());
    EXPECT_EQ(guilty.sightings[0].role, "sent");
    EXPECT_GT(guilty.sightings[0].position, 0);
    EXPECT_EQ(guilty.births[0].sighting.position, guilty.sightings[0].position);
  }
  const Fault weight{
      .plant = Plant::weight, .microbatch = pipeline::kEveryMicrobatch, .is_repeated = true};
  const auto births = ledgers_with_repeat(layout, {weight}, 7).at(0).births;
  ASSERT_FALSE(births.empty());
  for (const Birth& birth : births) EXPECT_EQ(birth.sighting.position, std::nullopt);
}

// ---- verdicts ----

TEST(Crossings, AHealthyStepIsClean) {
  const Verdict verdict = locate_all(four_by_two(), {});
  EXPECT_EQ(verdict.status, VerdictStatus::clean);
  EXPECT_THAT(verdict.origins, IsEmpty());
}

TEST(Crossings, AnOperatorInForwardIsPinnedToItsRankMicrobatchAndModule) {
  const Verdict verdict = locate_all(
      four_by_two(),
      {{.plant = Plant::operator_forward, .tp = 1, .dp = 1, .layer = 1, .microbatch = 2}});
  ASSERT_EQ(verdict.origins.size(), 1u) << text_of(verdict);
  const Origin& origin = verdict.origins[0];
  EXPECT_THAT(origin.candidates, ElementsAre(3));
  EXPECT_EQ(origin.coordinates->rank, 3);
  EXPECT_EQ(origin.phase, Phase::forward);
  EXPECT_EQ(origin.direction, Direction::forward);
  EXPECT_EQ(origin.microbatch, 2);
  EXPECT_EQ(origin.module, "decoder.layers.1.self_attention.linear_proj");
  EXPECT_EQ(origin.op, "");  // it was born before the send: the operator is unknown
  EXPECT_EQ(origin.parameter, "");
  EXPECT_EQ(origin.place_confidence, Confidence::high);
  EXPECT_THAT(origin.facts,
              HasFact(FactKind::gave_bad, OnRanks({3}), Field(&Fact::microbatch, 2),
                      Field(&Fact::bad, BadCount{.nan = 1, .numel = 8192}),
                      Field(&Fact::op, "c10d::allreduce_"),
                      Field(&Fact::module, "decoder.layers.1.self_attention.linear_proj")));
  EXPECT_THAT(origin.facts, HasFact(FactKind::mates_gave_finite, OnRanks({2})));
  EXPECT_THAT(origin.facts, HasFact(FactKind::weights_finite));
  EXPECT_EQ(verdict.spread.first_seen, Phase::forward);
  EXPECT_EQ(verdict.status, VerdictStatus::located);
}

TEST(Crossings, AnOperatorInBackwardKeepsTheGradientsThatBracketIt) {
  const Verdict verdict = locate_all(
      four_by_two(), {{.plant = Plant::operator_backward, .tp = 0, .stage = 1, .layer = 1}});
  ASSERT_EQ(verdict.origins.size(), 1u) << text_of(verdict);
  const Origin& origin = verdict.origins[0];
  EXPECT_THAT(origin.candidates, ElementsAre(4));
  EXPECT_EQ(origin.phase, Phase::backward);
  EXPECT_EQ(origin.direction, Direction::backward);
  EXPECT_EQ(origin.parameter, "");
  EXPECT_EQ(origin.clean_before, "decoder.layers.3.self_attention.linear_proj.weight");
  EXPECT_THAT(origin.facts, HasFact(FactKind::first_bad_gradient,
                                    Field(&Fact::parameter,
                                          "decoder.layers.3.self_attention.linear_qkv.weight")));
}

TEST(Crossings, WhatWasSentFiniteAndReceivedBadIsAPipelineTransfer) {
  const Verdict verdict = locate_all(
      four_by_two(),
      {{.plant = Plant::transfer_forward, .tp = 1, .dp = 1, .stage = 1, .microbatch = 1}});
  ASSERT_EQ(verdict.origins.size(), 1u) << text_of(verdict);
  const Origin& origin = verdict.origins[0];
  EXPECT_EQ(origin.cause, Cause::pipeline_transfer);
  EXPECT_THAT(origin.candidates, ElementsAre(7));
  EXPECT_EQ(origin.microbatch, 1);
  EXPECT_THAT(origin.facts,
              HasFact(FactKind::message_changed, OnRanks({7}), Field(&Fact::peers, ElementsAre(3)),
                      Field(&Fact::phase, Phase::forward), Field(&Fact::microbatch, 1),
                      Field(&Fact::bad, BadCount{.nan = 1, .numel = 8192})));
}

TEST(Crossings, ACorruptedReductionIsOneRanksOrEveryMembers) {
  Verdict verdict = locate_all(four_by_two(), {{.plant = Plant::sum_forward, .tp = 1, .layer = 1}});
  ASSERT_EQ(verdict.origins.size(), 1u) << text_of(verdict);
  EXPECT_EQ(verdict.origins[0].cause, Cause::collective_result);
  EXPECT_THAT(verdict.origins[0].candidates, ElementsAre(1));
  verdict = locate_all(four_by_two(), {{.plant = Plant::sum_everywhere, .layer = 1}});
  ASSERT_EQ(verdict.origins.size(), 1u) << text_of(verdict);
  EXPECT_EQ(verdict.origins[0].cause, Cause::collective_result);
  EXPECT_THAT(verdict.origins[0].candidates, ElementsAre(0, 1));
  EXPECT_FALSE(verdict.origins[0].coordinates);
}

TEST(Crossings, FiniteAddendsWhoseSumOverflowsAreACollectiveSum) {
  const Layout layout = four_by_two();
  std::vector<Ledger> ledgers =
      Pass(layout, {{.plant = Plant::sum_everywhere, .layer = 1}}, 1).ledgers();
  for (Ledger& ledger : ledgers) {
    for (Sighting& sighting : ledger.sightings) {
      if (!sighting.crossing) continue;
      sighting.stats.pos_inf = std::exchange(sighting.stats.nan, 0);
      sighting.stats.absmax = 3e38;
    }
  }
  const Verdict verdict = locate(ledgers, layout.world());
  ASSERT_EQ(verdict.origins.size(), 1u);
  EXPECT_EQ(verdict.origins[0].cause, Cause::collective_sum);
}

TEST(Crossings, ALossOverNoLabelsIsNamedWithItsMicrobatch) {
  const Verdict verdict = locate_all(
      four_by_two(), {{.plant = Plant::empty_loss, .dp = 1, .stage = 1, .microbatch = 2}});
  ASSERT_EQ(verdict.origins.size(), 1u) << text_of(verdict);
  const Origin& origin = verdict.origins[0];
  EXPECT_EQ(origin.phase, Phase::loss);
  EXPECT_EQ(origin.cause, Cause::empty_loss_mask);
  EXPECT_EQ(origin.microbatch, 2);
  EXPECT_THAT(origin.candidates, ElementsAre(6, 7));
}

TEST(Crossings, TheSameOperatorInEveryMicrobatchIsOneOriginToldWithTheFirst) {
  const Verdict verdict =
      locate_all(four_by_two(),
                 {{.plant = Plant::operator_forward, .microbatch = pipeline::kEveryMicrobatch}});
  ASSERT_EQ(verdict.origins.size(), 1u) << text_of(verdict);
  EXPECT_EQ(verdict.origins[0].microbatch, 0);
  EXPECT_THAT(verdict.origins[0].facts, HasFact(FactKind::same_in_microbatches, Counts(3)));
}

TEST(Crossings, ABadWeightExplainsWhatItsRankHandsOn) {
  const Verdict verdict = locate_all(four_by_two(), {{.plant = Plant::weight, .microbatch = -1}});
  ASSERT_EQ(verdict.origins.size(), 1u) << text_of(verdict);
  EXPECT_EQ(verdict.origins[0].cause, Cause::bad_weight);
  EXPECT_THAT(verdict.origins[0].candidates, ElementsAre(0));
}

TEST(Crossings, ABadWeightHidesNoFaultOfAnotherReplica) {
  const Verdict verdict =
      locate_all(four_by_two(), {{.plant = Plant::weight, .microbatch = -1},
                                 {.plant = Plant::gradient, .tp = 1, .dp = 1, .stage = 1}});
  ASSERT_EQ(verdict.origins.size(), 2u) << text_of(verdict);
  EXPECT_EQ(verdict.origins[0].cause, Cause::bad_weight);
  EXPECT_EQ(verdict.origins[1].phase, Phase::grad_local);
  EXPECT_THAT(verdict.origins[1].candidates, ElementsAre(7));
}

TEST(Crossings, WhereNothingBadCrossedAStretchOfGradientsIsItsOwnRanks) {
  // The last parameter of backward: the stage above sent nothing bad, so it is excluded.
  const Layout layout{.pp = 2, .dp = 2, .layers_per_stage = 1};
  const Verdict verdict = locate_all(layout, {{.plant = Plant::operator_backward, .is_mlp = true}});
  ASSERT_EQ(verdict.origins.size(), 1u) << text_of(verdict);
  EXPECT_EQ(verdict.origins[0].phase, Phase::grad_local);
  EXPECT_THAT(verdict.origins[0].candidates, ElementsAre(0));
  EXPECT_EQ(verdict.origins[0].place_confidence, Confidence::high);
  EXPECT_THAT(verdict.origins[0].facts, HasFact(FactKind::nothing_received));
}

TEST(Crossings, TwoTensorParallelRanksThatAreBadAtOnceAreOneOrigin) {
  const Verdict verdict = locate_all(four_by_two(), {{.plant = Plant::operator_forward, .tp = 0},
                                                     {.plant = Plant::operator_forward, .tp = 1}});
  ASSERT_EQ(verdict.origins.size(), 1u) << text_of(verdict);
  EXPECT_THAT(verdict.origins[0].candidates, ElementsAre(0, 1));
  EXPECT_EQ(verdict.origins[0].place_confidence, Confidence::medium);
}

TEST(Crossings, AnIsolatedGradientStandsBesideAFaultInAnotherReplica) {
  const Verdict verdict =
      locate_all(four_by_two(), {{.plant = Plant::operator_forward, .tp = 1, .dp = 0},
                                 {.plant = Plant::gradient, .tp = 0, .dp = 1, .stage = 1}});
  ASSERT_EQ(verdict.origins.size(), 2u) << text_of(verdict);
  EXPECT_THAT(verdict.origins[0].candidates, ElementsAre(1));
  EXPECT_THAT(verdict.origins[1].candidates, ElementsAre(6));
  EXPECT_EQ(verdict.origins[1].phase, Phase::grad_local);
}

TEST(Crossings, TwoFaultsOfTwoMicrobatchesInOneReplicaAreTwoOrigins) {
  const Verdict verdict = locate_all(
      four_by_two(),
      {{.plant = Plant::operator_forward, .tp = 1, .dp = 0, .microbatch = 0},
       {.plant = Plant::transfer_backward, .tp = 0, .dp = 0, .stage = 0, .microbatch = 2}});
  ASSERT_EQ(verdict.origins.size(), 2u) << text_of(verdict);
  EXPECT_THAT(verdict.origins[0].candidates, ElementsAre(1));
  EXPECT_EQ(verdict.origins[0].microbatch, 0);
  EXPECT_THAT(verdict.origins[1].candidates, ElementsAre(0));
  EXPECT_EQ(verdict.origins[1].cause, Cause::pipeline_transfer);
  EXPECT_EQ(verdict.origins[1].microbatch, 2);
}

// ---- the re-run ----

TEST(Crossings, AOneOffGradientAndARepeatedOperatorAreTwoOriginsEachWithItsCause) {
  const Layout layout = four_by_two();
  const std::vector<Fault> faults = {
      {.plant = Plant::operator_forward, .tp = 1, .dp = 1, .stage = 1, .is_repeated = true},
      {.plant = Plant::gradient, .tp = 1, .dp = 0, .stage = 0}};
  const Verdict verdict = locate(ledgers_with_repeat(layout, faults, 1), layout.world());
  ASSERT_EQ(verdict.origins.size(), 2u) << text_of(verdict);
  EXPECT_THAT(verdict.origins[0].candidates, ElementsAre(7));
  EXPECT_EQ(verdict.origins[0].cause, Cause::operator_undefined);
  EXPECT_EQ(verdict.origins[0].op, "aten::log");
  EXPECT_EQ(verdict.origins[0].place_confidence, Confidence::high);
  EXPECT_THAT(verdict.origins[0].facts, HasFact(FactKind::gave_bad, OnRanks({7}), kOfFirstPass));
  EXPECT_THAT(verdict.origins[1].candidates, ElementsAre(1));
  EXPECT_EQ(verdict.origins[1].cause, Cause::not_reproduced);
  EXPECT_EQ(verdict.origins[1].place_confidence, Confidence::medium);
  EXPECT_EQ(verdict.rerun.reproduced, true);
}

TEST(Crossings, AnOperatorFaultThatIsGoneInTheRepeatStaysPinnedToItsRank) {
  const Layout layout = four_by_two();
  const Verdict verdict =
      locate(ledgers_with_repeat(layout, {{.plant = Plant::operator_forward, .tp = 1, .dp = 1}}, 1),
             layout.world());
  ASSERT_EQ(verdict.origins.size(), 1u) << text_of(verdict);
  EXPECT_THAT(verdict.origins[0].candidates, ElementsAre(3));
  EXPECT_EQ(verdict.origins[0].cause, Cause::not_reproduced);
  EXPECT_EQ(verdict.origins[0].place_confidence, Confidence::medium);
  EXPECT_EQ(verdict.origins[0].module, "decoder.layers.0.self_attention.linear_proj");
}

TEST(Crossings, ATransferThatIsGoneInTheRepeatKeepsItsCause) {
  const Layout layout = four_by_two();
  const Verdict verdict = locate(
      ledgers_with_repeat(layout, {{.plant = Plant::transfer_backward, .tp = 1, .stage = 0}}, 1),
      layout.world());
  ASSERT_EQ(verdict.origins.size(), 1u) << text_of(verdict);
  EXPECT_EQ(verdict.origins[0].cause, Cause::pipeline_transfer);
  EXPECT_THAT(verdict.origins[0].facts, HasFact(FactKind::happened_once));
}

TEST(Crossings, ATransferThatIsBadAgainIsToldByItsCrossingNotByReceipts) {
  const Layout layout = four_by_two();
  const Verdict verdict =
      locate(ledgers_with_repeat(
                 layout,
                 {{.plant = Plant::transfer_forward, .tp = 1, .stage = 1, .is_repeated = true}}, 1),
             layout.world());
  ASSERT_EQ(verdict.origins.size(), 1u) << text_of(verdict);
  EXPECT_EQ(verdict.origins[0].cause, Cause::pipeline_transfer);
  EXPECT_THAT(verdict.origins[0].candidates, ElementsAre(5));
  EXPECT_THAT(verdict.origins[0].facts, Not(HasFact(FactKind::happened_once)));
  EXPECT_THAT(verdict.origins[0].facts, HasFact(FactKind::transfer_bad_again));
  EXPECT_EQ(verdict.origins[0].action, Action::find_overwrite);
}

TEST(Crossings, AOneOffGradientStandsBesideABirthOfItsOwnReplica) {
  // Backward of stage 0 reaches no rank of stage 1.
  const Layout layout = four_by_two();
  const std::vector<Fault> faults = {
      {.plant = Plant::operator_backward, .tp = 1, .is_repeated = true},
      {.plant = Plant::gradient, .tp = 0, .stage = 1}};
  Verdict verdict = locate_all(layout, faults);
  ASSERT_EQ(verdict.origins.size(), 2u) << text_of(verdict);
  EXPECT_THAT(verdict.origins[0].candidates, ElementsAre(1));
  EXPECT_THAT(verdict.origins[1].candidates, ElementsAre(4));
  verdict = locate(ledgers_with_repeat(layout, faults, 1), layout.world());
  ASSERT_EQ(verdict.origins.size(), 2u) << text_of(verdict);
  EXPECT_EQ(verdict.origins[0].op, "aten::div.Tensor");
  EXPECT_THAT(verdict.origins[1].candidates, ElementsAre(4));
  EXPECT_EQ(verdict.origins[1].cause, Cause::not_reproduced);
}

/// Rank 5 sends something bad in backward; the re-run traces it to `birth`.
Verdict locate_backward_fault(const TracedBirth& birth) {
  const Layout layout = four_by_two();
  const Fault fault{
      .plant = Plant::operator_backward, .tp = 1, .stage = 1, .is_repeated = true, .birth = birth};
  return locate(ledgers_with_repeat(layout, {fault}, 1), layout.world());
}

TEST(Crossings, AForwardThatRunsAgainInBackwardExplainsWhatBackwardHandsOn) {
  const Verdict verdict = locate_backward_fault({.is_of_recomputation = true});
  ASSERT_EQ(verdict.origins.size(), 1u) << text_of(verdict);
  EXPECT_EQ(verdict.origins[0].cause, Cause::recompute_mismatch);
  EXPECT_THAT(verdict.origins[0].candidates, ElementsAre(5));
  EXPECT_THAT(verdict.origins[0].facts, HasFact(FactKind::gave_bad, OnRanks({5}), kOfFirstPass));
}

TEST(Crossings, ABirthInAnAuxiliaryLossExplainsTheGradientsThatWereSent) {
  const Verdict verdict = locate_backward_fault({.is_of_auxiliary_loss = true});
  ASSERT_EQ(verdict.origins.size(), 1u) << text_of(verdict);
  EXPECT_EQ(verdict.origins[0].cause, Cause::operator_undefined);
  EXPECT_EQ(verdict.origins[0].direction, Direction::forward);
  EXPECT_THAT(verdict.origins[0].candidates, ElementsAre(5));
  EXPECT_THAT(verdict.origins[0].facts, HasFact(FactKind::gave_bad, OnRanks({5}), kOfFirstPass));
}

TEST(Crossings, ABirthExplainsNoGradientThatWasCleanWhenBackwardHadEnded) {
  const Layout layout{.tp = 2, .pp = 2};  // no rank to reduce with: it went bad on its own rank
  const std::vector<Fault> faults = {
      {.plant = Plant::operator_backward, .tp = 1, .is_repeated = true},
      {.plant = Plant::reduced, .tp = 1, .stage = 0}};
  const Verdict verdict = locate(ledgers_with_repeat(layout, faults, 1), layout.world());
  ASSERT_EQ(verdict.origins.size(), 2u) << text_of(verdict);
  EXPECT_EQ(verdict.origins[0].cause, Cause::operator_undefined);
  EXPECT_EQ(verdict.origins[1].phase, Phase::grad_reduced);
  EXPECT_THAT(verdict.origins[1].candidates, ElementsAre(1));
}

/// Rank 1 sends something bad in forward, in layer 0. The trace names an undispatched call in
/// `module` as the birth, on `ranks`, `later` crossings after the real one; empty: at an unknown
/// position.
Verdict locate_with_opaque_birth(const std::string& module, const std::vector<int>& ranks,
                                 std::optional<int> later = 0) {
  const Layout layout = four_by_two();
  std::vector<Ledger> ledgers = ledgers_with_repeat(
      layout, {{.plant = Plant::operator_forward, .tp = 1, .is_repeated = true}}, 1);
  Birth birth = ledgers[1].births.at(0);
  birth.kind = BirthKind::opaque;
  birth.replay = ReplayConclusion::not_replayed;
  birth.sighting.module = module.empty() ? birth.sighting.module : module;
  birth.sighting.op = birth.inside = "_LayerNorm";
  if (later) {
    *birth.sighting.position += *later;
  } else {
    birth.sighting.position.reset();
  }
  for (Ledger& ledger : ledgers) {
    ledger.births.clear();
    if (std::ranges::count(ranks, ledger.coordinates.rank) != 0) ledger.births = {birth};
  }
  return locate(ledgers, layout.world());
}

TEST(Crossings, AnOpaqueBirthOnTheSendersRankNamesItsModule) {
  const Verdict verdict = locate_with_opaque_birth("", {1});
  ASSERT_EQ(verdict.origins.size(), 1u) << text_of(verdict);
  EXPECT_THAT(verdict.origins[0].candidates, ElementsAre(1));
  EXPECT_EQ(verdict.origins[0].op, "_LayerNorm");
  EXPECT_THAT(verdict.origins[0].facts, HasFact(FactKind::gave_bad, OnRanks({1}), kOfFirstPass));
}

TEST(Crossings, AnOpaqueBirthOnFurtherRanksOrBehindDisplacesNoCrossing) {
  const Verdict clean = locate_with_opaque_birth("", {});
  for (const Verdict& verdict : {locate_with_opaque_birth("decoder.final_layernorm", {0, 1}),
                                 locate_with_opaque_birth("decoder.layers.0.mlp", {1}, 1),
                                 locate_with_opaque_birth("loss", {1}, 20),
                                 locate_with_opaque_birth("decoder.layers.7.mlp", {1}, {})}) {
    ASSERT_EQ(verdict.origins.size(), 1u) << text_of(verdict);
    EXPECT_THAT(verdict.origins[0].candidates, ElementsAre(1));
    EXPECT_EQ(verdict.origins[0].op, clean.origins.at(0).op);
    EXPECT_EQ(verdict.origins[0].module, clean.origins.at(0).module);
  }
}

TEST(Crossings, WhatIsBadAgainWithoutABirthIsNotCalledGone) {
  const Layout layout = four_by_two();
  std::vector<Ledger> ledgers = ledgers_with_repeat(
      layout,
      {{.plant = Plant::operator_forward, .tp = 1, .is_repeated = true},
       {.plant = Plant::operator_forward, .tp = 1, .dp = 1, .layer = 1, .is_repeated = true}},
      1);
  for (Ledger& ledger : ledgers) {
    if (ledger.coordinates.dp.rank == 1)
      ledger.births.clear();  // the trace reached a pybind kernel
  }
  const Verdict verdict = locate(ledgers, layout.world());
  ASSERT_EQ(verdict.origins.size(), 2u) << text_of(verdict);
  EXPECT_THAT(verdict.origins[0].candidates, ElementsAre(1));
  EXPECT_EQ(verdict.origins[0].cause, Cause::operator_undefined);
  EXPECT_THAT(verdict.origins[1].candidates, ElementsAre(3));
  EXPECT_EQ(verdict.origins[1].cause, Cause::unknown);
}

TEST(Crossings, ALossThatIsBadWithFiniteGradientsIsNotCalledGoneBecauseOfThem) {
  const Layout layout{.tp = 1, .pp = 1, .dp = 1};
  Ledger ledger = Pass(layout, {{.plant = Plant::empty_loss}}, 1).ledgers().front();
  std::erase_if(ledger.sightings, [](const Sighting& each) { return each.role != "loss"; });
  ledger.rerun = Rerun{.reproduced = true, .gradients = 4};
  const Verdict verdict = locate({&ledger, 1}, 1);
  ASSERT_EQ(verdict.origins.size(), 1u) << text_of(verdict);
  EXPECT_EQ(verdict.origins[0].cause, Cause::empty_loss_mask);
  EXPECT_EQ(verdict.origins[0].phase, Phase::loss);
}

// ---- harmless values, unknown values, misleading ledgers ----

TEST(Crossings, WhatReachedNeitherALossNorAGradientIsNoOrigin) {
  const Layout layout = four_by_two();
  std::vector<Ledger> ledgers =
      Pass(layout, {{.plant = Plant::operator_forward, .tp = 1, .dp = 0}}, 1).ledgers();
  for (Ledger& ledger : ledgers) {
    if (ledger.coordinates.dp.rank == 0) {
      std::erase_if(ledger.sightings, [](const Sighting& each) {
        return each.role == "loss" || each.phase != Phase::forward;
      });
    } else {
      ledger.sightings.clear();
    }
  }
  Verdict verdict = locate(ledgers, layout.world());
  EXPECT_THAT(verdict.origins, IsEmpty()) << text_of(verdict);
  EXPECT_THAT(verdict.facts, HasFact(FactKind::masked_values));
  // If a rank of the replica did not answer, it is unknown what the value reached.
  std::erase_if(ledgers, [](const Ledger& each) { return each.coordinates.rank == 5; });
  verdict = locate(ledgers, layout.world());
  ASSERT_EQ(verdict.origins.size(), 1u);
  EXPECT_THAT(verdict.origins[0].candidates, ElementsAre(1));
}

TEST(Crossings, WhatCameFromASilentRankNamesItAmongTheCandidates) {
  const Layout layout = four_by_two();
  std::vector<Ledger> ledgers =
      Pass(layout, {{.plant = Plant::operator_forward, .tp = 1, .dp = 0, .layer = 1}}, 1).ledgers();
  std::erase_if(ledgers, [](const Ledger& each) { return each.coordinates.rank == 1; });
  const Verdict verdict = locate(ledgers, layout.world());
  ASSERT_EQ(verdict.origins.size(), 1u) << text_of(verdict);
  EXPECT_EQ(verdict.status, VerdictStatus::partial);
  EXPECT_THAT(verdict.origins[0].candidates, ElementsAre(0, 1, 5));
  EXPECT_EQ(verdict.origins[0].place_confidence, Confidence::low);
  EXPECT_THAT(verdict.origins[0].facts,
              HasFact(FactKind::received_from_unknown, Field(&Fact::peers, ElementsAre(1))));
}

// ---- unscanned transfers ----

constexpr Fault kOnRank3 = {
    .plant = Plant::operator_forward, .tp = 1, .dp = 1, .layer = 1, .microbatch = 2};

/// The sequence number, in the tensor-parallel group, of the rank's first bad send.
std::int64_t first_sent_by(const std::vector<Ledger>& ledgers, int rank) {
  for (const Sighting& sighting : ledgers[rank].sightings) {
    if (sighting.crossing && sighting.crossing->group == "tp" && sighting.role == "sent") {
      return sighting.crossing->sequence;
    }
  }
  return -1;
}

CrossingCoverage& tensor_parallel(Ledger& ledger) {
  return *std::ranges::find_if(ledger.crossings, [](const CrossingCoverage& each) {
    return each.group == "tp" && !each.peer;
  });
}

/// A transfer on both ranks of the group, ranks 2 and 3, is not scanned.
Verdict locate_unseen(std::int64_t before_the_bad_one, bool is_by_member,
                      bool has_unwatched = false) {
  const Layout layout = four_by_two();
  std::vector<Ledger> ledgers = Pass(layout, {kOnRank3}, 1).ledgers();
  const auto sequence = first_sent_by(ledgers, 3) - before_the_bad_one;
  for (const int rank : {2, 3}) {
    auto& coverage = tensor_parallel(ledgers[rank]);
    if (!has_unwatched) coverage.not_scanned = {static_cast<int>(sequence)};
    coverage.is_unseen_by_member = is_by_member;
    coverage.has_unwatched = has_unwatched;
  }
  return locate(ledgers, layout.world());
}

TEST(Crossings, WhatCameInUnseenMayHaveBroughtItFromAnotherRank) {
  for (const bool is_unwatched : {false, true}) {
    const Verdict verdict = locate_unseen(1, /*is_by_member=*/true, is_unwatched);
    ASSERT_EQ(verdict.origins.size(), 1u) << text_of(verdict);
    const Origin& origin = verdict.origins[0];
    EXPECT_THAT(origin.candidates, ElementsAre(2, 3));
    EXPECT_EQ(origin.place_confidence, Confidence::low);
    EXPECT_FALSE(has_fact(origin.facts, FactKind::received_finite_before));
    EXPECT_THAT(origin.facts,
                HasFact(FactKind::received_unseen_before, OnRanks({3}),
                        Field(&Fact::peers, ElementsAre(2)), Field(&Fact::other_ranks, true)));
  }
}

TEST(Crossings, WhatAllGotUnseenIsNotTheSourceWhereOneOfThemIsCleanButNothingIsSaidToBeFinite) {
  const Verdict verdict = locate_unseen(1, /*is_by_member=*/false);
  ASSERT_EQ(verdict.origins.size(), 1u) << text_of(verdict);
  const Origin& origin = verdict.origins[0];
  EXPECT_THAT(origin.candidates, ElementsAre(3));
  EXPECT_EQ(origin.place_confidence, Confidence::medium);
  EXPECT_FALSE(has_fact(origin.facts, FactKind::received_finite_before));
  EXPECT_THAT(origin.facts,
              HasFact(FactKind::received_unseen_before, Field(&Fact::other_ranks, false)));
}

TEST(Crossings, WhatCameInUnseenAfterwardsChangesNothing) {
  const Verdict verdict = locate_unseen(-1, /*is_by_member=*/true);
  ASSERT_EQ(verdict.origins.size(), 1u) << text_of(verdict);
  EXPECT_THAT(verdict.origins[0].candidates, ElementsAre(3));
  EXPECT_EQ(verdict.origins[0].place_confidence, Confidence::high);
  EXPECT_TRUE(has_fact(verdict.origins[0].facts, FactKind::received_finite_before));
}

TEST(Crossings, AMessageThatItsSenderCouldNotScanProvesNoFaultOfTheTransfer) {
  const Layout layout = four_by_two();
  std::vector<Ledger> ledgers =
      Pass(layout, {{.plant = Plant::transfer_forward, .tp = 1, .dp = 1, .stage = 1}}, 1).ledgers();
  for (CrossingCoverage& coverage : ledgers[3].crossings) {
    if (coverage.peer == 7 && coverage.role == "sent") coverage.not_scanned = {0, 1, 2};
  }
  const Verdict verdict = locate(ledgers, layout.world());
  ASSERT_EQ(verdict.origins.size(), 1u) << text_of(verdict);
  EXPECT_EQ(verdict.origins[0].cause, Cause::unknown);
  EXPECT_THAT(verdict.origins[0].candidates, ElementsAre(3, 7));
}

TEST(Crossings, AGradsLedgerWithALossIsJudgedByItsGradients) {
  const Layout layout = four_by_two();
  std::vector<Ledger> ledgers =
      Pass(layout, {{.plant = Plant::operator_forward, .tp = 1, .dp = 1}}, 1).ledgers();
  for (Ledger& ledger : ledgers) {
    ledger.level = "grads";
    ledger.crossings.clear();
    std::erase_if(ledger.sightings, [](const Sighting& each) { return each.crossing.has_value(); });
  }
  const Verdict verdict = locate(ledgers, layout.world());
  ASSERT_EQ(verdict.origins.size(), 1u) << text_of(verdict);
  EXPECT_EQ(verdict.origins[0].phase, Phase::grad_local);
  EXPECT_THAT(verdict.origins[0].candidates, ElementsAre(2, 3, 6, 7));
}

TEST(Crossings, HostileLedgersNeitherCrashNorTakeLong) {
  const Layout layout{.tp = 4, .pp = 2, .dp = 2, .microbatches = 2};
  std::mt19937 random(5);
  std::vector<Ledger> ledgers =
      Pass(layout, {{.plant = Plant::operator_forward, .tp = 1}}, 1).ledgers();
  const auto any = [&] {
    constexpr int kValues[] = {
        -1, 0, 3, 15, 99, std::numeric_limits<int>::min(), std::numeric_limits<int>::max()};
    return kValues[random() % std::size(kValues)];
  };
  const auto members = [&] {
    constexpr int kLargest = std::numeric_limits<int>::max();
    return random() % 2 == 0 ? RankList::of_runs({{0, kLargest, 1}})
                             : RankList({any() & kLargest, any() & kLargest});
  };
  for (Ledger& ledger : ledgers) {
    for (int i = 0; i < 4000; ++i) {
      Sighting sighting;
      sighting.phase = static_cast<Phase>(random() % 8);
      sighting.role = random() % 2 == 0 ? "sent" : "received";
      sighting.op = "send";
      sighting.stats.nan = 1;
      sighting.stats.numel = std::numeric_limits<std::int64_t>::max();
      if (random() % 2 == 0) sighting.microbatch = any();
      sighting.crossing =
          Crossing{"pp", members(), random() % 2 == 0 ? std::nullopt : std::optional(any()),
                   static_cast<std::int64_t>(random()) * (random() % 2 == 0 ? -1 : 1) *
                       (std::int64_t{1} << 31)};
      ledger.sightings.push_back(std::move(sighting));
      ledger.crossings.push_back(
          {"pp", members(), any(), "sent", 0, std::numeric_limits<std::int64_t>::max()});
      ledger.crossings.push_back({"tp", members(), std::nullopt, "sent", 0,
                                  std::numeric_limits<std::int64_t>::max(), members(), true,
                                  random() % 2 == 0});
    }
  }
  const auto start = std::chrono::steady_clock::now();
  const Verdict verdict = locate(ledgers, layout.world());
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  EXPECT_FALSE(verdict.origins.empty());
  EXPECT_LE(verdict.origins.size(), 256u);
  EXPECT_LT(took.count(),
            100);  // 1 s, 13 under sanitizers; quadratic in the ledgers, it would take hours
}

// ---- many incidents ----

Layout random_layout(std::mt19937& random) {
  Layout layout = simulator::random_layout(random);
  layout.cp = 1;
  layout.is_order_observed = true;
  if (layout.dp % 2 != 0) layout.ep = 1;
  return layout;
}

Fault random_fault(const Layout& layout, std::mt19937& random) {
  const auto choose = [&](int count) { return static_cast<int>(random() % count); };
  Fault fault{.plant = static_cast<Plant>(choose(10)),
              .tp = choose(layout.tp),
              .dp = choose(layout.dp),
              .stage = choose(layout.stages()),
              .layer = choose(layout.layers_per_stage),
              .is_mlp = choose(2) == 0,
              .microbatch = choose(layout.microbatches + 1) - 1};
  if (fault.plant == Plant::weight) fault.microbatch = pipeline::kEveryMicrobatch;
  if (fault.plant == Plant::weight && layout.has_experts) fault.is_mlp = false;
  if (fault.plant == Plant::empty_loss) fault.stage = layout.stages() - 1;
  return fault;
}

std::string describe(const Layout& layout, const Fault& fault, unsigned seed) {
  const auto text = [](const char* name, int value) {
    return std::string(name) + std::to_string(value) + " ";
  };
  return text("seed ", static_cast<int>(seed)) + layout.describe() +
         text("; plant ", static_cast<int>(fault.plant)) + text("tp ", fault.tp) +
         text("dp ", fault.dp) + text("stage ", fault.stage) + text("layer ", fault.layer) +
         text("mlp ", fault.is_mlp) + text("microbatch ", fault.microbatch);
}

/// The ranks that a complete answer must name.
std::vector<int> guilty_of(const Layout& layout, const Fault& fault) {
  std::vector<int> ranks;
  const bool is_everyone = fault.plant == Plant::sum_everywhere || fault.plant == Plant::empty_loss;
  for (int tp = 0; tp < layout.tp; ++tp) {
    if (is_everyone || tp == fault.tp) ranks.push_back(layout.rank(tp, fault.stage, fault.dp));
  }
  return ranks;
}

std::optional<Cause> cause_of(Plant plant) {
  switch (plant) {
    case Plant::transfer_forward:
    case Plant::transfer_backward:
      return Cause::pipeline_transfer;
    case Plant::sum_forward:
    case Plant::sum_backward:
    case Plant::sum_everywhere:
      return Cause::collective_result;
    case Plant::empty_loss:
      return Cause::empty_loss_mask;
    case Plant::weight:
      return Cause::bad_weight;
    default:
      return std::nullopt;
  }
}

Direction direction_of(Plant plant) {
  switch (plant) {
    case Plant::operator_backward:
    case Plant::transfer_backward:
    case Plant::sum_backward:
      return Direction::backward;
    default:
      return Direction::forward;
  }
}

const Origin* origin_of(const Verdict& verdict, const std::vector<int>& ranks) {
  const auto found = std::ranges::find(verdict.origins, ranks, &Origin::candidates);
  return found == verdict.origins.end() ? nullptr : &*found;
}

bool has_crossing(const Layout& layout, const Fault& fault, unsigned seed) {
  return Pass(layout, {fault}, seed).has_crossed(guilty_of(layout, fault).front());
}

void expect_told(const Layout& layout, const Fault& fault, const Origin& origin) {
  if (const auto cause = cause_of(fault.plant)) {
    EXPECT_EQ(origin.cause, *cause);
  }
  if (fault.plant == Plant::gradient || fault.plant == Plant::weight) return;
  EXPECT_EQ(origin.direction, direction_of(fault.plant));
  EXPECT_EQ(origin.microbatch, std::max(0, fault.microbatch));
  (void)layout;
}

class RandomCrossings : public ::testing::TestWithParam<unsigned> {};

TEST_P(RandomCrossings, TheFaultIsPinnedToItsRankDirectionAndMicrobatch) {
  int crossed = 0;
  for (unsigned seed = GetParam() * 100; seed < GetParam() * 100 + 100; ++seed) {
    std::mt19937 random(seed);
    const Layout layout = random_layout(random);
    const Fault fault = random_fault(layout, random);
    const Pass pass(layout, {fault}, seed);
    const Verdict verdict = locate(pass.ledgers(), layout.world());
    SCOPED_TRACE(describe(layout, fault, seed) + text_of(verdict));
    if (!pass.has_struck(fault)) {
      EXPECT_EQ(verdict.status, VerdictStatus::clean);
      continue;
    }
    ASSERT_EQ(verdict.origins.size(), 1u);
    EXPECT_EQ(verdict.status, VerdictStatus::located);
    const Origin& origin = verdict.origins[0];
    const std::vector<int> guilty = guilty_of(layout, fault);
    if (!has_crossing(layout, fault, seed) && fault.plant != Plant::weight) {
      EXPECT_THAT(origin.candidates,
                  ::testing::IsSupersetOf(guilty));  // only gradients are seen
      continue;
    }
    ++crossed;
    EXPECT_THAT(origin.candidates, ::testing::ElementsAreArray(guilty));
    expect_told(layout, fault, origin);
  }
  EXPECT_GT(crossed, 40);
}

TEST_P(RandomCrossings, TheRepeatSharpensOrClearsEachFault) {
  for (unsigned seed = GetParam() * 100; seed < GetParam() * 100 + 100; ++seed) {
    std::mt19937 random(seed);
    const Layout layout = random_layout(random);
    Fault fault = random_fault(layout, random);
    fault.is_repeated = random() % 2 == 0;
    const Pass pass(layout, {fault}, seed);
    if (!pass.has_struck(fault)) continue;
    const Verdict verdict = locate(ledgers_with_repeat(layout, {fault}, seed), layout.world());
    SCOPED_TRACE(describe(layout, fault, seed) + "repeated " + std::to_string(fault.is_repeated) +
                 text_of(verdict));
    ASSERT_EQ(verdict.origins.size(), 1u);
    const Origin& origin = verdict.origins[0];
    EXPECT_THAT(origin.candidates, ::testing::IsSupersetOf(guilty_of(layout, fault)));
    const bool is_traced =
        fault.plant == Plant::operator_forward || fault.plant == Plant::operator_backward;
    const bool is_witnessed = cause_of(fault.plant) == Cause::pipeline_transfer ||
                              cause_of(fault.plant) == Cause::collective_result;
    if (fault.is_repeated && is_traced) {
      EXPECT_THAT(origin.candidates, ::testing::ElementsAreArray(guilty_of(layout, fault)));
      EXPECT_EQ(origin.cause, Cause::operator_undefined);
      EXPECT_EQ(origin.module, module_of(layout, fault));
      expect_told(layout, fault, origin);
    } else if (fault.is_repeated || is_witnessed) {
      expect_told(layout, fault, origin);
    } else {
      EXPECT_EQ(origin.cause, Cause::not_reproduced);
      EXPECT_NE(origin.place_confidence, Confidence::high);
    }
  }
}

TEST_P(RandomCrossings, TwoFaultsInTwoReplicasAreTwoOrigins) {
  int incidents = 0;
  for (unsigned seed = GetParam() * 100; seed < GetParam() * 100 + 100; ++seed) {
    std::mt19937 random(seed);
    Layout layout = random_layout(random);
    layout.dp = 4;
    Fault first = random_fault(layout, random), second = random_fault(layout, random);
    first.dp = 0;
    second.dp = 3;  // in another expert-parallel group
    first.is_repeated = random() % 2 == 0;
    second.is_repeated = random() % 2 == 0;
    // Bad weights on all ranks hide the evidence in their gradients: docs/causes.md.
    if (first.plant == Plant::weight || second.plant == Plant::weight) continue;
    const Pass pass(layout, {first, second}, seed);
    if (!pass.has_struck(first) || !pass.has_struck(second)) continue;
    // The same operator in two replicas is reported as one origin with a common cause.
    if (first.plant == Plant::empty_loss && second.plant == Plant::empty_loss) continue;
    if (first.plant == second.plant &&
        (module_of(layout, first) == module_of(layout, second) ||
         gradient_of(layout, first) == gradient_of(layout, second))) {
      continue;
    }
    ++incidents;
    for (const bool is_repeat : {false, true}) {
      const Verdict verdict =
          locate(is_repeat ? ledgers_with_repeat(layout, {first, second}, seed) : pass.ledgers(),
                 layout.world());
      SCOPED_TRACE(describe(layout, first, seed) + describe(layout, second, seed) + "repeat " +
                   std::to_string(is_repeat) + std::to_string(first.is_repeated) +
                   std::to_string(second.is_repeated) + text_of(verdict));
      ASSERT_EQ(verdict.origins.size(), 2u);
      for (const Fault& fault : {first, second}) {
        const auto names = [&](const Origin& origin) {
          return std::ranges::includes(origin.candidates, guilty_of(layout, fault));
        };
        EXPECT_EQ(std::ranges::count_if(verdict.origins, names), 1);
        const Origin* origin = origin_of(verdict, guilty_of(layout, fault));
        if (!has_crossing(layout, fault, seed)) continue;
        ASSERT_NE(origin, nullptr);
        const bool may_be_gone = is_repeat && !fault.is_repeated;
        if (!may_be_gone) expect_told(layout, fault, *origin);
        const bool is_plain = !cause_of(fault.plant) || fault.plant == Plant::empty_loss;
        if (may_be_gone && is_plain) {
          EXPECT_EQ(origin->cause, Cause::not_reproduced);
        }
      }
    }
  }
  EXPECT_GT(incidents, 30);
}

TEST_P(RandomCrossings, MissingRanksNeverMakeAWrongRankCertain) {
  for (unsigned seed = GetParam() * 100; seed < GetParam() * 100 + 100; ++seed) {
    std::mt19937 random(seed);
    const Layout layout = random_layout(random);
    Fault fault = random_fault(layout, random);
    fault.is_repeated = random() % 2 == 0;
    const Pass pass(layout, {fault}, seed);
    if (!pass.has_struck(fault)) continue;
    std::vector<Ledger> ledgers =
        random() % 2 == 0 ? pass.ledgers() : ledgers_with_repeat(layout, {fault}, seed);
    for (int count = 1 + static_cast<int>(random() % 3); count > 0; --count) {
      const std::size_t at = random() % ledgers.size();
      if (random() % 2 == 0 && ledgers.size() > 1) {
        ledgers.erase(ledgers.begin() + static_cast<std::ptrdiff_t>(at));
      } else {
        ledgers[at].is_complete = false;
        ledgers[at].sightings.resize(ledgers[at].sightings.size() / 2);
        ledgers[at].births.clear();
        ledgers[at].rerun.reset();
      }
    }
    const Verdict verdict = locate(ledgers, layout.world());
    SCOPED_TRACE(describe(layout, fault, seed) + "answers " + std::to_string(ledgers.size()) +
                 text_of(verdict));
    EXPECT_EQ(verdict.status, VerdictStatus::partial);
    const std::vector<int> guilty = guilty_of(layout, fault);
    std::set<int> named;
    for (const Origin& origin : verdict.origins) {
      named.insert(origin.candidates.begin(), origin.candidates.end());
      if (origin.place_confidence == Confidence::high && origin.coordinates) {
        EXPECT_THAT(guilty, Contains(origin.coordinates->rank));
      }
    }
    const bool is_anything_seen = std::ranges::any_of(
        ledgers, [](const Ledger& ledger) { return !ledger.sightings.empty(); });
    if (!is_anything_seen) continue;
    EXPECT_TRUE(std::ranges::any_of(guilty, [&](int rank) { return named.contains(rank); }));
  }
}

TEST_P(RandomCrossings, TheVerdictDoesNotDependOnTheOrderOfTheLedgers) {
  for (unsigned seed = GetParam() * 100; seed < GetParam() * 100 + 30; ++seed) {
    std::mt19937 random(seed);
    const Layout layout = random_layout(random);
    std::vector<Fault> faults = {random_fault(layout, random), random_fault(layout, random)};
    faults[0].is_repeated = random() % 2 == 0;
    std::vector<Ledger> ledgers = ledgers_with_repeat(layout, faults, seed);
    const std::string expected = to_json(locate(ledgers, layout.world()));
    for (int i = 0; i < 3; ++i) {
      std::ranges::shuffle(ledgers, random);
      EXPECT_EQ(to_json(locate(ledgers, layout.world())), expected);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomCrossings, ::testing::Range(0u, 6u));

}  // namespace
}  // namespace nanlocator
