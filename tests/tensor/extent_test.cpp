#include "tensor/extent.hpp"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace nanlocator {
namespace {

std::int64_t count_bad(const at::Tensor& values) {
  return at::isfinite(values).logical_not().sum().item<std::int64_t>();
}

TEST(Extent, OfOneRowIsABlockOfThatRow) {
  const at::Tensor values = at::ones({4, 6});
  values.select(0, 2).fill_(NAN);
  const auto extent = extent_of(values, 6);
  ASSERT_TRUE(extent);
  EXPECT_EQ(extent->dimensions, std::vector<BadExtent::Indices>({{2, 2, 1}, {0, 5, 6}}));
  EXPECT_TRUE(extent->is_block);
}

TEST(Extent, OfScatteredElementsIsNotABlock) {
  const at::Tensor values = at::ones({4, 6}).t();  // transposed strides
  values[0][0] = NAN;
  values[5][3] = -std::numeric_limits<float>::infinity();
  const auto extent = extent_of(values, 2);
  ASSERT_TRUE(extent);
  EXPECT_EQ(extent->dimensions, std::vector<BadExtent::Indices>({{0, 5, 2}, {0, 3, 2}}));
  EXPECT_FALSE(extent->is_block);
}

TEST(Extent, OfAScalarAndOfFiniteTensors) {
  const auto scalar = extent_of(at::scalar_tensor(NAN), 1);
  ASSERT_TRUE(scalar);
  EXPECT_TRUE(scalar->dimensions.empty());
  EXPECT_TRUE(scalar->is_block);
  EXPECT_FALSE(extent_of(at::ones({3}), 0));
}

TEST(Extent, ProcessesALargeTensorInSlices) {
  const at::Tensor values = at::zeros({3, 5'000'000}, at::kBFloat16);
  values[1][4'999'999] = NAN;
  values[2][17] = NAN;
  const auto extent = extent_of(values, count_bad(values));
  ASSERT_TRUE(extent);
  EXPECT_EQ(extent->dimensions, std::vector<BadExtent::Indices>({{1, 2, 2}, {17, 4'999'999, 2}}));
  EXPECT_FALSE(extent->is_block);
}

TEST(Extent, NegativesAreCountedInSlicesToo) {
  const at::Tensor values = at::ones({5'000'000});
  values[4'999'999] = -1;
  values[0] = -std::numeric_limits<float>::infinity();
  values[1] = -0.0F;
  EXPECT_EQ(count_negatives(values), 2);
  EXPECT_EQ(count_negatives(at::ones({2, 2}, at::kComplexFloat)), std::nullopt);
}

}  // namespace
}  // namespace nanlocator
