#include "nanlocator/agree/communicator.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "agree/thread_ranks.hpp"
#include "nanlocator/error.hpp"
#include "temporary_folder.hpp"

namespace nanlocator::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

// ---------------------------------------------------- one contract, every C++ Store of Torch

struct StoreKind {
  const char* name;
  std::function<StoreOfRank(int size, const TemporaryFolder&)> make;
};

StoreOfRank tcp_stores(bool uses_libuv) {
  c10d::TCPStoreOptions server;
  server.port = 0;
  server.isServer = true;
  server.waitWorkers = false;
  server.useLibUV = uses_libuv;
  const auto host = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", server);
  return [host, server](int rank) -> c10::intrusive_ptr<c10d::Store> {
    if (rank == 0) return host;
    auto client = server;
    client.isServer = false;
    client.port = host->getPort();
    return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", client);
  };
}

const StoreKind kStores[] = {
    {"Hash", [](int, const TemporaryFolder&) { return one_hash_store(); }},
    {"Prefix",
     [](int, const TemporaryFolder&) -> StoreOfRank {
       return [store = one_hash_store()](int rank) -> c10::intrusive_ptr<c10d::Store> {
         return c10::make_intrusive<c10d::PrefixStore>("default", store(rank));
       };
     }},
    {"TcpLibuv", [](int, const TemporaryFolder&) { return tcp_stores(true); }},
    {"TcpPlain", [](int, const TemporaryFolder&) { return tcp_stores(false); }},
    {"File",
     [](int size, const TemporaryFolder& folder) -> StoreOfRank {
       return [path = (folder / "store").string(), size](int) -> c10::intrusive_ptr<c10d::Store> {
         return c10::make_intrusive<c10d::FileStore>(path, size);
       };
     }},
};

class CommunicatorOnEveryStore : public ::testing::TestWithParam<StoreKind> {
 protected:
  StoreOfRank store(int size) { return GetParam().make(size, folder_); }

 private:
  TemporaryFolder folder_;
};

TEST_P(CommunicatorOnEveryStore, EqualStatementsPassTheHandshake) {
  run_ranks(4, store(4), [](const auto& communicator) {
    communicator->handshake(R"({"version": "1", "on_bad": "stop"})", after(kLong));
    communicator->handshake(R"({"a second one": 2})", after(kLong));
  });
}

TEST_P(CommunicatorOnEveryStore, EveryRankNamesADifferenceAndItsRanks) {
  const auto errors = try_ranks(4, store(4), [](const auto& communicator) {
    const bool is_odd_one = communicator->rank() == 2;
    communicator->handshake(
        is_odd_one ? R"({"on_bad": "report", "level": 1})" : R"({"on_bad": "stop", "level": 1})",
        after(kLong));
  });
  const auto text = text_of<AgreementError>(errors[0]);
  EXPECT_THAT(text, HasSubstr(R"(on_bad is "report" on rank 2, "stop" on ranks 0-1, 3)"));
  EXPECT_THAT(text, Not(HasSubstr("level")));
  for (const auto& error : errors) EXPECT_EQ(text_of<AgreementError>(error), text);
}

TEST_P(CommunicatorOnEveryStore, ARankThatDoesNotComeIsNamedAfterTheDeadline) {
  const auto errors = try_ranks(5, store(5), [](const auto& communicator) {
    if (communicator->rank() >= 2) return;
    // Both have connected before the short deadline begins.
    ASSERT_TRUE(communicator->publish("here", ""));
    ASSERT_TRUE(communicator->fetch("here", 1 - communicator->rank(), after(kLong)));
    communicator->handshake(R"({"version": "1"})", after(kShort));
  });
  const auto text = text_of<AgreementError>(errors[0]);
  EXPECT_THAT(text, HasSubstr("no answer in time from ranks 2-4"));
  EXPECT_EQ(text_of<AgreementError>(errors[1]), text);
}

TEST_P(CommunicatorOnEveryStore, RepeatedBroadcastsGiveTheValuesOfRankZero) {
  run_ranks(3, store(3), [](const auto& communicator) {
    const bool is_first = communicator->rank() == 0;
    EXPECT_EQ(communicator->broadcast("run", is_first ? "one" : "mine", after(kLong)), "one");
    EXPECT_EQ(communicator->broadcast("run", is_first ? "two" : "mine", after(kLong)), "two");
  });
}

