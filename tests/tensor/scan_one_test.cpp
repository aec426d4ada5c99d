#include "nanlocator/tensor/scan_one.hpp"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace nanlocator {
namespace {

TEST(ScanOne, GivesTheStatsOfFiniteAndOfBadTensors) {
  const auto finite = scan_one(at::tensor({3.0, -4.0, 0.0}));
  ASSERT_TRUE(finite);
  EXPECT_EQ(finite->numel, 3);
  EXPECT_EQ(finite->zeros, 1);
  EXPECT_EQ(finite->absmax, 4.0);
  EXPECT_EQ(finite->sum_of_squares, 25.0);
  EXPECT_NE(finite->fingerprint, scan_one(at::tensor({3.0, 4.0, 0.0}))->fingerprint);
  const auto bad = scan_one(at::tensor({3.0, -1.0 / 0.0, 0.0}));
  ASSERT_TRUE(bad);
  EXPECT_EQ(bad->numel, 3);
  EXPECT_EQ(bad->neg_inf, 1);
}

TEST(ScanOne, ReadsTheValuesOfASparseTensor) {
  const auto indices = at::tensor({1, 3}, at::kLong).unsqueeze(0);
  const auto stats = scan_one(at::sparse_coo_tensor(indices, at::tensor({2.0, -5.0}), {8}));
  ASSERT_TRUE(stats);
  EXPECT_EQ(stats->numel, 2);
  EXPECT_EQ(stats->absmax, 5.0);
}

TEST(ScanOne, GivesNothingForATensorWithoutElements) {
  const auto stats = scan_one(at::empty({0, 3}));
  ASSERT_TRUE(stats);
  EXPECT_EQ(stats->numel, 0);
}

TEST(ScanOne, GivesNothingForIntegers) {
  EXPECT_FALSE(scan_one(at::tensor({1, 2}, at::kLong)));
}

}  // namespace
}  // namespace nanlocator
