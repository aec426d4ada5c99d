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
