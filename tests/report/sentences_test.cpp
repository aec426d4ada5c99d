#include "nanlocator/report/sentences.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "nanlocator/locate/locate.hpp"

namespace nanlocator {
namespace {

using testing::EndsWith;
using testing::HasSubstr;
using testing::Not;

/// Hosts of `per_host` ranks each, tp fastest.
std::vector<RankCoordinates> ranks_of(int world, int per_host, int tp = 1, int pp = 1, int ep = 1) {
  std::vector<RankCoordinates> ranks;
  for (int rank = 0; rank < world; ++rank) {
    RankCoordinates at;
    at.rank = rank;
    at.world_size = world;
    at.tp = {rank % tp, tp};
    at.pp = {rank / (world / pp), pp};
    at.ep = {rank / tp % ep, ep};
    at.host = "a" + std::to_string(17 + rank / per_host);
    at.local_rank = rank % per_host;
    ranks.push_back(at);
  }
  return ranks;
}

/// Of a job with these ranks, where one has seen something.
std::string machine_check_command(const std::vector<RankCoordinates>& ranks) {
  std::vector<Ledger> ledgers;
  for (const RankCoordinates& at : ranks) {
    Ledger& ledger = ledgers.emplace_back();
    ledger.coordinates = at;
  }
  const Verdict verdict = locate(ledgers, ranks.front().world_size);
  return nanlocator::machine_check_command(verdict.layout.value());
}

TEST(MachineCheck, OneHostNeedsTheRanksAndTheLayout) {
  EXPECT_EQ(machine_check_command(ranks_of(8, 8, 2, 2)),
            "nanlocator netcheck --nproc-per-node 8 --tp 2 --pp 2");
  EXPECT_EQ(machine_check_command(ranks_of(4, 4)), "nanlocator netcheck --nproc-per-node 4");
}

TEST(MachineCheck, SeveralHostsMeetOnTheFirst) {
  EXPECT_EQ(machine_check_command(ranks_of(32, 8, 4, 1, 8)),
            "nanlocator netcheck --nproc-per-node 8 --nnodes 4 --rdzv-backend c10d --rdzv-endpoint "
            "a17:29400 --tp 4 --ep 8");
}

TEST(MachineCheck, SilentRanksAreCountedWithTheOthersOfTheirHost) {
  auto ranks = ranks_of(16, 8);
  ranks.erase(ranks.begin(), ranks.begin() + 3);
  EXPECT_THAT(machine_check_command(ranks), HasSubstr("--nproc-per-node 8 --nnodes 2 "));
}

TEST(MachineCheck, OneRankHasNobodyToTalkTo) {
  EXPECT_EQ(machine_check_command(ranks_of(1, 1)), "");
}

/// Of a rank that has seen one birth of this kind, and nothing else.
std::string action_after(BirthKind kind) {
  Birth birth;
  birth.kind = kind;
  birth.sighting.phase = Phase::backward;
  birth.sighting.module = "body";
  birth.sighting.dtype = "float32";
  birth.sighting.shape = {2};
  birth.sighting.stats.numel = 2;
  birth.sighting.stats.nan = 1;
  birth.sighting.stats.first_bad = 1;
  birth.reached = {{ReachedKind::loss, "loss"}};
  Ledger ledger;
  ledger.coordinates = ranks_of(2, 2, 2).front();
  ledger.births = {birth};
  const auto verdict = locate({&ledger, 1}, 2);
  return verdict.origins.empty() ? "no origin" : action_of(verdict, verdict.origins.front());
}

TEST(MachineCheck, IsNamedWhereTheMachineMayBeAtFaultAndNowhereElse) {
  EXPECT_THAT(action_after(BirthKind::collective),
              EndsWith("; check the machines, on each host: nanlocator netcheck --nproc-per-node 1 "
                       "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint a17:29400 --tp 2"));
  EXPECT_THAT(action_after(BirthKind::memory), HasSubstr("nanlocator netcheck"));
  EXPECT_THAT(action_after(BirthKind::nan), Not(HasSubstr("netcheck")));
}

}  // namespace
}  // namespace nanlocator
