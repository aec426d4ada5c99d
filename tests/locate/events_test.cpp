// Verdicts that the edges between events decide: docs/adr/0009-events.md.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "locate/crossing_simulator/pass.hpp"
#include "locate/text_of_verdict.hpp"
#include "locate/training_simulator.hpp"

namespace nanlocator {
namespace {

using simulator::Layout;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::Not;

/// On one rank, in one microbatch: layer 0 fails once, layer 1 in the re-run, too.
std::vector<Ledger> ledgers_of_two_faults(const Layout& layout) {
  using pipeline::Fault;
  using pipeline::Plant;
  return pipeline::ledgers_with_repeat(
      layout,
      {Fault{.plant = Plant::operator_forward, .tp = 1},
       Fault{.plant = Plant::operator_forward, .tp = 1, .layer = 1, .is_repeated = true}},
      1);
}

TEST(Events, ABirthBehindWhatItsRankHadSentBadDoesNotExplainIt) {
  const Layout layout{.tp = 2, .pp = 1, .dp = 2};
  const Verdict verdict = locate(ledgers_of_two_faults(layout), layout.world());
  ASSERT_EQ(verdict.origins.size(), 2u) << text_of(verdict);
  EXPECT_EQ(verdict.origins[0].cause, Cause::operator_undefined);
  EXPECT_EQ(verdict.origins[1].cause, Cause::not_reproduced);
  EXPECT_THAT(verdict.origins[1].module, ::testing::HasSubstr("layers.0"));
  for (const Origin& origin : verdict.origins) EXPECT_THAT(origin.candidates, ElementsAre(1));
}

TEST(Events, ABirthOfUnknownPositionExplainsWhatItsRankSent) {
  const Layout layout{.tp = 2, .pp = 1, .dp = 2};
  std::vector<Ledger> ledgers = ledgers_of_two_faults(layout);
  for (Ledger& ledger : ledgers) {
    for (Birth& birth : ledger.births) birth.sighting.position.reset();
  }
  const Verdict verdict = locate(ledgers, layout.world());
  ASSERT_EQ(verdict.origins.size(), 1u) << text_of(verdict);
  EXPECT_EQ(verdict.origins[0].cause, Cause::operator_undefined);
}

TEST(Events, ABirthInOneReplicaDoesNotExplainTheSameParametersGradientInAnother) {
  using pipeline::Fault;
  using pipeline::Plant;
  const Layout layout{.tp = 1, .pp = 1, .dp = 2};
  const Fault gradient{.plant = Plant::gradient, .dp = 1, .is_repeated = true};
  std::vector<Ledger> ledgers = pipeline::ledgers_with_repeat(
      layout, {{.plant = Plant::operator_backward, .is_repeated = true}, gradient}, 1);
  const std::string parameter = gradient_of(layout, gradient);
  ledgers[0].births.at(0).reached = {{ReachedKind::parameter, parameter}};
  ledgers[1].births.clear();  // the trace did not see who wrote it
  const Verdict verdict = locate(ledgers, layout.world());
  ASSERT_EQ(verdict.origins.size(), 2u) << text_of(verdict);
  EXPECT_THAT(verdict.origins[0].candidates, ElementsAre(0));
  EXPECT_THAT(verdict.origins[1].candidates, ElementsAre(1));
  EXPECT_EQ(verdict.origins[1].parameter, parameter);
}

TEST(Events, SilentRanksBesideAFiniteOneReceivedNothingBadFromTheStageAbove) {
  const Layout layout{.tp = 2, .pp = 3, .dp = 1, .layers_per_stage = 1};
  const int guilty = layout.rank(0, 1, 0), receiver = layout.rank(0, 0, 0);
  const simulator::TrainingStep step(layout,
                                     {.point = simulator::Point::sent_gradient, .layer = 1});
  ASSERT_EQ(step.guilty_rank(), guilty);
  std::vector<Ledger> ledgers = step.ledgers();
  std::erase_if(ledgers, [&](const Ledger& each) {
    return each.coordinates.rank == guilty || each.coordinates.rank == receiver;
  });
  const Verdict verdict = locate(ledgers, layout.world());
  ASSERT_EQ(verdict.origins.size(), 1u) << text_of(verdict);
  EXPECT_THAT(verdict.origins[0].candidates, Contains(guilty));
  for (const int tp : {0, 1}) {
    EXPECT_THAT(verdict.origins[0].candidates, Not(Contains(layout.rank(tp, 2, 0))));
  }
}

}  // namespace
}  // namespace nanlocator
