#include "step/launch.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "temporary_folder.hpp"

namespace nanlocator {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::vector<std::string> names_of(const std::vector<CheckpointFile>& files) {
  std::vector<std::string> names;
  for (const CheckpointFile& each : files) names.push_back(each.name);
  return names;
}

TEST(Launch, CheckpointsAreKnownByTheStepInTheirNames) {
  const testing::TemporaryFolder folder;
  for (const char* const name :
       {"iter_0000900", "checkpoint-1000", "global_step1100", "epoch=1-step=800.ckpt"}) {
    folder.plant(name, "");
  }
  // Numbers of epochs, of fairseq and timm.
  for (const char* const name : {"checkpoint7.pt", "checkpoint_8.pt", "checkpoint-9.pth.tar"}) {
    folder.plant(name, "");
  }
  EXPECT_THAT(
      names_of(checkpoints_in(folder.path())),
      ElementsAre("global_step1100", "checkpoint-1000", "iter_0000900", "epoch=1-step=800.ckpt"));
}

TEST(Launch, AResumedRunThatCountsFromOneIsBehindTheNamesOfItsCheckpoints) {
  const std::vector<CheckpointFile> found = {{830, "step_830"}, {800, "step_800"}};
  EXPECT_EQ(steps_before(found, "step_800", 1, 35), 800);
  EXPECT_EQ(steps_before(found, "step_800", 801, 835), 0);  // Megatron counts on
  EXPECT_EQ(steps_before(found, "", 1, 35), std::nullopt);
  EXPECT_EQ(steps_before(found, "", 1, 900), 0);
  EXPECT_EQ(steps_before({}, "", 1, 35), 0);
}

TEST(Launch, WhatALogSaysAfterTheVerdictDecidesLater) {
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
  verdict.launch->logs.clear();
  EXPECT_THAT(read_endings(*verdict.launch, verdict.silent_ranks), IsEmpty());
}

TEST(Launch, TheLoadedCheckpointIsReadFirstAndThenTheNewestUntilOneIsFinite) {
  std::vector<std::string> read;
  LocatorOptions options;
  options.read_checkpoint = [&](const std::filesystem::path& path, std::chrono::milliseconds,
                                CheckpointFile& file) {
    read.push_back(path.filename().string());
    file.is_finite = file.step != 800 && file.step != 830;
  };
  Verdict verdict;
  verdict.iteration = 35;
  verdict.job.on_bad = "stop";
  verdict.decision = {.kind = DecisionKind::older_checkpoint, .is_to_check = true};
  verdict.launch = Launch{
      .checkpoint_dir = "/ckpt",
      .checkpoints = {{830, "step_830"}, {820, "step_820"}, {800, "step_800"}, {790, "step_790"}},
      .steps_before = 800,
      .loaded = "step_800"};
  verdict.status = VerdictStatus::located;
  EXPECT_TRUE(read_checkpoints(verdict, options, std::chrono::seconds(5)));
  EXPECT_THAT(read, ElementsAre("step_800", "step_830", "step_820"));
  EXPECT_EQ(verdict.launch->checkpoints[3].is_finite, std::nullopt);

  read.clear();
  verdict.job.are_weights_finite = true;  // nothing bad can be in any
  verdict.decision = {.kind = DecisionKind::restart_as_is, .newest_step = 34};
  EXPECT_FALSE(read_checkpoints(verdict, options, std::chrono::seconds(5)));
  EXPECT_THAT(read, ElementsAre());
}

}  // namespace
}  // namespace nanlocator
