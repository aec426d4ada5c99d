#include "nanlocator/tensor/tensor_scans.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <limits>
#include <variant>

namespace nanlocator {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST(TensorScans, GivesStatsOfHostMemoryAtOnce) {
  TensorScans scans;
  const auto finite = std::get<TensorStats>(scans.enqueue(at::tensor({-3.0f, 0.5f})));
  EXPECT_TRUE(finite.is_finite());
  EXPECT_EQ(finite.numel, 2);
  EXPECT_EQ(finite.absmin, 0.5);
  EXPECT_EQ(finite.absmax, 3.0);
  const auto bad = at::tensor({1.0f, -kInfinity, 2.0f, kInfinity}).view({2, 2}).t();
  const auto stats = std::get<TensorStats>(scans.enqueue(bad));
  EXPECT_EQ(stats.pos_inf, 1);
  EXPECT_EQ(stats.neg_inf, 1);
  EXPECT_EQ(stats.first_bad, 2);  // in the order of the transposed tensor's indices
  EXPECT_TRUE(scans.read().empty());
}

TEST(TensorScans, CountsThePartsOfComplexNumbers) {
  TensorScans scans;
  const auto stats = scans.enqueue(at::ones({3}, at::kComplexFloat));
  EXPECT_EQ(std::get<TensorStats>(stats).numel, 6);
  EXPECT_EQ(std::get<TensorStats>(stats).zeros, 3);
}

TEST(TensorScans, GivesNothingForEmptyTensors) {
  TensorScans scans;
  EXPECT_EQ(std::get<TensorStats>(scans.enqueue(at::empty({2, 0}))).numel, 0);
}

TEST(TensorScans, SkipsTensorsThatCannotBeRead) {
  TensorScans scans;
  const auto freed = at::ones({4});
  freed.storage().unsafeGetStorageImpl()->reset();
  for (const auto& tensor : {at::Tensor(), freed, at::ones({2}, at::kLong),
                             at::ones({2}, at::device(at::kMeta)), at::ones({2}).to_sparse()}) {
    EXPECT_TRUE(std::holds_alternative<std::monostate>(scans.enqueue(tensor)));
  }
}

}  // namespace
}  // namespace nanlocator
