#include "gradients/backward_order.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace nanlocator {
namespace {

using ::testing::ElementsAre;

void record(BackwardOrder& order, std::initializer_list<std::int64_t> parameters) {
  for (const auto parameter : parameters) order.record(parameter);
}

TEST(BackwardOrder, IsUnknownUntilOneStepHasFinishedEveryParameter) {
  BackwardOrder order(3);
  EXPECT_EQ(order.observed(), std::nullopt);
  record(order, {2, 0});
  order.end_step();
  EXPECT_EQ(order.observed(), std::nullopt);
  record(order, {1});
  order.end_step();
  EXPECT_EQ(order.observed(),
            std::nullopt);  // 1 fired in another step, so its order relative to 0 is unknown
}

TEST(BackwardOrder, IsThatOfTheLatestCompleteStep) {
  BackwardOrder order(3);
  record(order, {2, 1, 0});
  order.end_step();
  EXPECT_THAT(*order.observed(), ElementsAre(2, 1, 0));
  record(order, {1, 2, 0});
  EXPECT_THAT(*order.observed(), ElementsAre(1, 2, 0));
  order.end_step();
  record(order, {0});  // the step that failed half-way
  EXPECT_THAT(*order.observed(), ElementsAre(1, 2, 0));
}

TEST(BackwardOrder, TakesEachParametersLastMicrobatch) {
  // Two chunks {2, 3} and {0, 1}, two microbatches, interleaved as by a virtual pipeline.
  BackwardOrder order(4);
  record(order, {3, 2, 3, 2, 1, 0, 1, 0});
  order.end_step();
  EXPECT_THAT(*order.observed(), ElementsAre(3, 2, 1, 0));
}

}  // namespace
}  // namespace nanlocator
