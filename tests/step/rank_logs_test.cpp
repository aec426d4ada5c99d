#include "step/rank_logs.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <optional>
#include <string>

#include "nanlocator/verdict/decision.hpp"
#include "temporary_folder.hpp"

namespace nanlocator {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

TEST(RankLogs, WhatALogSaysAfterTheVerdictDecidesLater) {
  const testing::TemporaryFolder folder;
  const std::string earlier = "[rank1]: ValueError: of an earlier attempt\n";
  folder.plant("job.err", earlier);
  Verdict verdict;
  verdict.status = VerdictStatus::located;
  verdict.iteration = 27;
  verdict.job.on_bad = "stop";
  verdict.origins.resize(1);
  verdict.silent_ranks = {1};
  verdict.launch = Launch{.log = (folder.path() / "job.err").string(),
                          .log_begin = static_cast<std::int64_t>(earlier.size())};
  verdict.decision = decide(verdict);
  EXPECT_FALSE(add_later_endings(verdict, folder.path(), ""));
  EXPECT_TRUE(verdict.decision.is_traced);

  EXPECT_TRUE(add_later_endings(verdict, folder.path(), "NODE_FAIL"));
  EXPECT_EQ(verdict.decision.kind, DecisionKind::exclude);

  verdict.launch->endings.clear();
  folder.plant("job.err", earlier + "[rank1]: NameError: name 'x' is not defined\n");
  EXPECT_TRUE(add_later_endings(verdict, folder.path(), "FAILED"));
  EXPECT_EQ(verdict.decision.kind, DecisionKind::do_not_restart);
  EXPECT_FALSE(add_later_endings(verdict, folder.path(), "FAILED"));  // nothing new
  folder.plant("rank1.err", "[0]:\n  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 7)\n");
  verdict.launch->logs = {{.rank = 1, .log = (folder.path() / "rank1.err").string()}};
  verdict.launch->log = (folder.path() / "gone").string();
  EXPECT_THAT(read_endings(*verdict.launch, verdict.silent_ranks),
              ElementsAre(RankEnding{1, EndingKind::killed, "exit code -9"}));
  verdict.launch->logs.push_back({.rank = 2, .log = (folder.path() / "rank1.err").string()});
  EXPECT_THAT(read_endings(*verdict.launch, std::array{1, 2}), SizeIs(1));  // of rank 2 no word
  verdict.launch->logs.clear();
  EXPECT_THAT(read_endings(*verdict.launch, verdict.silent_ranks), IsEmpty());
}

}  // namespace
}  // namespace nanlocator
