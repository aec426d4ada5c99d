#include "nanlocator/agree/rank_monitor.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "agree/process_ranks.hpp"

namespace nanlocator::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

// Time in which the monitors of threads have seen each other's heartbeats.
constexpr milliseconds kSettled{1'000};
// The latest time at which a loss is reported; a quiet machine takes little more than one patience.
constexpr milliseconds kReportedBy = 8 * kQuick.patience;
// Time after which a loss would have been reported.
constexpr milliseconds kWouldBeReported = kQuick.patience + 8 * kQuick.interval;

std::string silent(int rank, const std::string& activity = "forward_backward") {
  return place_of(rank) + " has not answered since iteration 7, where it was in " + activity + "\n";
}

void wait(milliseconds time) {
  std::this_thread::sleep_for(time);
}

TEST(RankMonitor, EveryLivingRankNamesAKilledOneAndWhereItWas) {
  ProcessRanks ranks(4);
  ranks.start_all();
  ranks.wait_until_settled();
  for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(ranks.lost_on(rank), "never");
  ranks.send(2, SIGKILL);
  for (const int rank : {0, 1, 3}) ranks.expect_lost(rank, silent(2), kReportedBy);
}

TEST(RankMonitor, AHostThatTakesItsRanksWithItIsNoticedInLittleMoreThanOnePatience) {
  ProcessRanks ranks(12);
  ranks.start_all();
  ranks.wait_until_settled();
  const auto died = Clock::now();
  std::string expected;
  for (int rank = 1; rank < 10; ++rank) {
    ranks.send(rank, SIGKILL);
    expected += silent(rank);
  }
  for (const int rank : {0, 10, 11}) ranks.expect_lost(rank, expected, kReportedBy);
  // One after another they would take more than nine times the patience.
  EXPECT_LT(Clock::now() - died, 8 * kQuick.patience);
}

TEST(RankMonitor, TwoRanksThatDieApartAreBothNamed) {
  ProcessRanks ranks(4);
  ranks.start_all();
  ranks.wait_until_settled();
  ranks.send(3, SIGKILL);
  ranks.expect_lost(0, silent(3), kReportedBy);
  ranks.send(1, SIGKILL);
  for (const int rank : {0, 2}) ranks.expect_lost(rank, silent(1) + silent(3), kReportedBy);
}

TEST(RankMonitor, ARankStoppedForLessThanThePatienceIsNotLost) {
  ProcessRanks ranks(3);
  ranks.start_all();
  ranks.wait_until_settled();
  ranks.send(1, SIGSTOP);
  wait(kQuick.patience / 2);
  ranks.send(1, SIGCONT);
  wait(kWouldBeReported);
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(ranks.lost_on(rank), "never") << rank;
}

TEST(RankMonitor, ARankThatAnswersAgainIsNoLongerLost) {
  ProcessRanks ranks(3);
  ranks.start_all();
  ranks.wait_until_settled();
  ranks.send(1, SIGSTOP);
  for (const int rank : {0, 2}) ranks.expect_lost(rank, silent(1), kReportedBy);
  ranks.send(1, SIGCONT);
  for (const int rank : {0, 2}) ranks.expect_lost(rank, "", kReportedBy);
  EXPECT_EQ(ranks.lost_on(1), "never");
  ranks.send(1, SIGKILL);  // and can be lost a second time
  for (const int rank : {0, 2}) ranks.expect_lost(rank, silent(1), kReportedBy);
}

TEST(RankMonitor, RanksThatAreStoppedTogetherReportNoLossWhenTheyContinue) {
  ProcessRanks ranks(3);
  ranks.start_all();
  ranks.wait_until_settled();
  for (int rank = 0; rank < 3; ++rank) ranks.send(rank, SIGSTOP);
  wait(2 * kQuick.patience);
  for (int rank = 0; rank < 3; ++rank) {
    ranks.send(rank, SIGCONT);
    wait(kQuick.interval);  // the first has looked before the next one beats
  }
  wait(kWouldBeReported);
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(ranks.lost_on(rank), "never") << rank;
}

TEST(RankMonitor, BusyCoresCauseNoLoss) {
  ProcessRanks ranks(8);
  for (int rank = 0; rank < 8; ++rank) ranks.start(rank, Activity::forward_backward, 2);
  wait(5 * kQuick.patience);
  for (int rank = 0; rank < 8; ++rank) EXPECT_EQ(ranks.lost_on(rank), "never") << rank;
}

TEST(RankMonitor, ARankThatStartsLaterIsNotLostAndOneThatNeverStartsIs) {
  ProcessRanks ranks(3);
  ranks.start(0);
  ranks.start(1);
  wait(2 * kQuick.patience);
  ranks.start(2);
  wait(kWouldBeReported);
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(ranks.lost_on(rank), "never") << rank;

  ProcessRanks without_one(3);
  without_one.start(0);
  without_one.start(1);
  for (const int rank : {0, 1}) {
    without_one.expect_lost(rank, "rank 2 has not answered since the install\n", 3 * kReportedBy);
  }
}

TEST(RankMonitor, ARankThatSaysGoodbyeIsNotLostAndTheNextOnesAreStillWatched) {
  ProcessRanks ranks(4);
  ranks.start_all();
  ranks.wait_until_settled();
  ranks.leave(1);
  wait(kWouldBeReported);
  for (const int rank : {0, 2, 3}) EXPECT_EQ(ranks.lost_on(rank), "never") << rank;
  ranks.send(2, SIGKILL);  // rank 1 would have noticed
  for (const int rank : {0, 3}) ranks.expect_lost(rank, silent(2), kReportedBy);
}

TEST(RankMonitor, ARankThatAnExceptionEndsIsLostAtOnceWithItsText) {
  ProcessRanks ranks(3);
  ranks.start_all();
  ranks.wait_until_settled();
  ranks.end_by_value_error(1);
  for (const int rank : {0, 2}) {
    ranks.expect_lost(rank, place_of(1) + " ended by ValueError: no data (in iteration 7)\n",
                      kQuick.patience);
  }
}

TEST(RankMonitor, ARankThatEndsBecauseAnotherOneDidIsNotBlamed) {
  ProcessRanks ranks(4);
  ranks.start_all();
  ranks.wait_until_settled();
  ranks.send(2, SIGKILL);
  for (const int rank : {0, 1, 3}) ranks.expect_lost(rank, silent(2), kReportedBy);
  ranks.end_by_value_error(1);
  wait(kWouldBeReported);
  for (const int rank : {0, 3}) EXPECT_EQ(ranks.lost_on(rank), silent(2)) << rank;
}

TEST(RankMonitor, SilenceAfterTheEndOfTheRunIsExpected) {
  ProcessRanks ranks(3);
  for (int rank = 0; rank < 3; ++rank) {
    ranks.start(rank, rank == 1 ? Activity::stopped : Activity::gathering);
  }
  ranks.wait_until_settled();
  ranks.send(1, SIGKILL);
  wait(kWouldBeReported);
  for (const int rank : {0, 2}) EXPECT_EQ(ranks.lost_on(rank), "never") << rank;
  ranks.send(2, SIGKILL);
  ranks.expect_lost(0, silent(2, "gathering"), kReportedBy);
}

// --------------------------------------------------------------------------- threads of one
// process

class BreakableStore : public c10d::HashStore {
 public:
  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::intrusive_ptr<BreakableStore>::unsafe_reclaim_from_nonowning(this);
  }
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    if (is_broken) throw std::runtime_error("Connection reset by peer\nwith a stack");
    HashStore::set(key, value);
  }
  bool check(const std::vector<std::string>& keys) override {
    while (is_frozen) std::this_thread::sleep_for(milliseconds(1));
    return HashStore::check(keys);
  }
  std::atomic<bool> is_broken = false;
  std::atomic<bool> is_frozen = false;
};