TEST_P(CommunicatorOnEveryStore, GatherReturnsEveryRanksValueInOrder) {
  run_ranks(4, store(4), [](const auto& communicator) {
    const auto mine = "ledger of " + std::to_string(communicator->rank());
    ASSERT_TRUE(communicator->publish("ledger", mine));
    EXPECT_THAT(communicator->gather("ledger", after(kLong)),
                ElementsAre("ledger of 0", "ledger of 1", "ledger of 2", "ledger of 3"));
  });
}

TEST_P(CommunicatorOnEveryStore, ASilentRankIsAnEmptyEntry) {
  run_ranks(3, store(3), [](const auto& communicator) {
    if (communicator->rank() == 1) return;
    ASSERT_TRUE(communicator->publish("ledger", std::to_string(communicator->rank())));
    if (communicator->rank() == 0) {
      // Waits for rank 2 first, so that only rank 1 can miss the short deadline below.
      EXPECT_EQ(communicator->fetch("ledger", 2, after(kLong)), "2");
      EXPECT_THAT(communicator->gather("ledger", after(kShort)),
                  ElementsAre("0", std::nullopt, "2"));
    }
  });
}

TEST_P(CommunicatorOnEveryStore, AValuePublishedAgainReplacesTheFirstAndCountsOnce) {
  run_ranks(2, store(2), [](const auto& communicator) {
    if (communicator->rank() == 0) {
      ASSERT_TRUE(communicator->publish("ledger", "first"));
      ASSERT_TRUE(communicator->publish("ledger", "second"));
      ASSERT_TRUE(communicator->publish("go", ""));
      EXPECT_THAT(communicator->gather("ledger", after(kLong)), ElementsAre("second", "late"));
    } else {
      ASSERT_TRUE(communicator->fetch("go", 0, after(kLong)));
      ASSERT_TRUE(communicator->publish("ledger", "late"));
    }
  });
}

TEST_P(CommunicatorOnEveryStore, ALedgerLargerThanTheLibuvServersLimitArrivesWhole) {
  std::string large(std::size_t{9} << 20, 'x');  // the server resets connections above 8 MiB
  for (std::size_t i = 0; i < large.size(); i += 997) large[i] = static_cast<char>(i);
  run_ranks(2, store(2), [&](const auto& communicator) {
    if (communicator->rank() == 1) {
      ASSERT_TRUE(communicator->publish("ledger", large));
    } else {
      const auto arrived = communicator->fetch("ledger", 1, after(kLong));
      ASSERT_TRUE(arrived.has_value());
      EXPECT_TRUE(*arrived == large);
    }
  });
}

TEST_P(CommunicatorOnEveryStore, EmptyValuesAndLineFeedsArriveUnchanged) {
  run_ranks(2, store(2), [](const auto& communicator) {
    ASSERT_TRUE(communicator->publish("v", communicator->rank() == 0 ? "" : "3\na\n\nb"));
    EXPECT_THAT(communicator->gather("v", after(kLong)), ElementsAre("", "3\na\n\nb"));
  });
}

TEST_P(CommunicatorOnEveryStore, NoRankPassesABarrierBeforeTheLastOneComes) {
  std::atomic<bool> has_last_come = false;
  run_ranks(3, store(3), [&](const auto& communicator) {
    if (communicator->rank() == 2) {
      std::this_thread::sleep_for(kShort / 2);
      has_last_come = true;
    }
    EXPECT_TRUE(communicator->pass_barrier("on_disk", {}, after(kLong)));
    EXPECT_TRUE(has_last_come);
  });
}

