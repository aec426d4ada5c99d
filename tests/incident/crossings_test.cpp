#include "incident/crossings.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "incident/simulated_job.hpp"

namespace nanlocator {
namespace {

using simulator::Layout;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

const RankList kBoth = RankList({0, 1});

/// Two tensor-parallel ranks that scanned four all-reduces of their group.
std::vector<Ledger> two_ranks() {
  const Layout layout{.tp = 2};
  std::vector<Ledger> ledgers;
  for (int rank = 0; rank < 2; ++rank) {
    Ledger ledger = simulator::make_ledger(layout, rank);
    ledger.level = "boundaries";
    ledger.crossings.push_back(
        {.group = "tp", .members = kBoth, .peer = {}, .role = "sent", .first = 0, .count = 4});
    ledgers.push_back(std::move(ledger));
  }
  return ledgers;
}

Sighting bad(Phase phase, const char* role) {
  Sighting sighting;
  sighting.phase = phase;
  sighting.role = role;
  sighting.microbatch = 0;
  sighting.stats.numel = 8;
  sighting.stats.nan = 1;
  return sighting;
}

Sighting crossed(std::int64_t sequence, const char* role, const char* op = "c10d::allreduce_") {
  Sighting sighting = bad(Phase::forward, role);
  sighting.op = op;
  sighting.crossing = Crossing{.group = "tp", .members = kBoth, .peer = {}, .sequence = sequence};
  return sighting;
}

std::vector<bool> explained(const Crossings& crossings) {
  std::vector<bool> each;
  for (const BoundaryEvent& event : crossings.events()) each.push_back(event.is_explained);
  return each;
}

TEST(Crossings, TheSameCollectiveOfAllMembersIsOneMeeting) {
  std::vector<Ledger> ledgers = two_ranks();
  ledgers[0].sightings = {crossed(1, "sent"), crossed(1, "received")};
  ledgers[1].sightings = {crossed(1, "received"), crossed(2, "sent")};
  const Incident incident(ledgers, 2);
  const Crossings crossings(incident);
  ASSERT_THAT(crossings.meetings(), SizeIs(2));
  EXPECT_THAT(crossings.meetings()[0].sent, ElementsAre(0));
  EXPECT_THAT(crossings.meetings()[0].received, ElementsAre(1, 2));
  // Rank 0 sent it, so both results are explained, and so is what rank 1 sent next.
  EXPECT_THAT(explained(crossings), ElementsAre(false, true, true, true));
}

TEST(Crossings, WhatAMemberGaveIsBadFiniteOrUnknown) {
  std::vector<Ledger> ledgers = two_ranks();
  ledgers[0].sightings = {crossed(1, "sent"), crossed(3, "sent")};
  ledgers[1].crossings.front().not_scanned = RankList({3});
  const Incident incident(ledgers, 2);
  const Crossings crossings(incident);
  const Meeting &first = crossings.meetings()[0], &second = crossings.meetings()[1];
  EXPECT_EQ(crossings.given_by(0, first), Given::bad);
  EXPECT_EQ(crossings.given_by(1, first), Given::finite);
  EXPECT_EQ(crossings.given_by(1, second), Given::unknown);
}

TEST(Crossings, ACutOffLedgerGaveNothingFinite) {
  std::vector<Ledger> ledgers = two_ranks();
  ledgers[0].sightings = {crossed(1, "sent")};
  ledgers[1].is_complete = false;
  const Incident incident(ledgers, 2);
  const Crossings crossings(incident);
  EXPECT_EQ(crossings.given_by(1, crossings.meetings().front()), Given::unknown);
  EXPECT_FALSE(Crossings::is_watching(*incident.find(1)));
}

TEST(Crossings, ALossIsExplainedByItsMicrobatchAlone) {
  std::vector<Ledger> ledgers = two_ranks();
  ledgers[0].sightings = {crossed(1, "received"), bad(Phase::loss, "loss"),
                          bad(Phase::loss, "loss")};
  ledgers[0].sightings.back().microbatch = 1;
  const Incident incident(ledgers, 2);
  EXPECT_THAT(explained(Crossings(incident)), ElementsAre(false, true, false));
}

TEST(Crossings, WhatAMemberPutIntoAGatherExplainsLaterCollectivesOfTheGroup) {
  std::vector<Ledger> ledgers = two_ranks();
  ledgers[0].sightings = {crossed(0, "sent", "c10d::_allgather_base_")};
  ledgers[1].sightings = {crossed(2, "sent", "c10d::_reduce_scatter_base_")};
  const Incident incident(ledgers, 2);
  const Crossings crossings(incident);
  EXPECT_THAT(explained(crossings), ElementsAre(false, true));
  EXPECT_TRUE(crossings.may_have_gathered(crossings.meetings().back()));
}

TEST(Crossings, WhatWasReceivedUnscannedBeforeAnEventIsUnknown) {
  std::vector<Ledger> ledgers = two_ranks();
  ledgers[0].sightings = {crossed(1, "sent"), crossed(3, "sent")};
  ledgers[0].crossings.front().not_scanned = RankList({2});
  const Incident incident(ledgers, 2);
  const Crossings crossings(incident);
  EXPECT_THAT(crossings.unseen_before(crossings.events()[0]).from, IsEmpty());
  EXPECT_THAT(crossings.unseen_before(crossings.events()[1]).from, ElementsAre(1));
  EXPECT_TRUE(crossings.has_unseen(0));
  EXPECT_FALSE(crossings.has_unseen(1));
}

}  // namespace
}  // namespace nanlocator
