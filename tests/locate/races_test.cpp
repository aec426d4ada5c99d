// Which accesses of memory still in use by a transfer or a thread make a fault a race, and which do
// not.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "nanlocator/locate/locate.hpp"
#include "support/fact_matchers.hpp"

namespace nanlocator {
namespace {

using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::Not;

UnorderedAccess access_of(const std::string& op) {
  return {.is_write = true,
          .transfer = "c10d::allreduce_",
          .op = op,
          .module = "body",
          .phase = Phase::backward,
          .microbatch = {},
          .parameter = "body.weight",
          .transfer_code = CodeLine{"train.py", 10, "average", "work = dist.all_reduce(...)"},
          .code = CodeLine{"train.py", 12, "average", "buffer.zero_()"}};
}

Birth birth_of(BirthKind kind, const std::string& op) {
  Birth birth;
  birth.kind = kind;
  birth.sighting.phase = Phase::backward;
  birth.sighting.module = "body";
  birth.sighting.op = op;
  birth.sighting.role = "output[0]";
  birth.sighting.dtype = "float32";
  birth.sighting.shape = {4};
  birth.sighting.stats.numel = 4;
  birth.sighting.stats.nan = 4;
  birth.sighting.stats.first_bad = 0;
  birth.replay = ReplayConclusion::deterministic_undefined;
  birth.reached = {{ReachedKind::parameter, "body.weight"}};
  return birth;
}

/// Two ranks whose gradient is bad on rank 0.
std::vector<Ledger> ledgers_of(const Rerun& rerun) {
  std::vector<Ledger> ledgers(2);
  for (int rank = 0; rank < 2; ++rank) {
    Ledger& ledger = ledgers[static_cast<std::size_t>(rank)];
    ledger.run_id = "run";
    ledger.iteration = 7;
    ledger.coordinates.rank = rank;
    ledger.coordinates.world_size = 2;
    ledger.coordinates.dp = {rank, 2};
    ledger.backward_order = {{0, "body.weight", {4}, false, false, false, 0}};
    ledger.coverage = {{Phase::grad_local, {0}}};
    ledger.rerun = rerun;
  }
  Sighting sighting;
  sighting.iteration = 7;
  sighting.phase = Phase::grad_local;
  sighting.role = "grad";
  sighting.parameter_id = 0;
  sighting.parameter = "body.weight";
  sighting.dtype = "float32";
  sighting.shape = {4};
  sighting.stats.numel = 4;
  sighting.stats.nan = 4;
  sighting.stats.first_bad = 0;
  ledgers[0].sightings.push_back(sighting);
  return ledgers;
}

Rerun bad_again(bool is_bad_serialised) {
  Rerun rerun{.reproduced = true, .gradients = 1, .bad_parameters = {}};
  rerun.variants = {{RerunVariant::serialised, is_bad_serialised}};
  if (!is_bad_serialised) rerun.variants.push_back({RerunVariant::serialised, false});
  return rerun;
}

TEST(Races, WhatIsFiniteOnceTransfersAreWaitedForWasARaceWhateverOperatorItWasBornIn) {
  auto ledgers = ledgers_of(bad_again(false));
  ledgers[0].births = {birth_of(BirthKind::nan, "aten::log")};
  ledgers[0].rerun->bad_parameters = {0};
  ledgers[0].rerun->unordered = ledgers[1].rerun->unordered = {access_of("aten::zero_")};
  const Verdict verdict = locate(ledgers, 2);
  ASSERT_EQ(verdict.origins.size(), 1u);
  const Origin& origin = verdict.origins[0];
  EXPECT_EQ(origin.cause, Cause::race);
  EXPECT_EQ(origin.cause_confidence, Confidence::high);
  EXPECT_EQ(origin.owner, Owner::model_author);
  EXPECT_EQ(origin.action, Action::wait_for_transfer);
  EXPECT_THAT(origin.candidates, ElementsAre(0));  // where it was observed
  EXPECT_EQ(origin.code->line, 12);
  EXPECT_THAT(origin.facts,
              HasFact(FactKind::wrote_during_transfer, Field(&Fact::ranks, ElementsAre(0, 1))));
}

TEST(Races, WhatIsFiniteOnceOperatorsAreWaitedForNamesTheStreamsThatDidNotWait) {
  auto ledgers = ledgers_of(bad_again(false));
  ledgers[0].births = {birth_of(BirthKind::nan, "aten::log")};
  ledgers[0].rerun->bad_parameters = {0};
  UnorderedAccess access = access_of("aten::mul");
  access.other = Concurrent::stream;
  access.transfer = "aten::copy_";
  ledgers[0].rerun->unordered = {access};
  const Origin origin = locate(ledgers, 2).origins.at(0);
  EXPECT_EQ(origin.cause, Cause::race);
  EXPECT_EQ(origin.action, Action::wait_for_stream);
  EXPECT_EQ(origin.code->line, 12);
  EXPECT_THAT(origin.facts, HasFact(FactKind::wrote_beside_stream, Field(&Fact::op, "aten::mul")));
}

UnorderedAccess access_of_thread(const std::string& op) {
  UnorderedAccess access = access_of(op);
  access.is_write = false;
  access.other = Concurrent::thread;
  access.transfer = "aten::copy_";
  access.transfer_code = CodeLine{"loader.py", 31, "fill", "batch.copy_(...)"};
  return access;
}

TEST(Races, WhatGoesWithTheOrderOfAThreadIsOneOfTheRankThatSawIt) {
  for (const bool was_bad : {true, false}) {
    auto ledgers = ledgers_of({.reproduced = was_bad, .gradients = 1});
    Rerun& rerun = *ledgers[0].rerun;
    if (was_bad) {
      ledgers[0].births = {birth_of(BirthKind::nan, "aten::log")};
      rerun.bad_parameters = {0};
    } else {
      rerun.control_reproduced = false;
    }
    rerun.variants = {{RerunVariant::reordered, was_bad},
                      {RerunVariant::reordered, !was_bad},
                      {RerunVariant::reordered, !was_bad}};
    ledgers[1].rerun->variants = rerun.variants;
    rerun.unordered = {access_of_thread("aten::add")};
    rerun.unordered[0].code->line = 40;
    const Verdict verdict = locate(ledgers, 2);
    ASSERT_EQ(verdict.origins.size(), 1u);
    const Origin& origin = verdict.origins[0];
    EXPECT_EQ(origin.cause, Cause::race);
    EXPECT_EQ(origin.cause_confidence, Confidence::high);
    EXPECT_EQ(origin.owner, Owner::model_author);
    EXPECT_EQ(origin.action, Action::wait_for_thread);
    EXPECT_EQ(origin.refutation, Refutation::bad_in_either_order);
    EXPECT_EQ(origin.code->line, 40);
    EXPECT_THAT(origin.facts, HasFact(FactKind::read_beside_thread, Field(&Fact::op, "aten::add")));
  }
}

TEST(Races, StreamsThatDoNotWaitAreLookedForBeforeADevice) {
  auto ledgers = ledgers_of({.reproduced = false, .control_reproduced = false, .gradients = 1});
  UnorderedAccess access = access_of("aten::mul");
  access.other = Concurrent::stream;
  access.transfer = "aten::copy_";
  access.parameter = "";
  ledgers[0].rerun->unordered = {access};
  ledgers[0].rerun->concurrent = {Concurrent::stream};
  const Origin origin = locate(ledgers, 2).origins.at(0);
  EXPECT_EQ(origin.cause, Cause::not_reproduced);  // no rank saw an operator use the bad memory
  EXPECT_EQ(origin.action, Action::wait_for_stream);
  EXPECT_THAT(origin.facts, HasFact(FactKind::wrote_beside_stream, Field(&Fact::op, "aten::mul")));
}

TEST(Races, ATransferThatUsedTheGradientIsSuspectedBeforeItsDeviceAndNoOther) {
  for (const std::size_t rank : {0, 1}) {
    auto ledgers = ledgers_of({.reproduced = false, .control_reproduced = false, .gradients = 1});
    ledgers[rank].rerun->concurrent = {Concurrent::transfer};
    const Origin origin = locate(ledgers, 2).origins.at(0);
    ASSERT_THAT(origin.candidates, ElementsAre(0));
    EXPECT_EQ(origin.action, rank == 0 ? Action::find_race : Action::test_device);
    EXPECT_EQ(origin.owner, rank == 0 ? Owner::unknown : Owner::cluster_operator);
  }
}

TEST(Races, OrdersThatMakeNoDifferenceAreNone) {
  auto ledgers = ledgers_of({.reproduced = true, .gradients = 1});
  ledgers[0].births = {birth_of(BirthKind::nan, "aten::log")};
  ledgers[0].rerun->bad_parameters = {0};
  ledgers[0].rerun->variants = ledgers[1].rerun->variants = {{RerunVariant::reordered, false},
                                                             {RerunVariant::reordered, true}};
  const Verdict verdict = locate(ledgers, 2);
  ASSERT_EQ(verdict.origins.size(), 1u);
  EXPECT_EQ(verdict.origins[0].cause, Cause::operator_undefined);
}

TEST(Races, WhatIsBadWithAllTransfersWaitedForIsNone) {
  auto ledgers = ledgers_of(bad_again(true));
  ledgers[0].births = {birth_of(BirthKind::nan, "aten::log")};
  ledgers[0].rerun->bad_parameters = {0};
  ledgers[0].rerun->unordered = {access_of("aten::zero_")};
  const Verdict verdict = locate(ledgers, 2);
  ASSERT_EQ(verdict.origins.size(), 1u);
  EXPECT_EQ(verdict.origins[0].cause, Cause::operator_undefined);
  EXPECT_THAT(verdict.origins[0].facts, Not(HasFact(FactKind::wrote_during_transfer)));
}

TEST(Races, WhatIsGoneIsOneWhereItsOwnMemoryWasUsedTooEarly) {
  auto ledgers = ledgers_of({.reproduced = false, .control_reproduced = false, .gradients = 1});
  ledgers[0].rerun->unordered = {access_of("aten::zero_")};
  const Verdict verdict = locate(ledgers, 2);
  ASSERT_EQ(verdict.origins.size(), 1u);
  EXPECT_EQ(verdict.origins[0].cause, Cause::race);
  EXPECT_EQ(verdict.origins[0].cause_confidence, Confidence::medium);
  EXPECT_THAT(verdict.origins[0].alternatives, ElementsAre(Suspect::memory, Suspect::kernel));
}

TEST(Races, WhatIsGoneStaysOpenWhereOtherMemoryWasUsedTooEarly) {
  auto ledgers = ledgers_of({.reproduced = false, .control_reproduced = false, .gradients = 1});
  ledgers[0].rerun->unordered = {access_of("aten::zero_")};
  ledgers[0].rerun->unordered[0].parameter = "head.weight";
  const Verdict verdict = locate(ledgers, 2);
  ASSERT_EQ(verdict.origins.size(), 1u);
  EXPECT_EQ(verdict.origins[0].cause, Cause::not_reproduced);
  EXPECT_THAT(verdict.origins[0].facts, HasFact(FactKind::wrote_during_transfer));
}

TEST(Races, TheRankThatUsedTheMemoryTooEarlyIsNamedForWhatOthersReceived) {
  auto ledgers = ledgers_of(bad_again(false));
  ledgers[0].births = {birth_of(BirthKind::collective, "c10d::allreduce_")};
  ledgers[0].rerun->bad_parameters = {0};
  ledgers[1].rerun->unordered = {access_of("aten::zero_")};
  const Verdict verdict = locate(ledgers, 2);
  ASSERT_EQ(verdict.origins.size(), 1u);
  EXPECT_EQ(verdict.origins[0].cause, Cause::race);
  EXPECT_THAT(verdict.origins[0].candidates, ElementsAre(1));
}

}  // namespace
}  // namespace nanlocator