std::unique_ptr<RankMonitor> monitor_on(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                        int size, RankMonitor::OnChange on_change = {}) {
  return std::make_unique<RankMonitor>(std::make_unique<StoreClient>(store), "test", rank, size,
                                       RankPlace{.text = place_of(rank)}, kQuick,
                                       std::move(on_change));
}

TEST(RankMonitor, ABrokenStoreEndsItWithAReasonAndNoLoss) {
  const auto store = c10::make_intrusive<BreakableStore>();
  std::atomic<int> changes = 0;
  const auto monitor = monitor_on(store, 0, 2, [&](const auto&) { ++changes; });
  EXPECT_EQ(monitor->problem(), "");
  store->is_broken = true;
  const auto before = Clock::now();
  EXPECT_THAT(monitor->wait_for_loss(before + 10 * kReportedBy), IsEmpty());
  EXPECT_LT(Clock::now() - before, kReportedBy);
  EXPECT_THAT(monitor->problem(), HasSubstr("(Connection reset by peer)"));
  EXPECT_EQ(changes, 0);
}

TEST(RankMonitor, ASuspendedStoreIsNotSilenceOfARank) {
  const auto store = c10::make_intrusive<BreakableStore>();
  const auto first = monitor_on(store, 0, 2);
  const auto second = monitor_on(store, 1, 2);
  wait(kSettled);
  store->is_frozen = true;
  wait(3 * kQuick.patience);
  store->is_frozen = false;
  wait(kWouldBeReported);
  EXPECT_THAT(first->lost(), IsEmpty());
  EXPECT_THAT(second->lost(), IsEmpty());
}

