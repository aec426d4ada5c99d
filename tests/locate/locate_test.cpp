#include "nanlocator/locate/locate.hpp"
#include "nanlocator/report/verdict_json.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <random>

#include "locate/training_simulator.hpp"
#include "support/fact_matchers.hpp"

namespace nanlocator {
namespace {

using simulator::Block;
using simulator::Layout;
using simulator::Point;
using simulator::TrainingStep;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::IsSupersetOf;
using ::testing::Not;
using ::testing::Optional;

constexpr const char* kQkv = "decoder.layers.1.self_attention.linear_qkv.weight";
constexpr const char* kProj = "decoder.layers.1.self_attention.linear_proj.weight";
constexpr const char* kNorm = "decoder.layers.1.input_layernorm.weight";

Verdict locate_all(const TrainingStep& step) {
  return locate(step.ledgers(), step.layout().world());
}

Layout megatron_layout() {
  return {.tp = 2, .pp = 2, .dp = 2, .layers_per_stage = 2, .is_order_observed = true};
}

Ledger* ledger_of(std::vector<Ledger>& ledgers, int rank) {
  const auto found = std::ranges::find_if(
      ledgers, [&](const Ledger& each) { return each.coordinates.rank == rank; });
  return found == ledgers.end() ? nullptr : &*found;
}

void drop_phase(Ledger& ledger, Phase phase) {
  std::erase_if(ledger.coverage, [&](const Coverage& each) { return each.phase == phase; });
  std::erase_if(ledger.sightings, [&](const Sighting& each) { return each.phase == phase; });
}

/// A bad parameter on one rank in one phase, in a ledger that covers the phase.
Sighting& make_bad(Ledger& ledger, Phase phase, const std::string& name) {
  const auto parameter = std::ranges::find(ledger.backward_order, name, &ParameterRecord::name);
  Sighting sighting;
  sighting.phase = phase;
  sighting.iteration = ledger.iteration;
  sighting.role = "main_grad";
  sighting.parameter_id = parameter->id;
  sighting.parameter = name;
  sighting.dtype = "float32";
  sighting.shape = parameter->shape;
  sighting.stats.numel = 64;
  sighting.stats.nan = 1;
  sighting.stats.first_bad = 9;
  sighting.stats.absmax = 1;
  return ledger.sightings.emplace_back(sighting);
}

void cover(Ledger& ledger, Phase phase) {
  Coverage coverage{phase, {}};
  for (const auto& parameter : ledger.backward_order) coverage.parameters.push_back(parameter.id);
  std::ranges::sort(coverage.parameters);
  ledger.coverage.push_back(coverage);
}

TEST(Locate, AHealthyStepIsClean) {
  const Verdict verdict = locate_all(TrainingStep(megatron_layout(), {}));
  EXPECT_EQ(verdict.status, VerdictStatus::clean);
  EXPECT_THAT(verdict.origins, IsEmpty());
  EXPECT_THAT(verdict.spread.ranks, IsEmpty());
}

TEST(Locate, AForwardBirthLeavesEveryRankOfTheReplicaPossible) {
  const TrainingStep step(megatron_layout(),
                          {.point = Point::forward_region, .lane = 1, .tp = 1, .layer = 1});
  const Verdict verdict = locate_all(step);
  ASSERT_EQ(verdict.origins.size(), 1u);
  const Origin& origin = verdict.origins.front();
  EXPECT_EQ(origin.phase, Phase::grad_local);
  EXPECT_EQ(origin.data_parallel_replica, 1);
  EXPECT_FALSE(origin.coordinates);
  EXPECT_FALSE(origin.direction);
  EXPECT_EQ(origin.parameter, "");
  EXPECT_THAT(origin.candidates, ElementsAre(2, 3, 6, 7));
  EXPECT_EQ(verdict.status, VerdictStatus::located);
}

TEST(Locate, ABirthInsideATensorParallelRegionNamesItsRankAndParameter) {
  // Layer 1's attention on tp 1: rank 3 in replica 1, stage 0.
  const TrainingStep step(
      megatron_layout(),
      {.point = Point::region_gradient, .lane = 1, .tp = 1, .layer = 1, .block = Block::attention});
  const Verdict verdict = locate_all(step);
  ASSERT_EQ(verdict.origins.size(), 1u);
  const Origin& origin = verdict.origins.front();
  ASSERT_TRUE(origin.coordinates);
  EXPECT_EQ(origin.coordinates->rank, 3);
  EXPECT_EQ(origin.parameter, kQkv);
  EXPECT_EQ(origin.clean_before, kProj);
  EXPECT_EQ(origin.direction, Direction::backward);
  EXPECT_EQ(origin.place_confidence, Confidence::high);
  EXPECT_THAT(verdict.clean, ElementsAre(kProj));
}

TEST(Locate, APartialSumLeavesTheTensorParallelRanksOfItsStagePossible) {
  const TrainingStep step(megatron_layout(), {.point = Point::partial_gradient,
                                              .lane = 0,
                                              .tp = 1,
                                              .layer = 2,
                                              .block = Block::attention});
  const Verdict verdict = locate_all(step);
  ASSERT_EQ(verdict.origins.size(), 1u);
  EXPECT_FALSE(verdict.origins.front().coordinates);
  EXPECT_THAT(verdict.origins.front().candidates, ElementsAre(4, 5));
  EXPECT_EQ(verdict.origins.front().parameter, "decoder.layers.2.input_layernorm.weight");
}

TEST(Locate, WithSequenceParallelismTheRankWhoseTokensWereHitIsNotBlamedAlone) {
  // Rank 0's part of the sum is bad at a token of tp 1: only tp 1's norm weight shows it.
  Layout layout = megatron_layout();
  layout.has_sequence_parallel = true;
  const TrainingStep step(layout, {.point = Point::partial_gradient,
                                   .tp = 0,
                                   .layer = 1,
                                   .block = Block::attention,
                                   .token = 6});
  ASSERT_FALSE(step.bad_on(0).contains(kNorm));
  ASSERT_TRUE(step.bad_on(1).contains(kNorm));
  const Verdict verdict = locate_all(step);
  ASSERT_EQ(verdict.origins.size(), 1u);
  EXPECT_THAT(verdict.origins.front().candidates, ElementsAre(0, 1));
}

TEST(Locate, ABadStretchFromTheTopOfAStageMayHaveArrivedFromTheStageAbove) {
  const TrainingStep step(megatron_layout(),
                          {.point = Point::sent_gradient, .lane = 0, .tp = 1, .layer = 2});
  EXPECT_EQ(step.guilty_rank(), 5);
  const Verdict verdict = locate_all(step);
  ASSERT_EQ(verdict.origins.size(), 1u);
  EXPECT_THAT(verdict.origins.front().candidates, ElementsAre(1, 5));
  EXPECT_THAT(verdict.origins.front().facts, HasFact(FactKind::at_stage_boundary));
}

TEST(Locate, InterleavedPipelineChunksAreFollowedInBackwardOrder) {
  Layout layout = megatron_layout();
  layout.chunks = 2;  // stages: (pp0 chunk0), (pp1 chunk0), (pp0 chunk1), (pp1 chunk1)
  const TrainingStep step(
      layout,
      {.point = Point::region_gradient, .lane = 0, .tp = 0, .layer = 5, .block = Block::mlp});
  EXPECT_EQ(step.guilty_rank(), 0);
  const Verdict verdict = locate_all(step);
  ASSERT_EQ(verdict.origins.size(), 1u);
  EXPECT_THAT(verdict.origins.front().candidates, ElementsAre(0));
  EXPECT_EQ(verdict.origins.front().parameter, "decoder.layers.5.mlp.linear_fc1.weight");
}

TEST(Locate, ABadElementThatSpreadNowhereIsItsRanksOwn) {
  TrainingStep step(megatron_layout(), {});
  step.spoil(6, "decoder.layers.3.mlp.linear_fc1.weight");  // tp0 pp1 dp1
  const Verdict verdict = locate_all(step);
  ASSERT_EQ(verdict.origins.size(), 1u);
  const Origin& origin = verdict.origins.front();
  ASSERT_TRUE(origin.coordinates);
  EXPECT_EQ(origin.coordinates->rank, 6);
  EXPECT_EQ(origin.parameter, "decoder.layers.3.mlp.linear_fc1.weight");
  EXPECT_EQ(origin.cause, Cause::unknown);
  EXPECT_EQ(origin.place_confidence, Confidence::high);
  EXPECT_EQ(origin.clean_before, "decoder.layers.3.mlp.linear_fc2.weight");
  EXPECT_EQ(origin.clean_after, "decoder.layers.3.pre_mlp_layernorm.weight");
  EXPECT_THAT(origin.facts,
              HasFact(FactKind::other_replicas, Counts(1), Field(&Fact::of, Optional(1))));
  ASSERT_TRUE(origin.tensor);
  EXPECT_THAT(origin.tensor->first_bad_index, ElementsAre(0, 5));
  EXPECT_THAT(verdict.spread.ranks, ElementsAre(4, 6));  // both replicas, after the reduction
}

TEST(Locate, ANormWeightOnTheSecondTensorParallelRankIsReportedThoughTheNormOmitsIt) {
  TrainingStep step(megatron_layout(), {});
  step.spoil(1, kNorm);
  std::vector<Ledger> ledgers = step.ledgers();
  for (Ledger& ledger : ledgers) ledger.gradient_norm = 3.17;
  const Verdict verdict = locate(ledgers, 8);
  ASSERT_EQ(verdict.origins.size(), 1u);
  EXPECT_THAT(verdict.origins.front().candidates, ElementsAre(1));
  EXPECT_THAT(verdict.origins.front().facts, HasFact(FactKind::left_out_of_norm));
}

TEST(Locate, ADuplicateThatIsBadOnAllTensorParallelRanksIsOneOrigin) {
  TrainingStep step(megatron_layout(), {});
  step.spoil(0, kNorm);
  step.spoil(1, kNorm);
  const Verdict verdict = locate_all(step);
  ASSERT_EQ(verdict.origins.size(), 1u);
  EXPECT_THAT(verdict.origins.front().candidates, ElementsAre(0, 1));
}

TEST(Locate, AShardedParameterThatIsBadOnTwoTensorParallelRanksIsTwoOrigins) {
  TrainingStep step(megatron_layout(), {});
  step.spoil(0, kQkv);
  step.spoil(1, kQkv);
  const Verdict verdict = locate_all(step);
  ASSERT_EQ(verdict.origins.size(), 2u);
  EXPECT_THAT(verdict.origins[0].candidates, ElementsAre(0));
  EXPECT_THAT(verdict.origins[1].candidates, ElementsAre(1));
}

TEST(Locate, OppositeInfinitiesOnTwoReplicasAreTwoOrigins) {
  TrainingStep step(megatron_layout(), {});
  step.spoil(0, kQkv);
  step.spoil(2, kQkv);
  std::vector<Ledger> ledgers = step.ledgers();
  for (Ledger& ledger : ledgers) {
    for (Sighting& sighting : ledger.sightings) {
      if (sighting.phase != Phase::grad_local) continue;
      sighting.stats.nan = 0;
      (ledger.coordinates.rank == 0 ? sighting.stats.pos_inf : sighting.stats.neg_inf) = 1;
    }
  }
  const Verdict verdict = locate(ledgers, 8);
  ASSERT_EQ(verdict.origins.size(), 2u);
  EXPECT_THAT(verdict.origins[0].candidates, ElementsAre(0));
  EXPECT_EQ(verdict.origins[0].tensor->pos_inf, 1);
  EXPECT_THAT(verdict.origins[1].candidates, ElementsAre(2));
  EXPECT_EQ(verdict.origins[1].tensor->neg_inf, 1);
}

TEST(Locate, AParallelBranchOfTheStartsLayerDoesNotSplitTheOrigin) {
  // q_layernorm's backward is the birth; k_layernorm finishes after it and is clean.
  Ledger ledger;
  ledger.is_backward_order_observed = true;
  std::int64_t id = 0;
  for (const char* name :
       {"output_layer.weight", "decoder.layers.1.self_attention.linear_proj.weight",
        "decoder.layers.1.self_attention.q_layernorm.weight",
        "decoder.layers.1.self_attention.k_layernorm.weight",
        "decoder.layers.1.self_attention.linear_qkv.weight",
        "decoder.layers.1.input_layernorm.weight", "decoder.layers.0.mlp.linear_fc2.weight"}) {
    ledger.backward_order.push_back({.id = id++, .name = name, .shape = {64}});
  }
  cover(ledger, Phase::grad_local);
  for (const int position : {2, 4, 5, 6}) {
    make_bad(ledger, Phase::grad_local, ledger.backward_order[position].name);
  }
  const Verdict verdict = locate(std::vector{ledger}, 1);
  ASSERT_EQ(verdict.origins.size(), 1u);
  EXPECT_EQ(verdict.origins.front().parameter,
            "decoder.layers.1.self_attention.q_layernorm.weight");
  EXPECT_EQ(verdict.origins.front().clean_before,
            "decoder.layers.1.self_attention.linear_proj.weight");
}

TEST(Locate, EveryReplicaBadFromItsLossOnPointsToACommonCause) {
  const Layout layout{.dp = 3};
  std::vector<Ledger> ledgers;
  for (int lane = 0; lane < 3; ++lane) {
    std::vector<Ledger> all =
        TrainingStep(layout, {.point = Point::forward_hidden, .lane = lane}).ledgers();
    ledgers.push_back(*ledger_of(all, lane));
  }
  const Verdict verdict = locate(ledgers, 3);
  ASSERT_EQ(verdict.origins.size(), 3u);
  for (int lane = 0; lane < 3; ++lane) {
    EXPECT_THAT(verdict.origins[lane].candidates, ElementsAre(lane));
  }
  EXPECT_THAT(verdict.facts, HasFact(FactKind::all_replicas_bad));
}

TEST(Locate, WhereTheLossIsFiniteTheGradientsWereNotBadFromIt) {
  const Layout layout{.dp = 1};
  std::vector<Ledger> ledgers = TrainingStep(layout, {.point = Point::forward_hidden}).ledgers();
  std::erase_if(ledgers[0].sightings, [](const Sighting& each) { return each.role == "loss"; });
  EXPECT_THAT(locate(ledgers, 1).origins.at(0).facts, HasFact(FactKind::all_gradients_bad));
  ledgers[0].coverage.push_back({Phase::loss, {}});
  const Origin origin = locate(ledgers, 1).origins.at(0);
  EXPECT_THAT(origin.facts, HasFact(FactKind::all_gradients_bad_loss_finite));
  EXPECT_EQ(origin.action, Action::check_clip);
  EXPECT_EQ(origin.parameter, "") << "which one was bad first, a clip has hidden";
  Sighting loss;
  loss.phase = Phase::loss;
  loss.role = "loss";
  loss.stats = {.numel = 1, .nan = 1, .first_bad = 0};
  ledgers[0].sightings.push_back(loss);
  EXPECT_THAT(locate(ledgers, 1).origins.at(0).facts, HasFact(FactKind::all_gradients_bad));
}

TEST(Locate, GradientsOfZerosProveNothingFinite) {
  std::vector<Ledger> ledgers = TrainingStep({.dp = 1}, {.point = Point::forward_hidden}).ledgers();
  Ledger& ledger = ledgers[0];
  const auto is_later = [&](const Sighting& each) {  // a relu has stopped the NaN
    return !each.parameter.empty() && each.parameter != ledger.backward_order[0].name &&
           each.parameter != ledger.backward_order[1].name;
  };
  std::erase_if(ledger.sightings, is_later);
  const auto local = std::ranges::find(ledger.coverage, Phase::grad_local, &Coverage::phase);
  local->absmax.assign(local->parameters.size(), 1.0F);
  EXPECT_THAT(locate(ledgers, 1).origins.at(0).facts, Not(HasFact(FactKind::all_gradients_bad)));
  local->absmax.assign(local->parameters.size(), 0.0F);
  const Verdict verdict = locate(ledgers, 1);
  ASSERT_EQ(verdict.origins.size(), 1u);
  EXPECT_THAT(verdict.origins.front().facts, HasFact(FactKind::all_gradients_bad));
}

TEST(Locate, OfReplicasWhoseGradientsWereSeenAfterTheirSumTheOneWithTheBadLossIsLeft) {
  const Layout layout{.dp = 3};
  auto ledgers = TrainingStep(layout, {.point = Point::forward_hidden, .lane = 1}).ledgers();
  for (Ledger& ledger : ledgers) {
    drop_phase(ledger, Phase::grad_local);
    std::erase_if(ledger.sightings, [](const Sighting& each) { return each.role == "loss"; });
  }
  EXPECT_THAT(locate(ledgers, 3).origins.at(0).candidates, ElementsAre(0, 1, 2));
  Sighting loss;
  loss.phase = Phase::loss;
  loss.role = "loss";
  loss.stats = {.numel = 1, .nan = 1, .first_bad = 0};
  ledgers[1].sightings.push_back(loss);
  for (const int rank : {0, 1}) ledgers[rank].coverage.push_back({Phase::loss, {}});
  EXPECT_THAT(locate(ledgers, 3).origins.at(0).candidates, ElementsAre(0, 1, 2))
      << "rank 2's loss is not known";
  ledgers[2].coverage.push_back({Phase::loss, {}});
  const Origin origin = locate(ledgers, 3).origins.at(0);
  EXPECT_THAT(origin.candidates, ElementsAre(1));
  EXPECT_THAT(origin.facts, HasFact(FactKind::other_losses_finite));
  ledgers[0].sightings.push_back(loss);
  EXPECT_THAT(locate(ledgers, 3).origins.at(0).candidates, ElementsAre(0, 1));
}

// ---- weights ----

TEST(Locate, ABadWeightOnAllReplicasIsOneStoredOrigin) {
  TrainingStep step(megatron_layout(), {.point = Point::forward_region, .layer = 1});
  std::vector<Ledger> ledgers = step.ledgers();
  for (Ledger& ledger : ledgers) cover(ledger, Phase::params_before);
  for (const int rank : {1, 3}) make_bad(*ledger_of(ledgers, rank), Phase::params_before, kQkv);
  const Verdict verdict = locate(ledgers, 8);
  ASSERT_EQ(verdict.origins.size(), 1u);
  EXPECT_EQ(verdict.origins.front().cause, Cause::bad_weight);
  EXPECT_THAT(verdict.origins.front().candidates, ElementsAre(1, 3));
  EXPECT_EQ(verdict.origins.front().parameter, kQkv);
}

TEST(Locate, ABadWeightOnOneReplicaIsThatRanks) {
  std::vector<Ledger> ledgers = TrainingStep(megatron_layout(), {}).ledgers();
  for (Ledger& ledger : ledgers) cover(ledger, Phase::params_before);
  make_bad(*ledger_of(ledgers, 3), Phase::params_before, kQkv);
  const Verdict verdict = locate(ledgers, 8);
  ASSERT_EQ(verdict.origins.size(), 1u);
  ASSERT_TRUE(verdict.origins.front().coordinates);
  EXPECT_EQ(verdict.origins.front().coordinates->rank, 3);
  EXPECT_EQ(verdict.origins.front().place_confidence, Confidence::high);
}

// ---- after the reduction ----

TEST(Locate, CleanBeforeAndBadAfterOnAllMembersIsTheCollectivesResult) {
  std::vector<Ledger> ledgers = TrainingStep(megatron_layout(), {}).ledgers();
  for (const int rank : {1, 3}) make_bad(*ledger_of(ledgers, rank), Phase::grad_reduced, kQkv);
  const Verdict verdict = locate(ledgers, 8);
  ASSERT_EQ(verdict.origins.size(), 1u);
  EXPECT_EQ(verdict.origins.front().phase, Phase::grad_reduced);
  EXPECT_EQ(verdict.origins.front().cause, Cause::collective_result);
  EXPECT_THAT(verdict.origins.front().candidates, ElementsAre(1, 3));
}

TEST(Locate, ASumNearTheLargestNumberMayHaveOverflowed) {
  std::vector<Ledger> ledgers = TrainingStep(megatron_layout(), {}).ledgers();
  for (const int rank : {1, 3}) {
    Sighting& sighting = make_bad(*ledger_of(ledgers, rank), Phase::grad_reduced, kQkv);
    sighting.stats.nan = 0;
    sighting.stats.pos_inf = 1;
    sighting.stats.absmax = 3e38;
  }
  const Verdict verdict = locate(ledgers, 8);
  ASSERT_EQ(verdict.origins.size(), 1u);
  EXPECT_EQ(verdict.origins.front().cause, Cause::collective_sum);
}

/// A reduced gradient that is Inf on ranks 1 and 3, whose largest elements before it were `absmax`.
Verdict verdict_of_reduced_inf(float absmax, std::int64_t nan = 0) {
  std::vector<Ledger> ledgers = TrainingStep(megatron_layout(), {}).ledgers();
  for (const int rank : {1, 3}) {
    Ledger& ledger = *ledger_of(ledgers, rank);
    Sighting& sighting = make_bad(ledger, Phase::grad_reduced, kQkv);
    sighting.stats.nan = nan;
    sighting.stats.pos_inf = 1;
    sighting.stats.absmax = 1;
    Coverage& local = *std::ranges::find(ledger.coverage, Phase::grad_local, &Coverage::phase);
    local.absmax.assign(local.parameters.size(), absmax);
  }
  return locate(ledgers, 8);
}

TEST(Locate, ASumThatOverflowsInOneElementIsKnownByTheMaximaOfItsAddends) {
  const Verdict verdict = verdict_of_reduced_inf(2e38F);
  ASSERT_EQ(verdict.origins.size(), 1u);
  EXPECT_EQ(verdict.origins.front().cause, Cause::collective_sum);
  EXPECT_EQ(verdict.origins.front().owner, Owner::model_author);
}

TEST(Locate, ASumOfSmallOrNotANumberDidNotOverflow) {
  EXPECT_EQ(verdict_of_reduced_inf(1e38F).origins.at(0).cause, Cause::collective_result);
  EXPECT_EQ(verdict_of_reduced_inf(2e38F, 1).origins.at(0).cause, Cause::collective_result);
}

TEST(Locate, OneBadCopyOfAnAllReducedGradientIsThatRanks) {
  std::vector<Ledger> ledgers = TrainingStep(megatron_layout(), {}).ledgers();
  make_bad(*ledger_of(ledgers, 3), Phase::grad_reduced, kQkv);
  const Verdict verdict = locate(ledgers, 8);
  ASSERT_EQ(verdict.origins.size(), 1u);
  EXPECT_THAT(verdict.origins.front().candidates, ElementsAre(3));
}

TEST(Locate, ABadShardLeavesTheOwnerAndItsSendersPossible) {
  Layout layout = megatron_layout();
  layout.has_distributed_optimizer = true;
  std::vector<Ledger> ledgers = TrainingStep(layout, {}).ledgers();
  make_bad(*ledger_of(ledgers, 3), Phase::grad_reduced, kQkv).stats.numel = 32;
  const Verdict verdict = locate(ledgers, 8);
  ASSERT_EQ(verdict.origins.size(), 1u);
  EXPECT_EQ(verdict.origins.front().cause, Cause::collective_result);
  EXPECT_THAT(verdict.origins.front().candidates, ElementsAre(1, 3));
  EXPECT_THAT(verdict.origins.front().facts, HasFact(FactKind::only_owner_keeps_sum, OnRanks({3})));
}

TEST(Locate, ABadParameterAfterTheReductionIsAnOriginOfItsOwnBesideALocalOne) {
  TrainingStep step(megatron_layout(), {});
  step.spoil(0, kProj);
  std::vector<Ledger> ledgers = step.ledgers();
  make_bad(*ledger_of(ledgers, 5), Phase::grad_reduced, "output_layer.weight");
  const Verdict verdict = locate(ledgers, 8);
  ASSERT_EQ(verdict.origins.size(), 2u);
  EXPECT_THAT(verdict.origins[0].candidates, ElementsAre(0));
  EXPECT_THAT(verdict.origins[1].candidates, ElementsAre(5));
  EXPECT_EQ(verdict.origins[1].phase, Phase::grad_reduced);
}

TEST(Locate, ATiedEmbeddingThatArrivesFromTheLastStageIsNoOrigin) {
  Layout layout = megatron_layout();
  layout.has_tied_embeddings = true;
  TrainingStep step(layout, {});
  step.spoil(4, "output_layer.weight");
  std::vector<Ledger> ledgers = step.ledgers();
  const auto& first_stage = ledger_of(ledgers, 0)->sightings;
  ASSERT_TRUE(std::ranges::any_of(first_stage, [](const Sighting& each) {
    return each.phase == Phase::grad_norm && each.parameter.starts_with("embedding");
  }));
  const Verdict verdict = locate(ledgers, 8);
  ASSERT_EQ(verdict.origins.size(), 1u);
  EXPECT_THAT(verdict.origins.front().candidates, ElementsAre(4));
}

TEST(Locate, AGradientThatTurnsBadOnTheWayToTheOptimizerIsThatRanks) {
  std::vector<Ledger> ledgers = TrainingStep(megatron_layout(), {}).ledgers();
  make_bad(*ledger_of(ledgers, 2), Phase::grad_norm, kQkv);
  const Verdict verdict = locate(ledgers, 8);
  ASSERT_EQ(verdict.origins.size(), 1u);
  EXPECT_EQ(verdict.origins.front().phase, Phase::grad_norm);
  EXPECT_THAT(verdict.origins.front().candidates, ElementsAre(2));
}

TEST(Locate, SeveralGradientsOfARankThatTurnBadOnTheWayToTheOptimizerAreOneOrigin) {
  std::vector<Ledger> ledgers = TrainingStep(megatron_layout(), {}).ledgers();
  for (const char* name : {kQkv, "decoder.layers.1.mlp.linear_fc1.weight"}) {
    make_bad(*ledger_of(ledgers, 2), Phase::grad_norm, name);
  }
  const Verdict verdict = locate(ledgers, 8);
  ASSERT_EQ(verdict.origins.size(), 1u);
  EXPECT_THAT(verdict.origins.front().facts,
              HasFact(FactKind::clean_after_reduction, OnRanks({2}), Counts(2)));
}

TEST(Locate, AFactorThatSpoilsEveryGradientOnTheWayToTheOptimizerIsOneOrigin) {
  std::vector<Ledger> ledgers = TrainingStep(megatron_layout(), {}).ledgers();
  std::vector<int> ranks;
  for (Ledger& ledger : ledgers) {
    ranks.push_back(ledger.coordinates.rank);
    for (const ParameterRecord& parameter : ledger.backward_order) {
      make_bad(ledger, Phase::grad_norm, parameter.name);
    }
  }
  const Verdict verdict = locate(ledgers, 8);
  ASSERT_EQ(verdict.origins.size(), 1u);
  EXPECT_EQ(verdict.origins.front().candidates, ranks);
  EXPECT_EQ(verdict.origins.front().phase, Phase::grad_norm);
}

TEST(Locate, GradientsOfTwoRanksThatTurnBadOnTheWayToTheOptimizerAreTwoOrigins) {
  std::vector<Ledger> ledgers = TrainingStep(megatron_layout(), {}).ledgers();
  for (const int rank : {1, 2}) make_bad(*ledger_of(ledgers, rank), Phase::grad_norm, kQkv);
  EXPECT_EQ(locate(ledgers, 8).origins.size(), 2u);
}

TEST(Locate, OneRanksOptimizerUpdateIsNamed) {
  std::vector<Ledger> ledgers = TrainingStep(megatron_layout(), {}).ledgers();
  for (Ledger& ledger : ledgers) cover(ledger, Phase::params_after);
  make_bad(*ledger_of(ledgers, 7), Phase::params_after, "output_layer.weight");
  const Verdict verdict = locate(ledgers, 8);
  ASSERT_EQ(verdict.origins.size(), 1u);
  EXPECT_EQ(verdict.origins.front().cause, Cause::optimizer_update);
  EXPECT_THAT(verdict.origins.front().candidates, ElementsAre(7));
}

/// Ranks 1 and 3 (tp 1, stage 0) share the parameter; its first 32 elements are rank 3's.
std::vector<Ledger> ledgers_with_shards(Phase phase, std::initializer_list<int> bad) {
  std::vector<Ledger> ledgers = TrainingStep(megatron_layout(), {}).ledgers();
  for (Ledger& ledger : ledgers) cover(ledger, phase);
  for (const int rank : {1, 3}) {
    auto& order = ledger_of(ledgers, rank)->backward_order;
    std::ranges::find(order, kQkv, &ParameterRecord::name)->shard =
        rank == 3 ? ElementRange{0, 32} : ElementRange{32, 64};
  }
  for (const int rank : bad) make_bad(*ledger_of(ledgers, rank), phase, kQkv);
  return ledgers;
}

TEST(Locate, WhatTheAllGatherOfParametersHasSpreadIsItsOwners) {
  for (const Phase phase : {Phase::params_before, Phase::params_after}) {
    const Verdict verdict = locate(ledgers_with_shards(phase, {1, 3}), 8);
    ASSERT_EQ(verdict.origins.size(), 1u);
    EXPECT_THAT(verdict.origins.front().candidates, ElementsAre(3));
    EXPECT_THAT(verdict.origins.front().facts, HasFact(FactKind::gathered_from_owner, OnRanks({3}),
                                                       Field(&Fact::peers, ElementsAre(1))));
  }
}

TEST(Locate, WhereMoreIsBadThanOneShardHoldsNoOwnerIsNamed) {
  std::vector<Ledger> ledgers = ledgers_with_shards(Phase::params_after, {1, 3});
  for (const int rank : {1, 3}) ledger_of(ledgers, rank)->sightings.back().stats.nan = 40;
  const Verdict verdict = locate(ledgers, 8);
  ASSERT_EQ(verdict.origins.size(), 1u);
  EXPECT_THAT(verdict.origins.front().candidates, ElementsAre(1, 3));
}

TEST(Locate, AShardThatOnlyTheReceiverHasBadIsTheReceivers) {
  const Verdict verdict = locate(ledgers_with_shards(Phase::params_before, {1}), 8);
  ASSERT_EQ(verdict.origins.size(), 1u);
  EXPECT_THAT(verdict.origins.front().candidates, ElementsAre(1));
}

/// Four data-parallel ranks. Each weight is sharded over ranks 0 and 1, and again over 2 and 3. The
/// shards of kQkv on `bad` are NaN, and so is every gradient on ranks that gather them.
std::vector<Ledger> ledgers_with_weights_in_shards(std::initializer_list<int> bad) {
  std::vector<Ledger> ledgers = TrainingStep({.dp = 4}, {}).ledgers();
  for (Ledger& ledger : ledgers) {
    const int rank = ledger.coordinates.rank;
    for (ParameterRecord& parameter : ledger.backward_order) {
      parameter.shard = rank % 2 == 0 ? ElementRange{0, 32} : ElementRange{32, 64};
      parameter.shard_group = rank < 2 ? RankList{0, 1} : RankList{2, 3};
    }
    cover(ledger, Phase::params_before);
    const bool gathers_it =
        std::ranges::any_of(bad, [&](int each) { return each / 2 == rank / 2; });
    if (!gathers_it) continue;
    for (const auto& parameter : std::vector(ledger.backward_order)) {
      make_bad(ledger, Phase::grad_local, parameter.name);
    }
  }
  for (const int rank : bad) {
    Sighting& weight = make_bad(*ledger_of(ledgers, rank), Phase::params_before, kQkv);
    weight.stats.numel = 32;
    weight.stats.first_bad = rank % 2 == 0 ? 9 : 41;
  }
  return ledgers;
}

TEST(Locate, ABadShardOfAWeightIsThatOfTheRankThatKeepsIt) {
  const Verdict verdict = locate(ledgers_with_weights_in_shards({1}), 4);
  ASSERT_EQ(verdict.origins.size(), 1u);
  const Origin& origin = verdict.origins.front();
  EXPECT_EQ(origin.cause, Cause::bad_weight);
  EXPECT_THAT(origin.candidates, ElementsAre(1));
  EXPECT_EQ(origin.place_confidence, Confidence::high);
  EXPECT_THAT(origin.facts, HasFact(FactKind::gathered_from_owner, OnRanks({1}),
                                    Field(&Fact::peers, ElementsAre(0))));
  EXPECT_THAT(origin.facts,
              HasFact(FactKind::copies_clean, OnRanks({1}), Field(&Fact::peers, ElementsAre(3))))
      << "only rank 3 keeps the same elements";
}

TEST(Locate, OfAShardWhoseCopyIsBadTooTheOwnersAreLeft) {
  const Verdict verdict = locate(ledgers_with_weights_in_shards({1, 3}), 4);
  ASSERT_EQ(verdict.origins.size(), 1u);
  EXPECT_THAT(verdict.origins.front().candidates, ElementsAre(1, 3));
  EXPECT_THAT(verdict.origins.front().facts, HasFact(FactKind::owner_is_left, OnRanks({1, 3})));
  EXPECT_THAT(verdict.origins.front().facts, Not(HasFact(FactKind::every_copy_bad)));
}

TEST(Locate, ABadShardExplainsOnlyThoseThatGatherIt) {
  std::vector<Ledger> ledgers = ledgers_with_weights_in_shards({1});
  make_bad(*ledger_of(ledgers, 2), Phase::grad_local, kProj);
  const Verdict verdict = locate(ledgers, 4);
  ASSERT_EQ(verdict.origins.size(), 2u);
  EXPECT_THAT(verdict.origins.back().candidates, ElementsAre(2));
  EXPECT_EQ(verdict.origins.back().parameter, kProj);
}

TEST(Locate, AReducedShardThatIsCleanOnItsOtherKeeperWentBadWhereItLies) {
  std::vector<Ledger> ledgers = ledgers_with_weights_in_shards({});
  make_bad(*ledger_of(ledgers, 1), Phase::grad_reduced, kQkv).stats.numel = 32;
  const Verdict verdict = locate(ledgers, 4);
  ASSERT_EQ(verdict.origins.size(), 1u);
  EXPECT_THAT(verdict.origins.front().candidates, ElementsAre(1));
  EXPECT_THAT(verdict.origins.front().facts,
              HasFact(FactKind::own_copy_bad, OnRanks({1}), Field(&Fact::peers, ElementsAre(3))));
}

TEST(Locate, SeveralGradientsThatAreBadOnOneRankAloneAreOneOrigin) {
  std::vector<Ledger> ledgers = TrainingStep({.dp = 2}, {}).ledgers();
  for (Ledger& ledger : ledgers) {
    ledger.coverage.clear();
    cover(ledger, Phase::grad_reduced);
  }
  make_bad(*ledger_of(ledgers, 0), Phase::grad_reduced, kQkv);
  make_bad(*ledger_of(ledgers, 0), Phase::grad_reduced, kProj);
  const Verdict verdict = locate(ledgers, 2);
  ASSERT_EQ(verdict.origins.size(), 1u);
  EXPECT_THAT(verdict.origins.front().candidates, ElementsAre(0));
  EXPECT_THAT(verdict.origins.front().facts,
              HasFact(FactKind::clean_copy_after_reduction, OnRanks({0}),
                      Field(&Fact::count, Optional(2))));
}

TEST(Locate, BadParametersAfterABadGradientAreItsSpread) {
  TrainingStep step(megatron_layout(), {});
  step.spoil(0, kProj);
  std::vector<Ledger> ledgers = step.ledgers();
  for (Ledger& ledger : ledgers) {
    cover(ledger, Phase::params_after);
    for (const auto& parameter : std::vector(ledger.backward_order)) {
      make_bad(ledger, Phase::params_after, parameter.name);
    }
  }
  const Verdict verdict = locate(ledgers, 8);
  ASSERT_EQ(verdict.origins.size(), 1u);
  EXPECT_EQ(verdict.origins.front().phase, Phase::grad_local);
  EXPECT_EQ(verdict.spread.ranks.size(), 8u);
}

TEST(Locate, AnInfiniteNormOfFiniteGradientsNamesTheLargest) {
  std::vector<Ledger> ledgers = TrainingStep(megatron_layout(), {}).ledgers();
  for (Ledger& ledger : ledgers) {
    ledger.gradient_norm = std::numeric_limits<double>::infinity();
    ledger.absmax = ledger.coordinates.rank == 4 ? 1e25 : 1.0;
    ledger.absmax_parameter = "output_layer.weight";
  }
  const Verdict verdict = locate(ledgers, 8);
  ASSERT_EQ(verdict.origins.size(), 1u);
  const Origin& origin = verdict.origins.front();
  EXPECT_EQ(origin.cause, Cause::unknown);  // divergence_test.cpp checks the cause
  EXPECT_EQ(origin.place_confidence, Confidence::low);
  EXPECT_EQ(origin.parameter, "output_layer.weight");
  EXPECT_THAT(origin.candidates, ElementsAre(4));
  EXPECT_FALSE(origin.tensor);
}

TEST(Locate, ANonFiniteNormOfSmallGradientsIsNoDivergence) {
  std::vector<Ledger> ledgers = TrainingStep({.dp = 2}, {}).ledgers();
  for (Ledger& ledger : ledgers) {
    ledger.gradient_norm = std::numeric_limits<double>::quiet_NaN();
    ledger.absmax = 0.25;
  }
  const Verdict verdict = locate(ledgers, 2);
  ASSERT_EQ(verdict.origins.size(), 1u);
  EXPECT_EQ(verdict.origins.front().cause, Cause::unknown);
}

// ---- missing data ----

TEST(Locate, ASilentGuiltyRankStaysAmongTheCandidates) {
  const TrainingStep step(
      megatron_layout(),
      {.point = Point::region_gradient, .lane = 1, .tp = 1, .layer = 1, .block = Block::attention});
  std::vector<Ledger> ledgers = step.ledgers();
  std::erase_if(ledgers, [](const Ledger& each) { return each.coordinates.rank == 3; });
  const Verdict verdict = locate(ledgers, 8);
  EXPECT_EQ(verdict.status, VerdictStatus::partial);
  EXPECT_THAT(verdict.silent_ranks, ElementsAre(3));
  ASSERT_FALSE(verdict.origins.empty());
  EXPECT_THAT(verdict.origins.front().candidates, Contains(3));
  for (const Origin& origin : verdict.origins) EXPECT_NE(origin.place_confidence, Confidence::high);
}

/// Ranks of two hosts, four each, of which rank 3 is silent.
Verdict verdict_without_rank_3(int ranks_in_a_row) {
  std::vector<Ledger> ledgers = TrainingStep(megatron_layout(), {.layer = 1}).ledgers();
  for (Ledger& each : ledgers) {
    const int rank = each.coordinates.rank;
    const bool is_cyclic = ranks_in_a_row == 1;
    each.coordinates.host = (is_cyclic ? rank % 2 : rank / 4) == 0 ? "a17" : "a18";
    each.coordinates.local_rank = is_cyclic ? rank / 2 : rank % 4;
  }
  std::erase_if(ledgers, [](const Ledger& each) { return each.coordinates.rank == 3; });
  return locate(ledgers, 8);
}

TEST(Locate, ASilentRankIsOnTheHostOfItsBlock) {
  const Verdict verdict = verdict_without_rank_3(4);
  const RankCoordinates* const silent = find_mentioned(verdict, 3);
  ASSERT_NE(silent, nullptr);
  EXPECT_EQ(silent->host, "a17");
  EXPECT_EQ(verdict_from_json(to_json(verdict), "verdict").layout->mentioned,
            verdict.layout->mentioned);
}

TEST(Locate, ASilentRankHasNoHostIfRanksAreNotNumberedHostByHost) {
  EXPECT_EQ(find_mentioned(verdict_without_rank_3(1), 3), nullptr);
}

TEST(Locate, ACutOffLedgerProvesNothingClean) {
  TrainingStep step(megatron_layout(), {.point = Point::region_gradient, .layer = 1});
  std::vector<Ledger> ledgers = step.ledgers();
  Ledger& cut = *ledger_of(ledgers, 0);
  cut.is_complete = false;
  cut.sightings.clear();
  const Verdict verdict = locate(ledgers, 8);
  EXPECT_EQ(verdict.status, VerdictStatus::partial);
  ASSERT_FALSE(verdict.origins.empty());
  EXPECT_THAT(verdict.origins.front().candidates, Contains(0));
  EXPECT_NE(verdict.origins.front().place_confidence, Confidence::high);
}

TEST(Locate, WithoutLocalEvidenceTheReducedGradientsStillNameTheParameter) {
  const TrainingStep step(
      {.dp = 4},
      {.point = Point::region_gradient, .lane = 2, .layer = 1, .block = Block::attention});
  std::vector<Ledger> ledgers = step.ledgers();
  for (Ledger& ledger : ledgers) drop_phase(ledger, Phase::grad_local);
  const Verdict verdict = locate(ledgers, 4);
  ASSERT_EQ(verdict.origins.size(), 1u);
  EXPECT_EQ(verdict.origins.front().parameter, kQkv);
  EXPECT_THAT(verdict.origins.front().candidates, ElementsAre(0, 1, 2, 3));
  EXPECT_EQ(verdict.origins.front().place_confidence, Confidence::low);
}

TEST(Locate, NoLedgerAtAllIsNoCleanBillOfHealth) {
  const Verdict verdict = locate({}, 2);
  EXPECT_EQ(verdict.status, VerdictStatus::partial);
  EXPECT_THAT(verdict.silent_ranks, ElementsAre(0, 1));
}

// ---- many incidents ----

struct StepIncident {
  Layout layout;
  simulator::Fault fault;
};

StepIncident random_incident(unsigned seed) {
  std::mt19937 random(seed);
  const auto choose = [&](int count) { return static_cast<int>(random() % count); };
  const Layout layout = simulator::random_layout(random);
  constexpr Point kPoints[] = {
      Point::forward_hidden,    Point::forward_region, Point::loss_gradient,
      Point::residual_gradient, Point::row_gradient,   Point::region_gradient,
      Point::partial_gradient,  Point::norm_gradient,  Point::sent_gradient};
  simulator::Fault fault{.point = kPoints[choose(9)],
                         .lane = choose(layout.lanes()),
                         .tp = choose(layout.tp),
                         .layer = choose(layout.layers()),
                         .block = choose(2) == 0 ? Block::attention : Block::mlp,
                         .token = choose(8)};
  if (fault.point == Point::sent_gradient) fault.layer -= fault.layer % layout.layers_per_stage;
  fault.source_lane = fault.lane;
  if (layout.ep > 1 && choose(2) == 0) fault.source_lane = fault.lane / 2 * 2 + choose(2);
  return {layout, fault};
}

std::string describe(const StepIncident& incident, unsigned seed) {
  const Layout& layout = incident.layout;
  const simulator::Fault& fault = incident.fault;
  return "seed " + std::to_string(seed) + ": " + layout.describe() + "; point " +
         std::to_string(static_cast<int>(fault.point)) + " lane " + std::to_string(fault.lane) +
         " tp " + std::to_string(fault.tp) + " layer " + std::to_string(fault.layer) + " block " +
         std::to_string(static_cast<int>(fault.block));
}

class RandomIncidents : public ::testing::TestWithParam<unsigned> {};

TEST_P(RandomIncidents, TheGuiltyRankIsAmongTheCandidatesOfTheOneOrigin) {
  int incidents = 0;
  for (unsigned seed = GetParam() * 100; seed < GetParam() * 100 + 100; ++seed) {
    const StepIncident incident = random_incident(seed);
    const TrainingStep step(incident.layout, incident.fault);
    SCOPED_TRACE(describe(incident, seed) + "; first bad " + step.first_bad());
    const Verdict verdict = locate_all(step);
    if (!step.has_bad_gradients()) {
      EXPECT_EQ(verdict.status, VerdictStatus::clean);
      continue;
    }
    ++incidents;
    ASSERT_EQ(verdict.origins.size(), 1u);
    const Origin& origin = verdict.origins.front();
    EXPECT_EQ(origin.phase, Phase::grad_local);
    EXPECT_EQ(verdict.status, VerdictStatus::located);
    EXPECT_THAT(origin.candidates, Contains(*step.guilty_rank()));
    EXPECT_EQ(origin.coordinates.has_value(), origin.candidates.size() == 1);
    EXPECT_THAT(incident.layout.replica_of(incident.fault.lane), IsSupersetOf(origin.candidates));
    if (incident.layout.is_order_observed && !origin.parameter.empty() && incident.layout.ep == 1 &&
        incident.layout.cp == 1) {
      EXPECT_EQ(origin.parameter, step.first_bad());
    }
    // A fault between the two GEMMs of a tensor-parallel block is on one rank, and visible.
    const Layout& layout = incident.layout;
    if (incident.fault.point == Point::region_gradient && layout.tp > 1 && layout.cp == 1 &&
        !layout.has_experts && layout.is_order_observed) {
      EXPECT_THAT(origin.candidates, ElementsAre(*step.guilty_rank()));
    }
  }
  EXPECT_GT(incidents, 50);  // most plants affect some gradient
}

TEST_P(RandomIncidents, AnIsolatedElementIsNamedWithItsRank) {
  for (unsigned seed = GetParam() * 100; seed < GetParam() * 100 + 100; ++seed) {
    StepIncident incident = random_incident(seed);
    incident.fault = {};
    std::mt19937 random(seed);
    TrainingStep step(incident.layout, incident.fault);
    const int rank = static_cast<int>(random() % incident.layout.world());
    const auto order = step.order_on(rank);
    const ParameterRecord parameter = order[random() % order.size()];
    step.spoil(rank, parameter.name);
    SCOPED_TRACE(describe(incident, seed) + "; spoiled " + parameter.name + " on rank " +
                 std::to_string(rank));
    const Verdict verdict = locate_all(step);
    ASSERT_EQ(verdict.origins.size(), 1u);
    const Origin& origin = verdict.origins.front();
    EXPECT_EQ(origin.parameter, parameter.name);
    EXPECT_THAT(origin.candidates, Contains(rank));
    // Later clean parameters of backward leave one rank; the embedding and the last norm have no
    // sharded parameter after them.
    const bool is_last =
        parameter.name.starts_with("embedding") || parameter.name.starts_with("decoder.layers.0.");
    if (!is_last) {
      ASSERT_TRUE(origin.coordinates);
      EXPECT_EQ(origin.coordinates->rank, rank);
      EXPECT_EQ(origin.place_confidence, Confidence::high);
    }
  }
}

TEST_P(RandomIncidents, FaultsInTwoReplicasAreTwoOrigins) {
  for (unsigned seed = GetParam() * 100; seed < GetParam() * 100 + 50; ++seed) {
    StepIncident incident = random_incident(seed);
    incident.layout.dp = 4;  // one or two dp ranks per replica: lane 0 and the last differ in it
    incident.fault.lane = 0;
    incident.fault.source_lane = 0;
    const TrainingStep step(incident.layout, incident.fault);
    if (!step.has_bad_gradients()) continue;
    TrainingStep both = step;
    const int other =
        incident.layout.rank_at(incident.layout.lanes() - 1, 0, incident.layout.stages() - 1);
    both.spoil(other, "output_layer.weight");
    if (incident.layout.has_tied_embeddings && incident.layout.pp == 1)
      continue;  // there is no such weight
    SCOPED_TRACE(describe(incident, seed));
    const Verdict verdict = locate_all(both);
    ASSERT_EQ(verdict.origins.size(), 2u);
    EXPECT_THAT(verdict.origins[0].candidates, Contains(*step.guilty_rank()));
    EXPECT_THAT(verdict.origins[1].candidates, ElementsAre(other));
  }
}

TEST_P(RandomIncidents, MissingRanksNeverMakeAWrongRankCertain) {
  for (unsigned seed = GetParam() * 100; seed < GetParam() * 100 + 100; ++seed) {
    const StepIncident incident = random_incident(seed);
    const TrainingStep step(incident.layout, incident.fault);
    SCOPED_TRACE(describe(incident, seed) + "; first bad " + step.first_bad());
    if (!step.has_bad_gradients()) continue;
    std::vector<Ledger> ledgers = step.ledgers();
    std::mt19937 random(seed + 1);
    std::set<int> missing;
    for (int count = 1 + static_cast<int>(random() % 3); count > 0; --count) {
      missing.insert(static_cast<int>(random() % incident.layout.world()));
    }
    for (const int rank : missing) {
      if (random() % 2 == 0) {
        std::erase_if(ledgers, [&](const Ledger& each) { return each.coordinates.rank == rank; });
      } else if (Ledger* ledger = ledger_of(ledgers, rank)) {
        ledger->is_complete = false;  // cut off after half of its sightings
        ledger->sightings.resize(ledger->sightings.size() / 2);
      }
    }
    const Verdict verdict = locate(ledgers, incident.layout.world());
    EXPECT_EQ(verdict.status, VerdictStatus::partial);
    std::set<int> named;
    for (const Origin& origin : verdict.origins) {
      named.insert(origin.candidates.begin(), origin.candidates.end());
      if (origin.place_confidence == Confidence::high && origin.coordinates) {
        EXPECT_EQ(origin.coordinates->rank, *step.guilty_rank());
      }
    }
    if (!verdict.origins.empty()) {
      EXPECT_THAT(named, Contains(*step.guilty_rank()));
    }
  }
}

TEST_P(RandomIncidents, TheVerdictDoesNotDependOnTheOrderOfTheLedgers) {
  for (unsigned seed = GetParam() * 100; seed < GetParam() * 100 + 20; ++seed) {
    const StepIncident incident = random_incident(seed);
    std::vector<Ledger> ledgers = TrainingStep(incident.layout, incident.fault).ledgers();
    const std::string expected = to_json(locate(ledgers, incident.layout.world()));
    std::mt19937 random(seed);
    std::ranges::shuffle(ledgers, random);
    EXPECT_EQ(to_json(locate(ledgers, incident.layout.world())), expected)
        << describe(incident, seed);
    std::ranges::reverse(ledgers);
    EXPECT_EQ(to_json(locate(ledgers, incident.layout.world())), expected)
        << describe(incident, seed);
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomIncidents, ::testing::Range(0u, 6u));

}  // namespace
}  // namespace nanlocator
