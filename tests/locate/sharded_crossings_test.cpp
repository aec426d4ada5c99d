// Transfers between ranks with sharded weights: gathers of weights, and gradients that are reduced
// in two stages.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "incident/simulated_job.hpp"
#include "nanlocator/locate/locate.hpp"
#include "support/fact_matchers.hpp"

namespace nanlocator {
namespace {

using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::SizeIs;

constexpr const char* kGather = "c10d::_allgather_base_";
constexpr const char* kScatter = "c10d::_reduce_scatter_base_";
constexpr const char* kReduce = "c10d::allreduce_";

struct Group {
  std::string name;
  std::vector<int> members;
};

Sighting bad(Phase phase, TensorRole role) {
  Sighting sighting;
  sighting.iteration = 7;
  sighting.phase = phase;
  sighting.role = std::move(role);
  sighting.dtype = "float32";
  sighting.shape = {8};
  sighting.stats.numel = 8;
  sighting.stats.nan = 1;
  sighting.stats.first_bad = 2;
  sighting.stats.absmax = 0.5;
  return sighting;
}

class ShardedCrossings : public ::testing::Test {
 protected:
  explicit ShardedCrossings() {
    for (int rank = 0; rank < layout_.world(); ++rank) {
      ledgers_.push_back(simulator::make_ledger(layout_, rank));
      ledgers_.back().level = "boundaries";
      ledgers_.back().is_complete = true;
      ParameterRecord parameter;
      parameter.name = "head.weight";
      parameter.shape = {32};
      ledgers_.back().backward_order.push_back(parameter);
      simulator::add_phase(ledgers_.back(), Phase::params_before, {});
    }
  }

  void crossed(const Group& group, std::int64_t count, std::int64_t first = 0) {
    for (const int rank : group.members) {
      CrossingCoverage coverage;
      coverage.group = group.name;
      coverage.members = group.members;
      coverage.role = "sent";
      coverage.first = first;
      coverage.count = count;
      ledgers_[rank].crossings.push_back(std::move(coverage));
    }
  }
  Sighting& see(int rank, Phase phase, const char* role, const char* op, const Group& group,
                std::int64_t sequence) {
    Sighting sighting = bad(phase, role);
    sighting.op = op;
    sighting.module = "layer" + std::to_string(sequence);
    sighting.crossing =
        Crossing{.group = group.name, .members = group.members, .sequence = sequence};
    sighting.crossing->carries_weights = op == std::string(kGather);
    ledgers_[rank].sightings.push_back(std::move(sighting));
    return ledgers_[rank].sightings.back();
  }
  void see_loss(int rank) { ledgers_[rank].sightings.push_back(bad(Phase::loss, "loss")); }
  void scan_gradients(Phase phase, const std::vector<int>& bad_ranks) {
    for (int rank = 0; rank < layout_.world(); ++rank) {
      simulator::BadParameters found;
      if (std::ranges::count(bad_ranks, rank) > 0) found.emplace("head.weight", 2);
      simulator::add_phase(ledgers_[rank], phase, found);
    }
  }
  [[nodiscard]] Verdict verdict() const { return locate(ledgers_, layout_.world()); }

