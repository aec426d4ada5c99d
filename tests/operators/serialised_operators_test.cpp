#include "nanlocator/operators/serialised_operators.hpp"

#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

namespace nanlocator {
namespace {

TEST(SerialisedOperators, WaitsBehindEachOperatorOnWhicheverThreadItRan) {
  const at::Tensor x = at::ones({3}).requires_grad_(true);
  std::atomic<int> waits = 0;
  {
    const SerialisedOperators serialised([&waits] { ++waits; });
    const at::Tensor y = x.exp();
    EXPECT_EQ(waits.exchange(0), 1);
    y.sum().backward();
    EXPECT_GE(waits.exchange(0), 3);  // sum; in backward, expand and mul
    std::thread([] { (void)at::zeros({2}).cos(); }).join();
    EXPECT_GE(waits.exchange(0), 2);
  }
  (void)x.exp();
  EXPECT_EQ(waits, 0);
}

TEST(SerialisedOperators, WaitsForNoDeviceWhereNoneIsInUse) {
  const SerialisedOperators serialised;
  EXPECT_EQ(at::ones({3}).sum().item<float>(), 3);
}

}  // namespace
}  // namespace nanlocator
