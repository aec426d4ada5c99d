#include "map/rank_order.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace nanlocator {
namespace {

/// tp 2, pp 2, dp 2: eight ranks.
RankCoordinates layout() {
  RankCoordinates sizes;
  sizes.world_size = 8;
  sizes.tp.size = sizes.pp.size = sizes.dp.size = 2;
  return sizes;
}

RankCoordinates rank_at(int rank, int tp, int pp, int dp) {
  RankCoordinates place = layout();
  place.rank = rank;
  place.tp.rank = tp;
  place.pp.rank = pp;
  place.dp.rank = dp;
  return place;
}

TEST(RankOrder, PlacesARankInTheOrderOfTheKnownOnes) {
  const std::vector dp_before_pp = {rank_at(2, 0, 0, 1)};
  EXPECT_EQ(RankOrder(layout(), 8, dp_before_pp).place_of(5), rank_at(5, 1, 1, 0));
  const std::vector pp_before_dp = {rank_at(2, 0, 1, 0)};
  EXPECT_EQ(RankOrder(layout(), 8, pp_before_dp).place_of(5), rank_at(5, 1, 0, 1));
}

TEST(RankOrder, PlacesOnlyWhereBothOrdersAgreeIfBothFit) {
  const RankOrder order(layout(), 8, std::vector{rank_at(0, 0, 0, 0), rank_at(7, 1, 1, 1)});
  EXPECT_EQ(order.place_of(1), rank_at(1, 1, 0, 0));
  EXPECT_EQ(order.place_of(2), std::nullopt);
}

TEST(RankOrder, PlacesNothingIfNoOrderFitsOrTheAxesDoNotMultiplyToTheWorldSize) {
  EXPECT_EQ(RankOrder(layout(), 8, std::vector{rank_at(1, 0, 1, 0)}).place_of(5), std::nullopt);
  EXPECT_EQ(RankOrder(layout(), 16, std::vector{rank_at(0, 0, 0, 0)}).place_of(1), std::nullopt);
}

TEST(RankOrder, CountsExpertParallelRanksInBlocksOfTheDataParallelOnes) {
  RankCoordinates sizes;
  sizes.dp.size = 4;
  sizes.ep.size = 2;
  RankCoordinates first = sizes;
  const RankOrder order(sizes, 4, std::vector{first});
  EXPECT_EQ(order.place_of(2)->ep.rank, 0);
  EXPECT_EQ(order.place_of(3)->ep.rank, 1);
}

}  // namespace
}  // namespace nanlocator
