#include "nanlocator/record/sighting.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace nanlocator {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(Phase, NamesAreReadBackAndOthersAreNot) {
  for (const Phase phase :
       {Phase::params_before, Phase::forward, Phase::loss, Phase::backward, Phase::grad_local,
        Phase::grad_reduced, Phase::grad_norm, Phase::params_after}) {
    EXPECT_EQ(value_named<Phase>(name_of(phase)), phase);
  }
  EXPECT_EQ(name_of(Phase::grad_local), "grad_local");
  EXPECT_FALSE(value_named<Phase>("grad"));
  EXPECT_FALSE(value_named<Phase>(""));
}

TEST(UnravelIndex, CountsRowMajor) {
  EXPECT_THAT(unravel_index(0, {2, 3, 4}), ElementsAre(0, 0, 0));
  EXPECT_THAT(unravel_index(1 * 12 + 2 * 4 + 3, {2, 3, 4}), ElementsAre(1, 2, 3));
  EXPECT_THAT(unravel_index(6, {7}), ElementsAre(6));
}

TEST(UnravelIndex, OfAScalarIsEmptyAndOfAnEmptyTensorDoesNotDivideByZero) {
  EXPECT_THAT(unravel_index(0, {}), IsEmpty());
  EXPECT_THAT(unravel_index(0, {3, 0}), ElementsAre(0, 0));
}

}  // namespace
}  // namespace nanlocator
