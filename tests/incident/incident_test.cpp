#include "incident/incident.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "incident/simulated_job.hpp"
#include "nanlocator/error.hpp"

namespace nanlocator {
namespace {

using simulator::add_phase;
using simulator::Layout;
using simulator::make_ledger;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

ParameterRecord parameter(std::int64_t id, const char* name) {
  return {.id = id, .name = name, .shape = {4, 4}};
}

Ledger ledger_with(const Layout& layout, int rank, std::vector<ParameterRecord> parameters) {
  Ledger ledger = make_ledger(layout, rank);
  ledger.backward_order = std::move(parameters);
  return ledger;
}

std::vector<Ledger> ledgers_of(const Layout& layout, const std::vector<int>& ranks) {
  std::vector<Ledger> ledgers;
  for (const int rank : ranks) ledgers.push_back(make_ledger(layout, rank));
  return ledgers;
}

TEST(RankEvidence, AParameterIsBadCleanOrUnknown) {
  Ledger ledger = ledger_with({}, 0, {parameter(1, "head"), parameter(0, "body")});
  add_phase(ledger, Phase::grad_local, {{"body", 5}});
  const RankEvidence rank(ledger);
  EXPECT_EQ(rank.status(Phase::grad_local, "head"), Status::clean);
  EXPECT_EQ(rank.status(Phase::grad_local, "body"), Status::bad);
  EXPECT_EQ(rank.status(Phase::grad_local, "other"), Status::unknown);
  EXPECT_EQ(rank.status(Phase::grad_reduced, "body"), Status::unknown);
  EXPECT_EQ(rank.scanned_count(Phase::grad_local), 2u);
}

TEST(RankEvidence, WhatACutOffLedgerDoesNotListIsUnknown) {
  Ledger ledger = ledger_with({}, 0, {parameter(1, "head"), parameter(0, "body")});
  add_phase(ledger, Phase::grad_local, {{"body", 5}});
  ledger.is_complete = false;
  const RankEvidence rank(ledger);
  EXPECT_EQ(rank.status(Phase::grad_local, "head"), Status::unknown);
  EXPECT_EQ(rank.status(Phase::grad_local, "body"), Status::bad);
}

TEST(RankEvidence, ABadShardIsOwnedByTheRankThatUpdatesIt) {
  Ledger ledger = ledger_with({}, 0, {parameter(0, "body")});
  ledger.backward_order.front().shard = ElementRange{0, 8};
  add_phase(ledger, Phase::params_before, {{"body", 5}});
  EXPECT_TRUE(RankEvidence(ledger).bad(Phase::params_before).front().is_owned);
  ledger.backward_order.front().shard = ElementRange{8, 16};
  EXPECT_FALSE(RankEvidence(ledger).bad(Phase::params_before).front().is_owned);
}

TEST(Incident, LedgersThatDoNotBelongTogetherAreRefused) {
  std::vector<Ledger> ledgers = ledgers_of({.dp = 2}, {0, 1});
  EXPECT_THROW((void)Incident(ledgers, 1), UsageError);
  auto twice = ledgers;
  twice.push_back(twice.front());
  EXPECT_THROW((void)Incident(twice, 2), UsageError);
  auto of_other_layout = ledgers;
  of_other_layout[1].coordinates.tp.size = 2;
  EXPECT_THROW((void)Incident(of_other_layout, 2), AgreementError);
  ledgers[1].iteration = 8;
  EXPECT_THROW((void)Incident(ledgers, 2), AgreementError);
}

TEST(Incident, ASilentRankHasThePlaceThatFollowsFromTheOthers) {
  const std::vector<Ledger> ledgers = ledgers_of({.tp = 2, .pp = 2}, {3, 0, 1});
  const Incident incident(ledgers, 4);
  EXPECT_THAT(incident.silent(), ElementsAre(2));
  EXPECT_THAT(incident.unplaced(), IsEmpty());
  ASSERT_NE(incident.place_of(2), nullptr);
  EXPECT_EQ(incident.place_of(2)->tp, 0);
  EXPECT_EQ(incident.place_of(2)->pp, 1);
  EXPECT_EQ(incident.place_of(2)->evidence, nullptr);
  EXPECT_EQ(incident.find(2), nullptr);
}

TEST(Incident, ASilentRankThatMayBeAnywhereHasNoPlace) {
  const std::vector<Ledger> ledgers = ledgers_of({.pp = 2, .dp = 2}, {0});  // dp or pp is next
  const Incident incident(ledgers, 4);
  EXPECT_THAT(incident.silent(), ElementsAre(1, 2, 3));
  EXPECT_THAT(incident.unplaced(), ElementsAre(1, 2));
  EXPECT_EQ(incident.place_of(1), nullptr);
}

TEST(Incident, RanksThatExchangeBeforeTheDataParallelCollectiveAreOneReplica) {
  const auto replicas = [](const Layout& layout) {
    std::vector<int> ranks, found;
    for (int rank = 0; rank < layout.world(); ++rank) ranks.push_back(rank);
    const std::vector<Ledger> ledgers = ledgers_of(layout, ranks);
    const Incident incident(ledgers, layout.world());
    for (const Place& place : incident.places()) found.push_back(incident.replica_of(place));
    return found;
  };
  EXPECT_THAT(replicas({.tp = 2, .dp = 2}), ElementsAre(0, 0, 1, 1));
  EXPECT_THAT(replicas({.dp = 2, .cp = 2}), ElementsAre(0, 0, 1, 1));
  EXPECT_THAT(replicas({.dp = 4, .ep = 2}), ElementsAre(0, 0, 1, 1));
  EXPECT_THAT(replicas({.dp = 2, .cp = 2, .ep = 4}), ElementsAre(0, 0, 0, 0));
}

}  // namespace
}  // namespace nanlocator