TEST_P(CommunicatorOnEveryStore, ABarrierDoesNotWaitForLostOrAbsentRanks) {
  run_ranks(4, store(4), [](const auto& communicator) {
    const MonitorTimes quick{milliseconds(100), milliseconds(1'000)};
    communicator->watch_ranks({.text = "rank " + std::to_string(communicator->rank())}, quick, {});
    if (communicator->rank() == 3) return communicator->monitor()->leave("ValueError: no data");
    if (communicator->rank() == 2) return;
    EXPECT_TRUE(communicator->pass_barrier("on_disk", {2}, after(kLong)));
    EXPECT_THAT(communicator->gather("on_disk", after(kShort)),
                ElementsAre("", "", std::nullopt, std::nullopt));
    EXPECT_EQ(communicator->fetch("anything", 3, after(kLong)), std::nullopt);
    EXPECT_TRUE(communicator->pass_barrier("to leave together", {2}, after(kLong)));
  });
}

TEST_P(CommunicatorOnEveryStore, ABarrierThatARankDoesNotComeToIsLeftAtTheDeadline) {
  run_ranks(3, store(3), [](const auto& communicator) {
    if (communicator->rank() == 1) return;
    EXPECT_FALSE(communicator->pass_barrier("on_disk", {}, after(kShort)));
  });
}

TEST_P(CommunicatorOnEveryStore, ABarrierWaitsAsLongAsARankIsAtWork) {
  std::atomic<bool> is_at_work = true;
  run_ranks(3, store(3), [&](const auto& communicator) {
    const auto asked = [&](int rank) { return (rank == 1 || rank == 0) && is_at_work; };
    if (communicator->rank() == 1) std::this_thread::sleep_for(3 * kShort);
    EXPECT_TRUE(communicator->pass_barrier("on_disk", {}, after(kShort), asked));
    is_at_work = false;
    if (communicator->rank() == 1) return;
    EXPECT_FALSE(communicator->pass_barrier("no rank is at work", {}, after(kShort), asked));
  });
}

INSTANTIATE_TEST_SUITE_P(Stores, CommunicatorOnEveryStore, ::testing::ValuesIn(kStores),
                         [](const auto& store) { return std::string(store.param.name); });

// --------------------------------------------------------------------------- missing ranks

TEST(Communicator, NamesARankZeroThatDoesNotComeToABroadcast) {
  const auto errors = try_ranks(2, one_hash_store(), [](const auto& communicator) {
    if (communicator->rank() == 1) (void)communicator->broadcast("run", "", after(kShort));
  });
  EXPECT_THAT(text_of<AgreementError>(errors[1]), HasSubstr("from rank 0"));
}

TEST(Communicator, RefusesAStatementThatIsNotAnObject) {
  const auto errors = try_ranks(1, one_hash_store(), [](const auto& communicator) {
    communicator->handshake("[1, 2]", after(kLong));
  });
  EXPECT_THAT(text_of<UsageError>(errors[0]), HasSubstr("[1, 2]"));
}

// A Store whose server neither answers nor closes the connection until it is released.
class FrozenStore : public c10d::HashStore {
 public:
  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::intrusive_ptr<FrozenStore>::unsafe_reclaim_from_nonowning(this);
  }
  bool check(const std::vector<std::string>&) override {
    while (!is_released) std::this_thread::sleep_for(milliseconds(1));
    return false;
  }
  std::atomic<bool> is_released = false;
};

TEST(Communicator, ReturnsAtTheDeadlineThoughTheStoreHangsInACall) {
  const auto frozen = c10::make_intrusive<FrozenStore>();
  {
    Communicator communicator(
        c10::make_intrusive<ThreadGroup>(0, 2, std::make_shared<MaxReduction>(2, kShort)), frozen,
        "test");
    EXPECT_EQ(communicator.fetch("key", 1, after(kShort)), std::nullopt);
    EXPECT_THAT(communicator.gather("key", after(kShort)), ElementsAre(std::nullopt, std::nullopt));
  }  // the destructor does not wait for it either
  frozen->is_released = true;
}

// Like a server that is busy, or that looks up names slowly.
class SlowStore : public c10d::HashStore {
 public:
  c10::intrusive_ptr<c10d::Store> clone() override {
    ++connections;
    std::this_thread::sleep_for(to_connect.load());
    return c10::intrusive_ptr<SlowStore>::unsafe_reclaim_from_nonowning(this);
  }
  void set(const std::string& key, const std::vector<std::uint8_t>& value) override {
    std::this_thread::sleep_for(to_answer.load());
    HashStore::set(key, value);
  }
  std::atomic<milliseconds> to_connect = milliseconds(0);
  std::atomic<milliseconds> to_answer = milliseconds(0);
  std::atomic<int> connections = 0;
};

class Watching : public ::testing::Test {
 protected:
  const MonitorTimes times_{milliseconds(100), milliseconds(500)};
  const c10::intrusive_ptr<SlowStore> store_ = c10::make_intrusive<SlowStore>();
  Communicator communicator_{
      c10::make_intrusive<ThreadGroup>(0, 2, std::make_shared<MaxReduction>(2, kShort)), store_,
      "test"};

  std::chrono::steady_clock::duration time_to_start() {
    const auto before = std::chrono::steady_clock::now();
    communicator_.watch_ranks({.text = "rank 0"}, times_, {});
    return std::chrono::steady_clock::now() - before;
  }
};

TEST_F(Watching, StartsWithThisRanksHeartbeatAndWaitsForNoConnection) {
  store_->to_connect = 12 * times_.patience;
  EXPECT_LT(time_to_start(), times_.patience);
  EXPECT_TRUE(store_->check({"test/monitor/beat/0"}));
  EXPECT_EQ(store_->connections, 0);
}

TEST_F(Watching, MakesItsConnectionsAfterTheInstall) {
  (void)time_to_start();
  for (const auto limit = after(kLong);
       store_->connections < 2 && after(milliseconds(0)) < limit;) {
    std::this_thread::sleep_for(milliseconds(10));
  }
  EXPECT_EQ(store_->connections, 2);
  EXPECT_TRUE(communicator_.publish("key", "value"));
}

TEST_F(Watching, StartsAfterFourPatiencesIfTheStoreDoesNotTakeTheHeartbeat) {
  store_->to_answer = 12 * times_.patience;
  EXPECT_LT(time_to_start(), 8 * times_.patience);
  EXPECT_FALSE(store_->check({"test/monitor/beat/0"}));
}

class BrokenStore : public c10d::HashStore {
 public:
  c10::intrusive_ptr<c10d::Store> clone() override { throw std::runtime_error("no clone"); }
  void set(const std::string&, const std::vector<uint8_t>&) override { fail(); }
  bool check(const std::vector<std::string>&) override { fail(); }
  int64_t add(const std::string&, int64_t) override { fail(); }

 private:
  [[noreturn]] static void fail() { throw std::runtime_error("Connection reset by peer"); }
};

TEST(Communicator, ABrokenStoreGivesNothingAndThrowsOnlyFromTheHandshake) {
  const auto errors = try_ranks(
      2, [](int) { return c10::make_intrusive<BrokenStore>(); },
      [](const auto& communicator) {
        EXPECT_FALSE(communicator->publish("key", "value"));
        EXPECT_EQ(communicator->fetch("key", 0, after(kLong)), std::nullopt);
        EXPECT_THAT(communicator->gather("key", after(kLong)),
                    ElementsAre(std::nullopt, std::nullopt));
        communicator->handshake("{}", after(kLong));
      });
  for (const auto& error : errors) {
    EXPECT_THAT(text_of<AgreementError>(error), HasSubstr("cannot reach the Store"));
  }
}

// ---------------------------------------------------------------------------------------- the flag

TEST(Communicator, OneRanksFlagIsEveryRanksFlag) {
  run_ranks(3, one_hash_store(), [](const auto& communicator) {
    for (const int bad_rank : {-1, 0, 2, -1}) {
      communicator->start_flag(flag_of(communicator->rank() == bad_rank ? 1 : 0));
      EXPECT_EQ(communicator->finish_flag(), bad_rank >= 0);
    }
  });
}

TEST(Communicator, FlagCallsOutOfOrderAreUsageErrors) {
  run_ranks(1, one_hash_store(), [](const auto& communicator) {
    EXPECT_THROW((void)communicator->finish_flag(), UsageError);
    communicator->start_flag(flag_of(0));
    EXPECT_THROW(communicator->start_flag(flag_of(0)), UsageError);
    EXPECT_FALSE(communicator->finish_flag());
  });
}

TEST(Communicator, AFlagThatAPeerDoesNotReduceIsAnErrorAndEndsReductions) {
  const auto errors = try_ranks(
      2, one_hash_store(),
      [](const auto& communicator) {
        if (communicator->rank() == 1) return;
        communicator->start_flag(flag_of(1));
        EXPECT_THROW((void)communicator->finish_flag(), AgreementError);
        communicator->start_flag(flag_of(1));
      },
      kShort);
  EXPECT_THAT(text_of<UsageError>(errors[0]), HasSubstr("an earlier flag reduction failed"));
}

TEST(Communicator, RefusesToBeMadeWithoutGroupOrStore) {
  const auto group =
      c10::make_intrusive<ThreadGroup>(0, 1, std::make_shared<MaxReduction>(1, kShort));
  EXPECT_THROW(Communicator(c10::intrusive_ptr<c10d::ProcessGroup>(), one_hash_store()(0), "test"),
               UsageError);
  EXPECT_THROW(Communicator(group, nullptr, "test"), UsageError);
  EXPECT_THAT(message_of<UsageError>([] {
                (void)Communicator::from_group_name("no such group", one_hash_store()(0), "test");
              }),
              HasSubstr("no such group"));
}

}  // namespace
}  // namespace nanlocator::testing
