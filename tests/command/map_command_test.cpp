#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "command/run_command.hpp"
#include "map/planted_maps.hpp"

namespace nanlocator {
namespace {

using namespace testing;  // the planted files, run_command
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

void expect_one_clear_line(const CommandResult& result, const std::string& part) {
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(result.out, "");
  EXPECT_THAT(result.err, AllOf(StartsWith("nanlocator: "), HasSubstr(part)));
  EXPECT_EQ(std::ranges::count(result.err, '\n'), 1) << result.err;
}

class MapCommand : public ::testing::Test {
 protected:
  MapCommand() { plant_eight_ranks(folder_); }
  [[nodiscard]] std::string directory() const { return folder_.path().string(); }

  TemporaryFolder folder_;
};

TEST_F(MapCommand, ShowPrintsATableOfOneRank) {
  const auto result = run_command({"map", "show", directory(), "--rank", "3"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.err, "");
  EXPECT_EQ(result.out,
            "rank 3 (tp1 pp0 dp1, host a17, cpu): 2 parameters, run monday\n"
            "  id  name                          shape   dtype    flags\n"
            "   0  decoder.layers.0.qkv.weight   [4, 8]  float32  shard 16..32\n"
            "   1  decoder.layers.0.norm.weight  [8]     float32  tp-duplicate, shard none\n");
}

TEST_F(MapCommand, ShowWithoutARankPrintsAllOfThem) {
  const auto result = run_command({"map", "show", directory()});
  for (int rank = 0; rank < 8; ++rank) {
    EXPECT_THAT(result.out, HasSubstr("rank " + std::to_string(rank) + " (tp"));
  }
}

TEST_F(MapCommand, ShowPrintsJson) {
  const auto json = json_of(run_command({"map", "show", directory(), "--json", "--rank", "6"}));
  EXPECT_EQ(json["version"], 1);
  ASSERT_EQ(json["maps"].size(), 1U);
  EXPECT_EQ(json["maps"][0]["run_id"], "monday");
  EXPECT_EQ(json["maps"][0]["coordinates"]["pp"]["rank"], 1);
  EXPECT_EQ(json["maps"][0]["parameters"][1]["name"], "decoder.layers.1.norm.weight");
  EXPECT_EQ(json["notes"], nlohmann::json::array());
}

TEST_F(MapCommand, LongNamesAreNotCutInAPipe) {
  const TemporaryFolder folder;
  const std::string name(3000, 'n');
  plant_rank(folder, {}, {{name}});
  EXPECT_THAT(run_command({"map", "show", folder.path()}).out, HasSubstr(name + "  [4, 8]"));
}

TEST_F(MapCommand, NotesGoToStderrAndIntoTheJson) {
  std::filesystem::remove(folder_ / "param_manifest_tp0pp0dp0.json");
  std::filesystem::remove(folder_ / "param_id_name_map_tp0pp0dp0.json");
  const auto result = run_command({"map", "show", directory(), "--rank", "1"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.err, "note: no readable map from these of the 8 ranks: 0\n");
  EXPECT_EQ(json_of(run_command({"map", "find", directory(), "0", "--json"}))["notes"].size(), 1U);
}

TEST_F(MapCommand, FindShowsWhichPartEachRankHolds) {
  const auto result = run_command({"map", "find", directory(), "layers.0.*"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(
      result.out,
      "decoder.layers.0.qkv.weight\n"
      "  rank  place        id  shape   dtype    part                        "
      "                     flags\n"
      "     0  tp0 pp0 dp0   0  [4, 8]  float32  tp slice 0 of 2, of which elements 0..16 of 32\n"
      "     1  tp1 pp0 dp0   0  [4, 8]  float32  tp slice 1 of 2, of which elements 0..16 of 32\n"
      "     2  tp0 pp0 dp1   0  [4, 8]  float32  tp slice 0 of 2, of which elements 16..32 of 32\n"
      "     3  tp1 pp0 dp1   0  [4, 8]  float32  tp slice 1 of 2, of which elements 16..32 of 32\n"
      "\n"
      "decoder.layers.0.norm.weight\n"
      "  rank  place        id  shape  dtype    part                flags\n"
      "     0  tp0 pp0 dp0   1  [8]    float32  elements 0..8 of 8  tp-duplicate\n"
      "     1  tp1 pp0 dp0   1  [8]    float32  elements 0..8 of 8  tp-duplicate\n"
      "     2  tp0 pp0 dp1   1  [8]    float32  no elements         tp-duplicate\n"
      "     3  tp1 pp0 dp1   1  [8]    float32  no elements         tp-duplicate\n");
}

TEST_F(MapCommand, FindTakesANumberAsAnId) {
  const auto json = json_of(run_command({"map", "find", directory(), "1", "--json"}));
  ASSERT_EQ(json["matches"].size(), 2U);
  EXPECT_EQ(json["matches"][1]["name"], "decoder.layers.1.norm.weight");
  const auto& holder = json["matches"][1]["holders"][3];
  EXPECT_EQ(holder["coordinates"]["rank"], 7);
  EXPECT_EQ(holder["tp_slice"], nullptr);
  EXPECT_EQ(holder["part"], "no elements");
  EXPECT_EQ(holder["parameter"]["shard"], (nlohmann::json{{"begin", 8}, {"end", 8}}));
}

TEST_F(MapCommand, FindExitsWithOneIfNothingIsFound) {
  for (const char* pattern : {"nothing", "2", "9223372036854775807", "qkv?", "'; rm -rf $HOME"}) {
    const auto result = run_command({"map", "find", directory(), pattern});
    EXPECT_EQ(result.exit_code, 1) << pattern;
    EXPECT_THAT(result.out, HasSubstr(std::string(pattern) + " on any of 8 ranks"));
  }
  const auto result = run_command({"map", "find", directory(), "nothing", "--json"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(json_of(result)["matches"], nlohmann::json::array());
}

TEST_F(MapCommand, AWordThatIsAlsoASubcommandIsAnOrdinaryPattern) {
  for (const char* word : {"show", "find", "map", "version"}) {
    EXPECT_EQ(run_command({"map", "find", directory(), word}).exit_code, 1) << word;
  }
  EXPECT_EQ(run_command({"map", "find", directory(), "--", "--rank"}).exit_code, 1);
}

TEST_F(MapCommand, DiffOfEqualRunsIsClean) {
  const TemporaryFolder other;
  plant_eight_ranks(other, "tuesday");
  const auto result = run_command({"map", "diff", directory(), other.path()});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.out, "no difference: 8 pairs of maps compared\n");
}

TEST_F(MapCommand, DiffShowsWhatDiffersAndOnWhichRanks) {
  const TemporaryFolder other;
  plant_eight_ranks(other);
  plant_rank(other, {2, 8, 0, 2, 0, 2, 1, 2},
             {{"decoder.layers.0.qkv.weight", "[8,8]"},
              {"decoder.layers.0.bias"},
              {"decoder.layers.0.norm.weight", "[8]", "null", "is_tp_duplicate"}});
  std::filesystem::remove(other / "param_manifest_tp1pp1dp1.json");
  std::filesystem::remove(other / "param_id_name_map_tp1pp1dp1.json");
  const auto result = run_command({"map", "diff", directory(), other.path()});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(result.out,
            "rank 2 of " + directory() + " (left), rank 2 of " + other.path().string() +
                " (right)\n"
                "  what        name                          left id  right id  left    right\n"
                "  shape       decoder.layers.0.qkv.weight         0         0  [4, 8]  [8, 8]\n"
                "  id          decoder.layers.0.norm.weight        1         2\n"
                "  only_right  decoder.layers.0.bias                         1\n"
                "rank 7 in " +
                directory() + " only: the other side has no map with these coordinates\n");
  const auto json = json_of(run_command({"map", "diff", directory(), other.path(), "--json"}));
  EXPECT_EQ(json["only_left"], nlohmann::json::array({7}));
  EXPECT_EQ(json["only_right"], nlohmann::json::array());
  EXPECT_EQ(json["pairs"][2]["differences"][0]["kind"], "shape");
  EXPECT_EQ(json["pairs"][2]["differences"][2]["left_id"], nullptr);
  EXPECT_EQ(json["pairs"][0]["differences"], nlohmann::json::array());
}

TEST_F(MapCommand, DiffFoldsALongShiftOfIdsAndGroupsEqualRanks) {
  std::vector<PlantedParameter> left;
  for (int i = 0; i < 10; ++i) left.push_back({"p" + std::to_string(i)});
  std::vector<PlantedParameter> right = left;
  right.insert(right.begin(), {"new"});
  const TemporaryFolder first;
  const TemporaryFolder second;
  for (int rank = 0; rank < 3; ++rank) {
    const PlantedRank place{.rank = rank, .world = 3, .dp = rank, .dp_size = 3};
    plant_rank(first, place, left);
    plant_rank(second, place, right);
  }
  const auto result = run_command({"map", "diff", first.path(), second.path()});
  EXPECT_THAT(result.out, StartsWith("ranks 0-2 of "));
  EXPECT_THAT(result.out, AllOf(HasSubstr("p0"), HasSubstr("the 8 after it"), HasSubstr("p9"),
                                Not(HasSubstr("p4"))));
  EXPECT_EQ(std::ranges::count(result.out, '\n'), 6);
}

TEST_F(MapCommand, DiffComparesTwoRanksOfOneDirectory) {
  EXPECT_EQ(run_command({"map", "diff", directory(), "--ranks", "0,2"}).exit_code, 0);
  EXPECT_EQ(run_command({"map", "diff", directory(), "--ranks", "0,4"}).exit_code, 1);
  const auto json = json_of(run_command({"map", "diff", "--ranks", "4,0", directory(), "--json"}));
  EXPECT_EQ(json["pairs"][0]["left_rank"], 4);
  EXPECT_EQ(json["pairs"][0]["right_rank"], 0);
}

TEST_F(MapCommand, DiffNamesRanksOfWhichOnlyIdsAndNamesWereCompared) {
  const TemporaryFolder other;
  plant_eight_ranks(other);
  std::filesystem::remove(other / "param_manifest_tp1pp0dp0.json");
  const auto result = run_command({"map", "diff", directory(), other.path()});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.err, HasSubstr("note: rank 1: only ids and names were compared"));
}

TEST_F(MapCommand, WrongUseIsOneLineAndExitCodeTwo) {
  expect_one_clear_line(run_command({}), "a command is required: bundle, ");
  expect_one_clear_line(run_command({"mop"}), "\"mop\" (did you mean map?); see nanlocator --help");
  expect_one_clear_line(run_command({"map"}), "nanlocator map --help");
  expect_one_clear_line(run_command({"map", "diff"}), "DIR is required; see nanlocator map diff");
  expect_one_clear_line(run_command({"map", "find", directory()}), "PATTERN is required");
  expect_one_clear_line(run_command({"map", "find", directory(), ""}), "the pattern is empty");
  expect_one_clear_line(run_command({"map", "find", directory(), "9223372036854775808"}), "2^63");
  expect_one_clear_line(run_command({"map", "show", directory(), "--rank", "x"}), "--rank");
  expect_one_clear_line(run_command({"map", "show", directory(), "--rank", "8"}),
                        "no map of rank 8");
  expect_one_clear_line(run_command({"map", "show", directory(), "extra"}), "\"extra\"");
  expect_one_clear_line(run_command({"map", "diff", directory()}), "two directories");
  expect_one_clear_line(run_command({"map", "diff", directory(), directory(), "--ranks", "0,1"}),
                        "one directory");
  for (const char* ranks : {"0", "0,", ",0", "0,1,2", "0 1", "0,9"}) {
    expect_one_clear_line(run_command({"map", "diff", directory(), "--ranks", ranks}), "rank");
  }
  expect_one_clear_line(run_command({"map", "diff", directory(), directory(), directory()}), "");
}

TEST_F(MapCommand, UnreadableInputIsOneLineAndExitCodeTwo) {
  expect_one_clear_line(run_command({"map", "show", directory() + "/none"}), "No such file");
  const TemporaryFolder empty;
  expect_one_clear_line(run_command({"map", "show", empty.path()}), "holds no parameter map");
  empty.plant("param_manifest_tp0pp0dp0.json", "{\"\x1b[2J\n");
  expect_one_clear_line(run_command({"map", "show", empty.path()}), "param_manifest_tp0pp0dp0");
}

TEST_F(MapCommand, NothingInAFileSteersTheTerminal) {
  const TemporaryFolder folder;
  plant_rank(folder, {.run = R"(\u001b[31m)"}, {{R"(a\u001b]0;title\u0007\u009b\u202eb)"}});
  const auto result = run_command({"map", "show", folder.path()});
  EXPECT_THAT(result.out, HasSubstr(R"(a\x1b]0;title\x07\x9b\u202eb)"));
  EXPECT_EQ(result.out.find('\x1b'), std::string::npos);
}

TEST_F(MapCommand, AFullDiskUnderStdoutIsAnError) {
  const auto result = run_command({"map", "show", directory()}, {}, "/dev/full");
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(result.err, "nanlocator: cannot write the output\n");
}

/// The commands that the help of `arguments` lists.
std::vector<std::string> commands_below(const std::vector<std::string>& arguments) {
  std::istringstream help(run_command(arguments).out);
  std::vector<std::string> commands;
  bool is_list = false;
  for (std::string line; std::getline(help, line);) {
    if (line.empty()) is_list = false;
    if (is_list && line[2] != ' ') commands.push_back(line.substr(2, line.find(' ', 2) - 2));
    is_list = is_list || line == "Commands:";
  }
  return commands;
}

void expect_help_below(std::vector<std::string> arguments, int& seen) {
  arguments.push_back("--help");
  const auto result = run_command(arguments);
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.err, "");
  EXPECT_THAT(result.out, AllOf(StartsWith("Usage: nanlocator"), HasSubstr("\nExamples:\n"),
                                HasSubstr("  nanlocator ")));
  ++seen;
  for (const auto& command : commands_below(arguments)) {
    arguments.back() = command;
    expect_help_below(arguments, seen);
  }
}

// With an empty environment: runs neither Python nor nanlocator-replay.
TEST(NanlocatorCommand, HelpOfEveryCommandHasAnExample) {
  int seen = 0;
  expect_help_below({}, seen);
  EXPECT_EQ(seen, 1 + 11 + 4 + 3);  // of bundle four, of map three
}

TEST(NanlocatorCommand, HelpOfReplayShowsTheOptionsOfPython) {
  EXPECT_THAT(run_command({"replay", "--help"}).out,
              AllOf(HasSubstr("--reference MODULE:FUNCTION"), HasSubstr("--trust")));
}

TEST(NanlocatorCommand, PrintsItsVersion) {
  const auto text = run_command({"version"});
  EXPECT_EQ(text.exit_code, 0);
  const std::string version = json_of(run_command({"version", "--json"}))["version"];
  EXPECT_THAT(version, ::testing::MatchesRegex("[0-9]+\\.[0-9]+\\.[0-9]+"));
  EXPECT_THAT(text.out, StartsWith("nanlocator " + version + ", built "));
  EXPECT_EQ(run_command({"--version"}).out, text.out);
  EXPECT_EQ(run_command({"-V"}).out, text.out);
}

TEST(NanlocatorCommand, HelpIsAlsoACommand) {
  EXPECT_EQ(run_command({"help"}).out, run_command({"--help"}).out);
  EXPECT_EQ(run_command({"help", "report"}).out, run_command({"report", "--help"}).out);
}

TEST(NanlocatorCommand, AnUnknownCodeIsNotExplainedButItsNeighbourNamed) {
  const auto result = run_command({"explain", "bad_dat"});
  expect_one_clear_line(result, "there is no code bad_dat (did you mean bad_data?)");
  EXPECT_EQ(run_command({"explain", "bad_data"}).exit_code, 0);
}

TEST(NanlocatorCommand, TheMapsOfARunAreThoseOfItsLatestAttempt) {
  const TemporaryFolder maps, run;
  plant_eight_ranks(maps);
  std::filesystem::copy(maps.path(), run / "a1", std::filesystem::copy_options::recursive);
  EXPECT_EQ(run_command({"map", "show", run.path().string(), "--rank", "3"}).out,
            run_command({"map", "show", maps.path().string(), "--rank", "3"}).out);
}

}  // namespace
}  // namespace nanlocator
