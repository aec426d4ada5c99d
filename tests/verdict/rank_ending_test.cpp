#include "nanlocator/verdict/rank_ending.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <utility>

namespace nanlocator {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

/// As torchrun has them in one file: a rank's traceback, peers' consequences, the list at the end.
constexpr std::string_view kLog = R"(step 27 loss 2.31
[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 40, in <module>
[rank1]:     x = batch["tokens"]
[rank1]:         ~~~~~^^^^^^^^^^
[rank1]: KeyError: 'tokens'
[rank3]:[E1129 09:23:11.1 ProcessGroupGloo.cpp:145] Rank 3 failed to pass monitoredBarrier
[default2]:[rank2]: RuntimeError: [../gloo/pair.cc:534] Connection closed by peer [10.0.0.1]:3461
E1129 09:23:14.1 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: -9) local_rank: 0
Root Cause (first observed failure):
[0]:
  time      : 2026-11-29_09:23:11
  host      : gpu-a17
  rank      : 10 (local_rank: 2)
  exitcode  : -9 (pid: 4711)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 4711
[1]:
  rank      : 3 (local_rank: 3)
  exitcode  : -15 (pid: 4712)
)";

TEST(RankEnding, IsTheLastWordOfItsOwnTracebackOrItsExitCode) {
  EXPECT_THAT(
      endings_in(kLog, std::array{1, 2, 3, 4, 10}),
      ElementsAre(RankEnding{1, EndingKind::code, "KeyError: 'tokens'"},
                  RankEnding{2, EndingKind::of_peers,
                             "RuntimeError: [../gloo/pair.cc:534] Connection closed by peer "
                             "[10.0.0.1]:3461"},
                  RankEnding{3, EndingKind::of_peers, "exit code -15"},
                  RankEnding{10, EndingKind::killed, "exit code -9"}));
}

/// [rank1] is no prefix of [rank10], and an error that the program has printed is none of a rank.
TEST(RankEnding, OfOthersAndOfTheProgramsOwnWordsNothingIsTaken) {
  EXPECT_THAT(endings_in("[rank10]: ValueError: x\n", std::array{1}), IsEmpty());
  EXPECT_THAT(endings_in("[rank1]: warning: ValueError ahead\n", std::array{1}), IsEmpty());
  EXPECT_THAT(endings_in("retrying after TimeoutError: slow disk\n", std::array{1}), IsEmpty());
  EXPECT_THAT(endings_in("rank : 1\nexitcode : x\n[rank", std::array{1}), IsEmpty());
  EXPECT_THAT(endings_in("", std::array{1}), IsEmpty());
}

TEST(RankEnding, WhatSlurmSaysOfTheJobCountsForRanksWithoutAReasonOfTheirOwn) {
  const std::string log = std::string(kLog) +
                          "slurmstepd: error: *** JOB 88 ON a17 CANCELLED AT 2026-11-29T09:24 DUE "
                          "TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***\n";
  const auto endings = endings_in(log, std::array{1, 3, 4});
  ASSERT_EQ(endings.size(), 3);
  EXPECT_EQ(endings[0].kind, EndingKind::code);
  EXPECT_EQ(endings[1].kind, EndingKind::machine);
  EXPECT_EQ(endings[2].kind, EndingKind::machine);
}

TEST(RankEnding, ItsKindFollowsTheWordsOfItsLibraries) {
  for (const auto& [words, kind] : std::to_array<std::pair<std::string_view, EndingKind>>({
           {"torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered",
            EndingKind::machine},
           {"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
            EndingKind::killed},
           {"RuntimeError: DataLoader worker (pid 77) is killed by signal: Killed.",
            EndingKind::killed},
           {"OUT_OF_MEMORY", EndingKind::killed},
           {"torch.distributed.DistBackendError: NCCL error: unhandled system error",
            EndingKind::of_peers},
           {"AttributeError: 'NCCLConfig' has no attribute 'x'", EndingKind::code},
           // May be the code's or the device's.
           {"torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
            EndingKind::other},
           {"FAILED", EndingKind::other},
           // May follow from a NaN.
           {"AssertionError", EndingKind::other},
           {"ValueError: cannot convert float NaN to integer", EndingKind::other},
           {"", EndingKind::other},
       })) {
    EXPECT_EQ(ending_kind_of(words), kind) << words;
  }
}

TEST(RankEnding, HostileLinesAreCutAndEscaped) {
  const auto endings =
      endings_in("[rank1]: ValueError: \x1b[31m" + std::string(5000, 'x') + "\n", std::array{1});
  ASSERT_EQ(endings.size(), 1);
  EXPECT_LT(endings[0].text.size(), 300);
  EXPECT_EQ(endings[0].text.find('\x1b'), std::string::npos);
}

}  // namespace
}  // namespace nanlocator