TEST(RankMonitor, WaitingForALossEndsWithItOrAtTheDeadline) {
  const auto store = c10::make_intrusive<BreakableStore>();
  const auto first = monitor_on(store, 0, 2);
  auto second = monitor_on(store, 1, 2);
  EXPECT_THAT(first->wait_for_loss(Clock::now() + 2 * kQuick.interval), IsEmpty());
  second->now_in(Activity::rerun, 3);
  second->leave("RuntimeError: device lost");
  const auto lost = first->wait_for_loss(Clock::now() + 10 * kReportedBy);
  ASSERT_THAT(lost, SizeIs(1));
  EXPECT_EQ(lost[0], (LostRank{1, {.text = place_of(1)}, 3, "rerun", "RuntimeError: device lost"}));
}

TEST(RankMonitor, ARankThatAnExceptionEndsWaitsUntilTheOthersHaveWrittenIt) {
  constexpr milliseconds kWriting = kQuick.interval / 2;
  const auto store = c10::make_intrusive<BreakableStore>();
  std::atomic<int> written = 0;
  const auto write = [&](const auto&) {
    wait(kWriting);
    ++written;
  };
  std::vector<std::unique_ptr<RankMonitor>> monitors;
  for (int rank = 0; rank < 3; ++rank) monitors.push_back(monitor_on(store, rank, 3, write));
  wait(kSettled);
  monitors[1]->leave("ValueError: no data");
  EXPECT_EQ(written, 2);
}

TEST(RankMonitor, AnUnreadEndWaitsForOneIntervalAndASecondAtMost) {
  const auto store = c10::make_intrusive<BreakableStore>();
  const auto alone = monitor_on(store, 0, 2);
  const auto before = Clock::now();
  alone->leave("ValueError: no data");
  EXPECT_LT(Clock::now() - before, 5 * (kQuick.interval + milliseconds(1'000)));
}

TEST(RankMonitor, WaitingForALossReadsTheNewsAtOnce) {
  const auto store = c10::make_intrusive<BreakableStore>();
  const MonitorTimes rare{milliseconds(60'000), milliseconds(600'000)};
  const auto first =
      std::make_unique<RankMonitor>(std::make_unique<StoreClient>(store), "test", 0, 2,
                                    RankPlace{.text = place_of(0)}, rare, RankMonitor::OnChange{});
  wait(kSettled);  // its first look is over, the next one a minute away
  const auto second = monitor_on(store, 1, 2);
  std::thread ending([&] { second->leave("ValueError: no data"); });
  wait(kSettled);
  EXPECT_THAT(first->wait_for_loss(Clock::now() + 2 * kReportedBy), SizeIs(1));
  ending.join();
}

TEST(RankMonitor, AnnouncesItsStopBeforeItReturns) {
  const auto store = c10::make_intrusive<BreakableStore>();
  const auto monitor = monitor_on(store, 0, 2);
  monitor->stop(12);
  const auto heartbeat = store->HashStore::get("test/beat/0");
  EXPECT_THAT(std::string(heartbeat.begin(), heartbeat.end()), HasSubstr(R"("stopped")"));
}

TEST(RankMonitor, MakesNoCallbackAfterItsEnd) {
  const auto store = c10::make_intrusive<BreakableStore>();
  const auto first = monitor_on(store, 0, 3);
  std::atomic<bool> is_over = false;
  std::atomic<bool> was_called_late = false;
  {
    const auto second = monitor_on(store, 1, 3, [&](const auto&) {
      wait(3 * kQuick.interval);
      was_called_late = was_called_late || is_over;
    });
    first->leave("ValueError: no data");
    (void)second->wait_for_loss(Clock::now() + kReportedBy);
  }
  is_over = true;
  wait(kWouldBeReported);
  EXPECT_FALSE(was_called_late);
}

TEST(MonitorTimes, FollowFromTheDeadline) {
  const auto check = [](int deadline, int interval, int patience) {
    const auto times = MonitorTimes::for_deadline(milliseconds(deadline));
    EXPECT_EQ(times.interval.count(), interval);
    EXPECT_EQ(times.patience.count(), patience);
  };
  check(30'000, 2'500, 15'000);
  check(600, 100, 1'000);
  check(600'000, 5'000, 300'000);
}

}  // namespace
}  // namespace nanlocator::testing
