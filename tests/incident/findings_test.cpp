#include "incident/findings.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "incident/simulated_job.hpp"

namespace nanlocator {
namespace {

using simulator::BadParameters;
using simulator::Layout;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr Phase kWeights = Phase::params_before;

/// A rank with "embedding" (tied) and "norm" (a tensor-parallel duplicate) and "linear".
Ledger rank_with(const Layout& layout, int rank, const BadParameters& bad) {
  Ledger ledger = simulator::make_ledger(layout, rank);
  ledger.backward_order = {{.id = 2, .name = "linear", .shape = {4}},
                           {.id = 1, .name = "norm", .shape = {4}, .is_tp_duplicate = true},
                           {.id = 0, .name = "embedding", .shape = {4}, .is_tied = true}};
  simulator::add_phase(ledger, kWeights, bad);
  return ledger;
}

TEST(Findings, OneKeyForTheCopiesOfAParameter) {
  const Layout layout{.tp = 2, .pp = 2};
  std::vector<Ledger> ledgers;
  for (int rank = 0; rank < 4; ++rank) {
    ledgers.push_back(rank_with(layout, rank, {{"linear", {}}, {"norm", {}}, {"embedding", {}}}));
  }
  const Findings findings(ledgers, 4);
  const BadByKey& bad = findings.bad(kWeights);
  EXPECT_THAT(bad.at({.name = "linear", .tp = 1, .pp = 0}), SizeIs(1));
  EXPECT_THAT(bad.at({.name = "norm", .tp = -1, .pp = 1}), SizeIs(2));
  EXPECT_THAT(bad.at({.name = "", .tp = 0, .pp = -1}), SizeIs(2));
  EXPECT_THAT(findings.holders_of({.name = "", .tp = 0, .pp = -1}), SizeIs(2));
  EXPECT_THAT(findings.holders_of({.name = "norm", .tp = -1, .pp = 1}), SizeIs(2));
  EXPECT_FALSE(findings.is_any_gradient_bad());
}

TEST(Findings, HoldersThatDidNotReportThePhaseAreBlind) {
  const Layout layout{.dp = 4};
  std::vector<Ledger> ledgers{rank_with(layout, 0, {{"linear", {}}}), rank_with(layout, 1, {}),
                              simulator::make_ledger(layout, 2)};
  const Findings findings(ledgers, 4);
  EXPECT_THAT(findings.blind_holders({.name = "linear", .tp = 0, .pp = 0}, kWeights),
              ElementsAre(2, 3));
  EXPECT_TRUE(findings.is_anyone_blind(findings.groups().at({0, 0}), kWeights));
}

TEST(Findings, ABadShardMakesTheWeightBadOnEveryReplicaThatGathersIt) {
  const Layout layout{.dp = 3};
  std::vector<Ledger> ledgers;
  for (int rank = 0; rank < 3; ++rank) {
    ledgers.push_back(simulator::make_ledger(layout, rank));
    ParameterRecord linear{.id = 0, .name = "linear", .shape = {4}};
    linear.shard_group = RankList({0, 1});
    ledgers.back().backward_order = {linear};
    simulator::add_phase(ledgers.back(), kWeights,
                         rank == 0 ? BadParameters{{"linear", 0}} : BadParameters{});
  }
  const Findings findings(ledgers, 3);
  EXPECT_TRUE(findings.has_bad_weights(0));
  EXPECT_TRUE(findings.has_bad_weights(1));
  EXPECT_FALSE(findings.has_bad_weights(2));
}

TEST(Findings, BackwardOrderVisitsTheLastStageFirst) {
  const Layout layout{.pp = 2};
  std::vector<Ledger> ledgers;
  for (int rank = 0; rank < 2; ++rank) {
    const std::string stage = "stage" + std::to_string(rank);
    Ledger ledger = simulator::make_ledger(layout, rank);
    ledger.backward_order = {{.id = 1, .name = stage + ".out", .shape = {4}},
                             {.id = 0, .name = stage + ".in", .shape = {4}}};
    simulator::add_phase(ledger, kWeights, {{stage + ".in", {}}, {stage + ".out", {}}});
    ledgers.push_back(std::move(ledger));
  }
  EXPECT_THAT(Findings(ledgers, 2).bad_parameters(),
              ElementsAre("stage1.out", "stage1.in", "stage0.out", "stage0.in"));
}

TEST(Findings, CrossingsThatNobodyWatchedAreNotFinite) {
  const Layout layout{.dp = 2};
  std::vector<Ledger> ledgers{rank_with(layout, 0, {}), rank_with(layout, 1, {})};
  const auto are_finite = [&] {
    const Findings findings(ledgers, 2);
    return findings.have_only_finite_crossings(findings.groups().at({0, 0}));
  };
  EXPECT_FALSE(are_finite());
  for (Ledger& ledger : ledgers) ledger.level = "boundaries";
  EXPECT_TRUE(are_finite());
  ledgers[1].is_complete = false;
  EXPECT_FALSE(are_finite());
}

}  // namespace
}  // namespace nanlocator
