#include "nanlocator/agree/nccl_flag_reduction.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <utility>
#include <vector>

#include "agree/fake_nccl.hpp"
#include "agree/thread_ranks.hpp"
#include "nanlocator/error.hpp"
#include "temporary_folder.hpp"

extern "C" {

ncclResult_t ncclAllReduce(const void* send, void* receive, std::size_t count, ncclDataType_t type,
                           ncclRedOp_t operation, ncclComm_t communicator, cudaStream_t) {
  if (count != 1 || type != ncclInt32 || operation != ncclMax) return ncclInvalidArgument;
  const auto call =
      communicator->reduction->contribute(communicator->launched, *static_cast<const int*>(send));
  try {
    *static_cast<int*>(receive) = communicator->reduction->wait(call);
  } catch (const std::runtime_error&) {
    communicator->failure = ncclRemoteError;  // NCCL reports it when asked
  }
  return communicator->polls_until_taken > 0 ? ncclInProgress : ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t communicator, ncclResult_t* state) {
  const bool is_taken = communicator->polls_until_taken <= 0;
  if (!is_taken) --communicator->polls_until_taken;
  *state = is_taken ? communicator->failure.load() : ncclInProgress;
  return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t communicator, int* rank) {
  *rank = communicator->rank;
  return communicator->size > 0 ? ncclSuccess : ncclInvalidArgument;
}

ncclResult_t ncclCommCount(const ncclComm_t communicator, int* count) {
  *count = communicator->size;
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  return result == ncclRemoteError ? "remote process exited or there was a network error" : "bad";
}

const char* ncclGetLastError(ncclComm_t) {
  return "connection closed by 10.0.0.7";
}

ncclResult_t ncclCommAbort(ncclComm_t communicator) {
  ++communicator->ended;
  return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t communicator) {
  ++communicator->ended;
  return ncclSuccess;
}

}  // extern "C"

namespace nanlocator::testing {
namespace {

using ::testing::HasSubstr;

/// One communicator per rank, as from ncclCommInitRank.
std::vector<std::unique_ptr<ncclComm>> communicators(int size, milliseconds timeout = kLong) {
  const auto reduction = std::make_shared<MaxReduction>(size, timeout);
  std::vector<std::unique_ptr<ncclComm>> all;
  for (int rank = 0; rank < size; ++rank) {
    all.push_back(std::make_unique<ncclComm>());
    all.back()->rank = rank;
    all.back()->size = size;
    all.back()->reduction = reduction;
  }
  return all;
}

void run_threads(int size, const std::function<void(int rank)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) threads.emplace_back(body, rank);
  for (auto& thread : threads) thread.join();
}

// ---- one contract, over a process group and over NCCL ----

struct Connection {
  const char* name;
  /// One factory per rank.
  std::function<std::function<std::unique_ptr<FlagReduction>(int rank)>(int size)> make;
};

const Connection kConnections[] = {
    {"ProcessGroup",
     [](int size) {
       return [size, reduction = std::make_shared<MaxReduction>(size, kLong)](int rank) {
         return flag_reduction_over(c10::make_intrusive<ThreadGroup>(rank, size, reduction));
       };
     }},
    {"Nccl",
     [](int size) {
       std::shared_ptr all =
           std::make_shared<std::vector<std::unique_ptr<ncclComm>>>(communicators(size));
       return [all](int rank) { return flag_reduction_over_nccl(all->at(rank).get()); };
     }},
};

class FlagReductionOverEveryConnection : public ::testing::TestWithParam<Connection> {};

TEST_P(FlagReductionOverEveryConnection, TheLargestFlagIsOnAllRanksInEachRound) {
  constexpr int kRanks = 4;
  const auto connect = GetParam().make(kRanks);
  run_threads(kRanks, [&](int rank) {
    const auto reduction = connect(rank);
    EXPECT_EQ(reduction->rank(), rank);
    EXPECT_EQ(reduction->size(), kRanks);
    for (int round = 0; round < 20; ++round) {
      const auto flag = flag_of(rank == round % kRanks ? round : 0);
      reduction->start(flag);
      reduction->finish();
      reduction->check();
      EXPECT_EQ(flag.item<int>(), round);
    }
  });
}

TEST_P(FlagReductionOverEveryConnection, ACommunicatorAgreesThroughItAndAStoreOfAnyKind) {
  constexpr int kRanks = 3;
  const TemporaryFolder folder;
  const auto connect = GetParam().make(kRanks);
  run_threads(kRanks, [&](int rank) {
    Communicator communicator(
        connect(rank), c10::make_intrusive<c10d::FileStore>((folder / "store").string(), kRanks),
        "job");
    EXPECT_EQ(communicator.rank(), rank);
    communicator.handshake(R"({"version": "1"})", after(kLong));
    for (const bool is_bad : {true, false}) {
      communicator.start_flag(flag_of(is_bad && rank == 1 ? 1 : 0));
      EXPECT_EQ(communicator.finish_flag(), is_bad);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Connections, FlagReductionOverEveryConnection,
                         ::testing::ValuesIn(kConnections),
                         [](const auto& entry) { return entry.param.name; });

// ---- NCCL alone ----

TEST(NcclFlagReduction, AMissingPeerIsAnAgreementErrorWithNcclsText) {
  const auto all = communicators(2, kShort);  // the second rank never comes
  Communicator communicator(flag_reduction_over_nccl(all[0].get()),
                            c10::make_intrusive<c10d::HashStore>(), "job");
  communicator.start_flag(flag_of(0));
  try {
    (void)communicator.finish_flag();
    FAIL() << "nothing was thrown";
  } catch (const AgreementError& error) {
    EXPECT_THAT(error.what(), HasSubstr("remote process exited"));
    EXPECT_THAT(error.what(), HasSubstr("connection closed by 10.0.0.7"));
  }
  EXPECT_THROW(communicator.start_flag(flag_of(0)), UsageError);
}

TEST(NcclFlagReduction, PollingFindsAnErrorAfterTheLaunch) {
  const auto all = communicators(1);
  const auto reduction = flag_reduction_over_nccl(all[0].get());
  reduction->start(flag_of(1));
  reduction->finish();
  reduction->check();
  all[0]->failure = ncclRemoteError;
  EXPECT_THROW(reduction->check(), std::runtime_error);
}

TEST(NcclFlagReduction, WaitsUntilNcclAcceptsTheLaunch) {
  const auto all = communicators(1);
  const auto reduction = flag_reduction_over_nccl(all[0].get());
  all[0]->polls_until_taken = 3;
  const auto flag = flag_of(7);
  reduction->start(flag);
  EXPECT_EQ(all[0]->polls_until_taken, 0);
  reduction->finish();
  EXPECT_EQ(flag.item<int>(), 7);
}

TEST(NcclFlagReduction, TheCallersCommunicatorIsNeitherAbortedNorDestroyed) {
  const auto all = communicators(1);
  {
    const auto reduction = flag_reduction_over_nccl(all[0].get());
    reduction->abort();
    reduction->start(flag_of(0));
    reduction->finish();
  }
  EXPECT_EQ(all[0]->ended, 0);
}

TEST(NcclFlagReduction, RefusesAnInvalidCommunicator) {
  EXPECT_THROW((void)flag_reduction_over_nccl(nullptr), UsageError);
  ncclComm none;
  none.size = 0;
  EXPECT_THROW((void)flag_reduction_over_nccl(&none), UsageError);
}

}  // namespace
}  // namespace nanlocator::testing
