#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "nanlocator/locate/locate.hpp"
#include "nanlocator/report/verdict_json.hpp"
#include "support/fact_matchers.hpp"

namespace nanlocator {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::Optional;

constexpr std::int64_t kFinding = 1284;

/// The history of the steps just before the finding.
HistorySummary history_of(const std::vector<double>& maxima) {
  HistorySummary history;
  history.parameter = "decoder.layers.2.mlp.linear_fc2.weight";
  for (std::size_t i = 0; i < maxima.size(); ++i) {
    history.iterations.push_back(kFinding - static_cast<std::int64_t>(maxima.size() - i));
    history.absmax.push_back(static_cast<float>(maxima[i]));
    history.norm.push_back(static_cast<float>(2 * maxima[i]));
  }
  return history;
}

/// A rank of a data-parallel job in which an addmm overflowed, according to the re-run.
Ledger overflowed(int rank = 0, int world = 1) {
  Ledger ledger;
  ledger.run_id = "run";
  ledger.iteration = kFinding;
  ledger.coordinates.rank = rank;
  ledger.coordinates.world_size = world;
  ledger.coordinates.dp = {rank, world};
  ledger.backward_order = {{0, "body.weight", {4}, false, false, false, 0, {}}};
  ledger.coverage = {{Phase::grad_local, {0}}};
  Sighting sighting;
  sighting.iteration = kFinding;
  sighting.phase = Phase::grad_local;
  sighting.role = "grad";
  sighting.parameter_id = 0;
  sighting.parameter = "body.weight";
  sighting.dtype = "float32";
  sighting.shape = {4};
  sighting.stats.numel = 4;
  sighting.stats.nan = 4;
  sighting.stats.first_bad = 0;
  ledger.sightings = {sighting};
  Birth birth;
  birth.kind = BirthKind::inf;
  birth.sighting = sighting;
  birth.sighting.phase = Phase::forward;
  birth.sighting.module = "body";
  birth.sighting.op = "aten::addmm";
  birth.sighting.role = "output[0]";
  birth.sighting.parameter_id.reset();
  birth.sighting.parameter.clear();
  birth.sighting.stats.nan = 0;
  birth.sighting.stats.pos_inf = 1;
  birth.reached = {{ReachedKind::loss, "loss"}};
  birth.replay = ReplayConclusion::deterministic_overflow;
  ledger.births = {birth};
  ledger.rerun = Rerun{};
  ledger.rerun->reproduced = true;
  ledger.rerun->bad_parameters = {0};
  return ledger;
}

Origin only_origin(const std::vector<Ledger>& ledgers, int world) {
  const auto verdict = locate(ledgers, world);
  EXPECT_EQ(verdict.origins.size(), 1U);
  return verdict.origins.empty() ? Origin{} : verdict.origins.front();
}

Origin origin_after(const std::vector<double>& maxima) {
  auto ledger = overflowed();
  ledger.history = history_of(maxima);
  return only_origin({ledger}, 1);
}

TEST(Divergence, AnOverflowAfterAClimbOverStepsIsDivergenceAtTheSamePlace) {
  const auto overflow = only_origin({overflowed()}, 1);
  ASSERT_EQ(overflow.cause, Cause::operator_overflow);
  const auto origin = origin_after({3.1, 2.9, 40, 3e3, 1e6, 5e8, 2.1e18});
  EXPECT_EQ(origin.cause, Cause::divergence);
  EXPECT_EQ(origin.place_confidence, overflow.place_confidence);
  EXPECT_EQ(origin.op, "aten::addmm");
  EXPECT_EQ(origin.candidates, overflow.candidates);
  EXPECT_THAT(
      origin.facts,
      HasFact(FactKind::climbed, Field(&Fact::value, Near(2.9)), Field(&Fact::step, Optional(1278)),
              Field(&Fact::last_value, Near(2.1e18)), Field(&Fact::last_step, Optional(1283)),
              Field(&Fact::parameter, "decoder.layers.2.mlp.linear_fc2.weight"), Counts(5),
              Field(&Fact::of, Optional(5))));
  EXPECT_EQ(origin.action, Action::lower_learning_rate);
  EXPECT_EQ(origin.refutation, Refutation::no_growth);
}

TEST(Divergence, ASlowClimbOfManyStepsWithSomeSetbacksIsOneToo) {
  std::vector<double> maxima;
  for (int step = 0; step < 60; ++step) {
    maxima.push_back(std::pow(1.5, step) * (step % 5 == 0 ? 0.5 : 1.0));
  }
  EXPECT_EQ(origin_after(maxima).cause, Cause::divergence);
}

TEST(Divergence, ASingleJumpIsNone) {
  for (const auto& maxima : std::vector<std::vector<double>>{
           {1, 1.1, 0.9, 1.2, 1.0, 1.1},           // from a healthy size directly to the overflow
           {1, 1.01, 1.02, 1.03, 1.04, 1e12},      // the jump is in the step before it
           {1, 1, 1, 1, 1e9, 1e9, 1e9, 1e9, 1e9},  // a jump to a lasting plateau
           {1, 1.1, 1.2, 1.4, 1.8, 2.5, 4e5},      // a little growth before a jump is no climb
       }) {
    const auto origin = origin_after(maxima);
    EXPECT_EQ(origin.cause, Cause::operator_overflow) << maxima.size();
    EXPECT_THAT(origin.facts, HasFact(FactKind::did_not_climb));
  }
}

TEST(Divergence, WhatIsHealthyIsNone) {
  for (const auto& maxima : std::vector<std::vector<double>>{
           {50, 20, 8, 5, 3, 2, 2, 1.5},                   // warm-up
           {1, 2, 1, 2, 1, 2, 1, 2, 1, 2},                 // noise
           {1, 3, 9, 27, 81, 243},                         // a climb of less than three decades
           {1, 1e3, 1e6, 1e9, 1e9, 1e7, 1e5, 1e3, 10, 1},  // ended before the finding
           {1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4},           // far from any overflow
           {1e-30, 1e-20, 1e-10, 1},                       // too few steps to tell
       }) {
    EXPECT_EQ(origin_after(maxima).cause, Cause::operator_overflow) << maxima.front();
  }
}

TEST(Divergence, AHistoryThatEndedLongBeforeTheFindingTellsNothing) {
  auto ledger = overflowed();
  ledger.history = history_of({1, 1e3, 1e6, 1e9, 1e12, 1e15});
  for (auto& iteration : ledger.history->iterations) iteration -= 20;
  const auto origin = only_origin({ledger}, 1);
  EXPECT_EQ(origin.cause, Cause::operator_overflow);
  EXPECT_FALSE(has_fact(origin.facts, FactKind::did_not_climb));
  EXPECT_FALSE(has_fact(origin.facts, FactKind::climbed));
}

TEST(Divergence, OtherCausesKeepTheirs) {
  auto ledger = overflowed();
  ledger.history = history_of({1, 1e3, 1e6, 1e9, 1e12, 1e15});
  ledger.births[0].replay = ReplayConclusion::deterministic_undefined;
  EXPECT_EQ(only_origin({ledger}, 1).cause, Cause::operator_undefined);
  ledger.births[0].replay = ReplayConclusion::deterministic_overflow;
  ledger.rerun->reproduced = false;
  ledger.rerun->bad_parameters = {};
  EXPECT_EQ(only_origin({ledger}, 1).cause, Cause::not_reproduced);
}

/// Without a re-run: a bad gradient and no other evidence.
Ledger without_birth(std::int64_t nan, std::int64_t inf) {
  auto ledger = overflowed();
  ledger.births.clear();
  ledger.rerun.reset();
  ledger.sightings[0].stats.nan = nan;
  ledger.sightings[0].stats.pos_inf = inf;
  return ledger;
}

TEST(Divergence, AnInfOfUnknownCauseAfterAClimbIsDivergenceANanOnlyNearTheLimit) {
  auto ledger = without_birth(0, 1);
  ledger.history = history_of({1, 10, 100, 1e3, 1e4, 1e5});
  EXPECT_EQ(only_origin({ledger}, 1).cause, Cause::divergence);
  ledger.sightings[0].stats.nan = 1;
  ledger.sightings[0].stats.pos_inf = 0;
  EXPECT_EQ(only_origin({ledger}, 1).cause, Cause::unknown);
  ledger.history = history_of({1, 1e3, 1e6, 1e9, 1e13, 1e17});
  EXPECT_EQ(only_origin({ledger}, 1).cause, Cause::divergence);
}

TEST(Divergence, ANormThatOverflowsAfterAClimbIsOneAndAfterAJumpIsNot) {
  Ledger ledger = without_birth(0, 0);
  ledger.sightings.clear();
  ledger.gradient_norm = std::numeric_limits<double>::infinity();
  ledger.absmax = 1e25;
  ledger.absmax_parameter = "body.weight";
  // The step's own gradients are finite: they end the history.
  ledger.history = history_of({1, 1e4, 1e8, 1e12, 1e16});
  ledger.history->iterations.push_back(kFinding);
  ledger.history->absmax.push_back(1e25F);
  ledger.history->norm.push_back(1e25F);
  auto origin = only_origin({ledger}, 1);
  EXPECT_EQ(origin.cause, Cause::divergence);
  EXPECT_EQ(origin.phase, Phase::grad_norm);
  EXPECT_EQ(origin.parameter, "body.weight");
  EXPECT_THAT(origin.facts, HasFact(FactKind::climbed, Field(&Fact::last_value, Near(1e25)),
                                    Field(&Fact::last_step, Optional(1284))));
  EXPECT_FALSE(has_fact(origin.facts, FactKind::missing_history));

  ledger.history = history_of({1, 1.1, 0.9, 1.2, 1.1});
  origin = only_origin({ledger}, 1);
  EXPECT_EQ(origin.cause, Cause::unknown);
  EXPECT_THAT(origin.facts, HasFact(FactKind::did_not_climb, Field(&Fact::value, Near(1.2))));

  ledger.history.reset();
  origin = only_origin({ledger}, 1);
  EXPECT_EQ(origin.cause, Cause::unknown);
  EXPECT_THAT(origin.facts, HasFact(FactKind::missing_history));
}

// ---- several ranks ----

auto climbed_on(std::int64_t ranks, std::int64_t histories) {
  return AllOf(Field(&Fact::climbed_on, Optional(ranks)),
               Field(&Fact::histories, Optional(histories)));
}

std::vector<Ledger> ranks_with(int world, const std::function<void(Ledger&)>& change) {
  std::vector<Ledger> ledgers;
  for (int rank = 0; rank < world; ++rank) {
    ledgers.push_back(overflowed(rank, world));
    if (rank != 1) {  // only rank 1 has overflowed
      ledgers.back().births.clear();
      ledgers.back().sightings.clear();
      ledgers.back().rerun->bad_parameters = {};
    }
    change(ledgers.back());
  }
  return ledgers;
}

const std::vector<double> kClimbing = {1, 1e2, 1e4, 1e6, 1e8, 1e10};
const std::vector<double> kLevel = {1, 1.1, 1, 1.2, 1.1, 1};

TEST(Divergence, TheCandidatesOwnHistoryDecides) {
  auto origin = only_origin(
      ranks_with(4,
                 [](Ledger& ledger) {
                   ledger.history = history_of(ledger.coordinates.rank == 1 ? kLevel : kClimbing);
                 }),
      4);
  EXPECT_THAT(origin.candidates, ElementsAre(1));
  EXPECT_EQ(origin.cause, Cause::operator_overflow);
  origin =
      only_origin(ranks_with(4, [](Ledger& ledger) { ledger.history = history_of(kClimbing); }), 4);
  EXPECT_EQ(origin.cause, Cause::divergence);
  EXPECT_THAT(origin.facts, HasFact(FactKind::climbed, climbed_on(4, 4)));
}

TEST(Divergence, WhereTheCandidateKeptNoHistoryMostOfTheOthersDecide) {
  const auto cause_with = [](int climbing) {
    return only_origin(ranks_with(6,
                                  [&](Ledger& ledger) {
                                    const int rank = ledger.coordinates.rank;
                                    if (rank == 1) return;
                                    ledger.history = history_of(
                                        rank <= climbing + (rank > 1) ? kClimbing : kLevel);
                                  }),
                       6)
        .cause;
  };
  // Ranks 0 and 2 to 5 kept a history.
  EXPECT_EQ(cause_with(5), Cause::divergence);
  EXPECT_EQ(cause_with(2), Cause::divergence);         // ranks 0, 2, 3: three of five
  EXPECT_EQ(cause_with(0), Cause::operator_overflow);  // rank 0: one of five
}

TEST(Divergence, RanksWithoutAnAnswerChangeNothingAndTheVerdictIsPartial) {
  auto ledgers = ranks_with(4, [](Ledger& ledger) { ledger.history = history_of(kClimbing); });
  std::erase_if(ledgers, [](const Ledger& ledger) { return ledger.coordinates.rank == 3; });
  const auto verdict = locate(ledgers, 4);
  ASSERT_EQ(verdict.origins.size(), 1U);
  EXPECT_EQ(verdict.origins[0].cause, Cause::divergence);
  EXPECT_EQ(verdict.status, VerdictStatus::partial);
  EXPECT_THAT(verdict.origins[0].facts, HasFact(FactKind::climbed, climbed_on(3, 3)));
}

TEST(Divergence, TheOrderOfTheRanksChangesNothing) {
  auto ledgers = ranks_with(4, [](Ledger& ledger) { ledger.history = history_of(kClimbing); });
  const auto expected = to_json(locate(ledgers, 4));
  do {
    EXPECT_EQ(to_json(locate(ledgers, 4)), expected);
  } while (std::ranges::next_permutation(ledgers, {}, [](const Ledger& ledger) {
             return ledger.coordinates.rank;
           }).found);
}

}  // namespace
}  // namespace nanlocator
