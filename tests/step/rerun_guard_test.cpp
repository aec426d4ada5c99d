#include "step/rerun_guard.hpp"

#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>

#include "agree/thread_ranks.hpp"

namespace nanlocator::testing {
namespace {

constexpr milliseconds kPatience{200};
constexpr auto kKey = "incident/7.0";
constexpr int kStretch = 3;

using IsAborted = std::atomic<bool>;

/// Like a pass whose collective an abort ends.
void stand_still(milliseconds time, const IsAborted& is_aborted) {
  for (const auto end = after(time); !is_aborted && std::chrono::steady_clock::now() < end;) {
    std::this_thread::sleep_for(milliseconds(5));
  }
}

void compute(milliseconds time) {
  for (const auto end = after(time); std::chrono::steady_clock::now() < end;) {
    (void)at::ones({1});
    std::this_thread::sleep_for(milliseconds(5));
  }
}

struct Guarded {
  bool is_aborted = false;
  std::string problem;
};

/// Rank 0's pass under a guard, after rank 1's reports.
Guarded guard(const std::function<void(const IsAborted&)>& pass,
              const std::function<void(Communicator&)>& other_rank) {
  Guarded guarded;
  run_ranks(2, one_hash_store(), [&](const std::shared_ptr<Communicator>& communicator) {
    if (communicator->rank() == 1) return other_rank(*communicator);
    IsAborted is_aborted = false;
    RerunGuard rerun_guard(
        *communicator, kKey, kStretch, kPatience, [&] { is_aborted = true; },
        [](const std::string&) { FAIL() << "the training thread comes back"; });
    pass(is_aborted);
    guarded.problem = rerun_guard.problem();
    guarded.is_aborted = is_aborted;
  });
  return guarded;
}

void fail_as_rank_1(Communicator& communicator) {
  RerunGuard::report_failure(communicator, kKey, "MemoryError: planted");
}

TEST(RerunGuard, APassThatWaitsForARankWhoseRerunHasFailedIsAborted) {
  const auto guarded =
      guard([](const IsAborted& is_aborted) { stand_still(kLong, is_aborted); }, fail_as_rank_1);
  EXPECT_TRUE(guarded.is_aborted);
  EXPECT_EQ(guarded.problem, "the re-run of rank 1 has failed: MemoryError: planted");
}

TEST(RerunGuard, APassThatComputesIsNotAbortedThoughARankHasFailed) {
  const auto guarded = guard([](const IsAborted&) { compute(4 * kPatience); }, fail_as_rank_1);
  EXPECT_FALSE(guarded.is_aborted);
  EXPECT_EQ(guarded.problem, "");
}

TEST(RerunGuard, ARankThatWaitsForOneThatComputesIsNotAborted) {
  const auto guarded =
      guard([](const IsAborted& is_aborted) { stand_still(14 * kPatience, is_aborted); },
            [](Communicator&) {});
  EXPECT_FALSE(guarded.is_aborted);
}

TEST(RerunGuard, WhereNoRankComputesAnyMorePassesAreAbortedAndTheirLatestOperatorsAreKept) {
  std::string standstill;
  IsAborted is_over = false;
  const auto guarded = guard(
      [&](const IsAborted& is_aborted) {
        (void)at::ones({1});
        stand_still(kLong, is_aborted);
        is_over = true;
      },
      [&](Communicator& communicator) {
        (void)communicator.publish(std::string(kKey) + "/standstill", "c10d::allreduce_");
        RerunGuard::report_end(communicator, kKey, kStretch);
        stand_still(kLong, is_over);
        standstill = RerunGuard::standstill(communicator, kKey);
      });
  EXPECT_TRUE(guarded.is_aborted);
  EXPECT_EQ(guarded.problem, "no rank has begun an operator for 2 s");
  EXPECT_EQ(standstill,
            "In the re-run of the step no operator was begun any more; the latest were: rank 0 "
            "aten::fill_; rank 1 c10d::allreduce_.");
}

TEST(RerunGuard, APassInWhichOneRankAloneStandsStillIsAbortedThoughTheOthersHaveEndedTheirs) {
  const auto guarded = guard(
      [](const IsAborted& is_aborted) { stand_still(kLong, is_aborted); },
      [](Communicator& communicator) { RerunGuard::report_end(communicator, kKey, kStretch); });
  EXPECT_TRUE(guarded.is_aborted);
  EXPECT_EQ(guarded.problem, "no rank has begun an operator for 2 s");
}

TEST(RerunGuard, WhereARankStoodInAnEarlierPassIsForgotten) {
  const auto guarded = guard(
      [](const IsAborted& is_aborted) { stand_still(14 * kPatience, is_aborted); },
      [](Communicator& communicator) { RerunGuard::report_end(communicator, kKey, kStretch - 1); });
  EXPECT_FALSE(guarded.is_aborted);
}

}  // namespace
}  // namespace nanlocator::testing