  simulator::Layout layout_{.dp = 4};
  std::vector<Ledger> ledgers_;
  Group shard_{"dp_shard", {0, 1}}, other_shard_{"dp_shard", {2, 3}},
      replicate_{"dp_replicate", {1, 3}};
};

TEST_F(ShardedCrossings, AGatherThatIsWrongOnOneRankIsOneOriginHoweverOften) {
  crossed(shard_, 3);
  see(1, Phase::forward, "received", kGather, shard_, 0);
  see(1, Phase::backward, "received", kGather, shard_, 2);
  scan_gradients(Phase::grad_local, {1});
  const Verdict found = verdict();
  ASSERT_THAT(found.origins, SizeIs(1));
  EXPECT_EQ(found.origins[0].cause, Cause::collective_result);
  EXPECT_THAT(found.origins[0].candidates, ElementsAre(1));
  EXPECT_EQ(found.origins[0].module, "layer0");
  EXPECT_THAT(found.origins[0].facts,
              HasFact(FactKind::collective_changed, Field(&Fact::group, "dp_shard")));
  EXPECT_THAT(found.origins[0].facts,
              HasFact(FactKind::same_collective_elsewhere, Counts(1),
                      Field(&Fact::names, ElementsAre("layer2 in backward"))));
}

TEST_F(ShardedCrossings, WhatWasGatheredWronglyIsUsedInLaterMicrobatchesToo) {
  crossed(shard_, 1);
  see(1, Phase::forward, "received", kGather, shard_, 0).microbatch = 1;
  for (const int microbatch : {1, 2}) {
    see_loss(1);
    ledgers_[1].sightings.back().microbatch = microbatch;
  }
  scan_gradients(Phase::grad_local, {1});
  const Verdict found = verdict();
  ASSERT_THAT(found.origins, SizeIs(1));
  EXPECT_EQ(found.origins[0].cause, Cause::collective_result);
}

TEST_F(ShardedCrossings, AnEarlierMicrobatchesLossIsAnOriginOfItsOwn) {
  crossed(shard_, 1);
  see(1, Phase::forward, "received", kGather, shard_, 0).microbatch = 1;
  see_loss(1);
  ledgers_[1].sightings.back().microbatch = 0;
  scan_gradients(Phase::grad_local, {1});
  EXPECT_THAT(verdict().origins, SizeIs(2));
}

TEST_F(ShardedCrossings, ASumThatArrivedFiniteIsNoResultOfTheReduction) {
  crossed({"dp", {0, 1, 2, 3}}, 1);
  scan_gradients(Phase::grad_local, {});
  scan_gradients(Phase::grad_reduced, {1});
  for (const bool is_watched : {false, true}) {
    for (Ledger& ledger : ledgers_) ledger.crossings.back().watches_gradients = is_watched;
    const Verdict found = verdict();
    ASSERT_THAT(found.origins, SizeIs(1));
    const Origin& origin = found.origins[0];
    EXPECT_EQ(origin.cause, is_watched ? Cause::unknown : Cause::collective_result);
    EXPECT_EQ(has_fact(origin.facts, FactKind::not_seen_on_arrival), !is_watched);
  }
}

TEST_F(ShardedCrossings, WhatIsGatheredUnseenIsNotCalledFinite) {
  for (const bool is_watched : {false, true}) {
    ledgers_[1].backward_order[0].shard_group = {0, 1};
    crossed(shard_, 1);
    ledgers_[1].crossings.back().watches_weights = is_watched;
    if (!is_watched) see_loss(1);
    const Verdict found = verdict();
    ASSERT_THAT(found.origins, SizeIs(1));
    const auto& facts = found.origins[0].facts;
    EXPECT_EQ(has_fact(facts, FactKind::weights_gathered_unseen), !is_watched);
    EXPECT_THAT(facts, HasFact(FactKind::received_finite_before,
                               Field(&Fact::peers,
                                     is_watched ? std::vector<int>{} : std::vector<int>{0, 1})));
  }
}

TEST_F(ShardedCrossings, WhatPadsAShardIsNoOriginAndExplainsNothing) {
  crossed(shard_, 1);
  see(1, Phase::forward, "sent", kGather, shard_, 0);
  see(0, Phase::forward, "received", kGather, shard_, 0);
  see(1, Phase::forward, "received", kGather, shard_, 0);
  see_loss(0);
  scan_gradients(Phase::grad_local, {0});
  const Verdict found = verdict();
  ASSERT_THAT(found.origins, SizeIs(1));
  EXPECT_EQ(found.origins[0].phase, Phase::loss);
  EXPECT_THAT(found.origins[0].candidates, ElementsAre(0));
}

TEST_F(ShardedCrossings, WhatAWrongSumBecomesInTheNextReductionIsNoSecondOrigin) {
  crossed(shard_, 1);
  crossed(other_shard_, 1);
  crossed(replicate_, 1);
  see(1, Phase::grad_reduced, "received", kScatter, shard_, 0).module = "head";
  see(1, Phase::grad_reduced, "sent", kReduce, replicate_, 0);
  see(1, Phase::grad_reduced, "received", kReduce, replicate_, 0);
  see(3, Phase::grad_reduced, "received", kReduce, replicate_, 0);
  scan_gradients(Phase::grad_local, {});
  scan_gradients(Phase::grad_reduced, {1, 3});
  const Verdict found = verdict();
  ASSERT_THAT(found.origins, SizeIs(1));
  EXPECT_EQ(found.origins[0].cause, Cause::collective_result);
  EXPECT_THAT(found.origins[0].candidates, ElementsAre(0, 1));  // both contributed to that sum
  EXPECT_EQ(found.origins[0].parameter, "head.weight");
  EXPECT_THAT(found.origins[0].facts, HasFact(FactKind::only_owner_keeps_sum, OnRanks({1})));
}

TEST_F(ShardedCrossings, WhatAMemberPutInBeforeItsPassIsNotSaidToBeFinite) {
  crossed(shard_, 2);
  ledgers_[0].crossings.back().first = 1;  // it put its input to the first one in before its pass
  see(1, Phase::forward, "received", kReduce, shard_, 0);
  scan_gradients(Phase::grad_local, {1});
  const Verdict found = verdict();
  ASSERT_THAT(found.origins, SizeIs(1));
  EXPECT_THAT(found.origins[0].candidates, ElementsAre(0, 1));
  EXPECT_EQ(found.origins[0].cause, Cause::unknown);
}

}  // namespace
}  // namespace nanlocator
