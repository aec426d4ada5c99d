#include "netcheck/attribution.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace nanlocator::netcheck {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

Position at(int rank, int sequence, State state, std::vector<int> group) {
  return {rank, {"collectives", "all_reduce", "", std::move(group), sequence, state, 0}, true};
}

TEST(FindHoldups, BlamesTheRankThatNeverLaunchedTheOthersStep) {
  const std::vector<int> world = {0, 1, 2};
  const auto holdups =
      find_holdups({at(0, 4, State::launched, world), at(1, 4, State::entered, world),
                    at(2, 4, State::launched, world)});
  ASSERT_EQ(holdups.size(), 1U);
  EXPECT_THAT(holdups[0].ranks, ElementsAre(1));
  EXPECT_THAT(holdups[0].waiting, ElementsAre(0, 2));
}

TEST(FindHoldups, FollowsAChainOfWaitsOverTwoGroupsToItsEnd) {
  // 0 waits for 1 in WORLD, 1 for 2 in tp[1,2], 2 has not launched an earlier step.
  const auto holdups =
      find_holdups({at(0, 9, State::launched, {0, 1, 2}), at(1, 7, State::launched, {1, 2}),
                    at(2, 5, State::entered, {})});
  ASSERT_EQ(holdups.size(), 1U);
  EXPECT_THAT(holdups[0].ranks, ElementsAre(2));
  EXPECT_THAT(holdups[0].waiting, ElementsAre(0, 1));
}

TEST(FindHoldups, BlamesTheOneThatDidNotReturnIfTheOthersContinued) {
  const std::vector<int> pair = {4, 5};
  const auto holdups =
      find_holdups({at(4, 8, State::launched, pair), at(5, 7, State::launched, pair)});
  ASSERT_EQ(holdups.size(), 1U);
  EXPECT_THAT(holdups[0].ranks, ElementsAre(5));
  EXPECT_THAT(holdups[0].waiting, ElementsAre(4));
}

TEST(FindHoldups, BlamesTheOneThatDidNotReturnFromALaunchThatTheOthersRepeat) {
  const std::vector<int> world = {0, 1, 2};
  std::vector<Position> positions;
  for (const int rank : world) {
    positions.push_back(at(rank, 7, State::launched, world));
    positions.back().place.launches = rank == 2 ? 1 : 2;
  }
  const auto holdups = find_holdups(positions);
  ASSERT_EQ(holdups.size(), 1U);
  EXPECT_THAT(holdups[0].ranks, ElementsAre(2));
  EXPECT_THAT(holdups[0].waiting, ElementsAre(0, 1));
}

TEST(FindHoldups, DoesNotChooseAmongRanksThatAllLaunchedAndNeverReturned) {
  const std::vector<int> pair = {4, 5};
  const auto holdups =
      find_holdups({at(4, 7, State::launched, pair), at(5, 7, State::launched, pair)});
  ASSERT_EQ(holdups.size(), 1U);
  EXPECT_THAT(holdups[0].ranks, ElementsAre(4, 5));
  EXPECT_THAT(holdups[0].waiting, IsEmpty());
}

TEST(FindHoldups, BlamesADeadRankForThoseThatLaunchedWithIt) {
  const std::vector<int> world = {0, 1, 2};
  auto gone = at(2, 7, State::launched, world);
  gone.is_alive = false;
  const auto holdups =
      find_holdups({at(0, 7, State::launched, world), at(1, 7, State::launched, world), gone});
  ASSERT_EQ(holdups.size(), 1U);
  EXPECT_THAT(holdups[0].ranks, ElementsAre(2));
  EXPECT_THAT(holdups[0].waiting, ElementsAre(0, 1));
}

TEST(Explain, OneRankThatAllObservationsShareIsTheFault) {
  EXPECT_THAT(explain({{0, 5}, {5, 6}, {5}}), ElementsAre(Candidates{5}));
}

TEST(Explain, RanksThatAppearTogetherAreNamedTogether) {
  EXPECT_THAT(explain({{2, 3}, {2, 3}}), ElementsAre(Candidates{2, 3}));
}

TEST(Explain, TwoFaultsAreTwoGroups) {
  EXPECT_THAT(explain({{1}, {1, 2}, {6, 7}}), ElementsAre(Candidates{1}, Candidates{6, 7}));
  EXPECT_THAT(explain({}), IsEmpty());
}

TEST(SuspectsOf, SeveralReceiversThatAllSeeItBlameTheSenders) {
  EXPECT_THAT(suspects_of({3}, {0, 1, 2, 3}, {0, 1, 2}), ElementsAre(Candidates{3}));
  EXPECT_THAT(suspects_of({1, 2}, {0, 1, 2}, {0, 1, 2}), ElementsAre(Candidates{1, 2}));
}

TEST(SuspectsOf, AReceiverAmongOthersThatGotItRightIsItsOwnSuspect) {
  EXPECT_THAT(suspects_of({3}, {0, 1, 2, 3}, {1}), ElementsAre(Candidates{1}));
}

TEST(SuspectsOf, TheOnlyReceiverCannotBeSeparatedFromItsSender) {
  EXPECT_THAT(suspects_of({3}, {1}, {1}), ElementsAre(Candidates{1, 3}));
  EXPECT_THAT(suspects_of({1}, {1}, {1}), ElementsAre(Candidates{1}));  // to itself
}

}  // namespace
}  // namespace nanlocator::netcheck
