#include "nanlocator/scan/slot_scanner.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "nanlocator/error.hpp"
#include "scan/reference_scan.hpp"

namespace nanlocator {
namespace {

using testing::expect_stats;
using testing::reference_scan;
using testing::same_bits;

TensorView view_of(const std::vector<float>& values) {
  return {values.data(), static_cast<std::int64_t>(values.size()), DType::float32, {}, {}};
}

TEST(CpuSlotScanner, FillsTheSlotsOfItsPlansAndLeavesTheOthersEmpty) {
  const std::vector<float> a = {1, -2, 3}, b = {0, 5}, c = {7};
  const auto scanner = make_cpu_slot_scanner(1);
  const auto first = scanner->plan({view_of(a), view_of(b)}, 0);
  const auto later = scanner->plan({view_of(c)}, 4);
  scanner->enqueue(*first, {});
  scanner->enqueue(*later, {});
  scanner->enqueue_readback({});
  EXPECT_TRUE(scanner->is_ready());
  const auto slots = scanner->wait();
  ASSERT_EQ(slots.size(), 5u);
  expect_stats(slots[0], reference_scan(view_of(a)), DType::float32);
  expect_stats(slots[1], reference_scan(view_of(b)), DType::float32);
  EXPECT_TRUE(same_bits(slots[2], TensorStats{}));
  EXPECT_TRUE(same_bits(slots[3], TensorStats{}));
  expect_stats(slots[4], reference_scan(view_of(c)), DType::float32);
}

TEST(CpuSlotScanner, ReadsBackSomeSlotsAndLeavesTheOthersAsTheyWereReadBefore) {
  std::vector<float> a = {1}, b = {2}, c = {3};
  const auto scanner = make_cpu_slot_scanner(1);
  const auto plan = scanner->plan({view_of(a), view_of(b), view_of(c)}, 0);
  scanner->enqueue(*plan, {});
  scanner->enqueue_readback({});
  a[0] = b[0] = c[0] = 7;
  scanner->enqueue(*plan, {});
  scanner->enqueue_readback(1, 1, {});
  ASSERT_EQ(scanner->wait(1, 1).size(), 1u);
  EXPECT_EQ(scanner->wait(1, 1)[0].absmax, 7);
  EXPECT_EQ(scanner->wait()[0].absmax, 1);
  EXPECT_EQ(scanner->wait(2, 1)[0].absmax, 3);
  EXPECT_THROW(scanner->enqueue_readback(2, 2, {}), UsageError);
  EXPECT_THROW((void)scanner->wait(3, 1), UsageError);
}

TEST(CpuSlotScanner, OverwritesASlotWhenItsPlanRunsAgain) {
  std::vector<float> values = {1, NAN, 3};
  const auto scanner = make_cpu_slot_scanner(1);
  const auto plan = scanner->plan({view_of(values)}, 0);
  scanner->enqueue(*plan, {});
  scanner->enqueue_readback({});
  EXPECT_EQ(scanner->wait()[0].first_bad, 1);
  values[1] = 2;
  scanner->enqueue(*plan, {});
  EXPECT_EQ(scanner->wait()[0].first_bad, 1) << "the slots as of the last readback";
  scanner->enqueue_readback({});
  EXPECT_EQ(scanner->wait()[0].first_bad, -1);
  EXPECT_EQ(scanner->wait()[0].nan, 0);
}

TEST(CpuSlotScanner, RaisesTheFlagAtABadValueAndKeepsItUntilItIsCleared) {
  const std::vector<float> good = {1, 2};
  const std::vector<float> with_nan = {1, NAN};
  const std::vector<float> with_inf = {-std::numeric_limits<float>::infinity()};
  const auto scanner = make_cpu_slot_scanner(2);
  const auto good_plan = scanner->plan({view_of(good)}, 0);
  const auto nan_plan = scanner->plan({view_of(good), view_of(with_nan)}, 1);
  const auto inf_plan = scanner->plan({view_of(with_inf)}, 3);
  std::int32_t* const flag = scanner->bad_flag();
  EXPECT_EQ(*flag, 0);
  scanner->enqueue(*good_plan, {});
  EXPECT_EQ(*flag, 0);
  scanner->enqueue(*nan_plan, {});
  EXPECT_EQ(*flag, 1);
  scanner->enqueue(*good_plan, {});
  EXPECT_EQ(*flag, 1) << "a later good scan does not lower it";
  scanner->enqueue_clear_flag({});
  EXPECT_EQ(*flag, 0);
  scanner->enqueue(*inf_plan, {});
  EXPECT_EQ(*flag, 1);
  EXPECT_EQ(scanner->bad_flag(), flag) << "the address stays";
}

TEST(CpuSlotScanner, RefusesViewsThreadCountsAndPlansThatItCannotUse) {
  EXPECT_THROW((void)make_cpu_slot_scanner(0), UsageError);
  const auto scanner = make_cpu_slot_scanner(1);
  const std::vector<float> values = {1, 2};
  TensorView broken = view_of(values);
  broken.sizes = {3};
  broken.strides = {1};
  EXPECT_THROW((void)scanner->plan({broken}, 0), UsageError);
  broken.dtype = static_cast<DType>(99);
  EXPECT_THROW((void)scanner->plan({broken}, 0), UnsupportedError);
  const auto other = make_cpu_slot_scanner(1);
  const auto foreign = other->plan({view_of(values)}, 10);
  EXPECT_THROW(scanner->enqueue(*foreign, {}), UsageError);
}

TEST(CpuSlotScanner, ScansOneTensorWithoutAPlanIntoAReservedSlot) {
  const std::vector<float> good = {1, -2, 0}, bad = {1, NAN, 3, NAN};
  const auto scanner = make_cpu_slot_scanner(1);
  scanner->reserve(3);
  scanner->reserve(2);  // keeps what is there
  scanner->enqueue_one(view_of(good), 2, {});
  EXPECT_EQ(*scanner->bad_flag(), 0);
  scanner->enqueue_one(view_of(bad), 0, {});
  EXPECT_EQ(*scanner->bad_flag(), 1);
  scanner->enqueue_readback({});
  const auto slots = scanner->wait();
  ASSERT_EQ(slots.size(), 3u);
  expect_stats(slots[0], reference_scan(view_of(bad)), DType::float32);
  EXPECT_TRUE(same_bits(slots[1], TensorStats{}));
  expect_stats(slots[2], reference_scan(view_of(good)), DType::float32);
  EXPECT_THROW(scanner->enqueue_one(view_of(good), 3, {}), UsageError);
}

TEST(ScanPlan, MatchesTheSameTensorsOnly) {
  const std::vector<float> a = {1, 2, 3, 4}, b = {1, 2, 3, 4};
  const auto scanner = make_cpu_slot_scanner(1);
  const auto plan = scanner->plan({view_of(a), view_of(b)}, 0);
  std::vector<TensorView> now = {view_of(a), view_of(b)};
  EXPECT_TRUE(plan->matches(now));
  now[1] = view_of(a);
  EXPECT_FALSE(plan->matches(now)) << "another address";
  now[1] = view_of(b);
  now[1].numel = 3;
  EXPECT_FALSE(plan->matches(now)) << "another size";
  now[1] = view_of(b);
  now[1].dtype = DType::float64;
  EXPECT_FALSE(plan->matches(now)) << "another dtype";
  now[1] = view_of(b);
  now.pop_back();
  EXPECT_FALSE(plan->matches(now)) << "fewer tensors";
}

}  // namespace
}  // namespace nanlocator
