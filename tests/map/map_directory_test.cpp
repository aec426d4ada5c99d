#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "map/planted_maps.hpp"
#include "nanlocator/error.hpp"
#include "nanlocator/map/parameter_map.hpp"

namespace nanlocator {
namespace {

using namespace testing;  // the planted files
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::vector<int> ranks_of(const MapDirectory& read) {
  std::vector<int> ranks;
  for (const auto& map : read.maps) ranks.push_back(map.coordinates().rank);
  return ranks;
}

TEST(MapDirectory, HasEveryRankInOrderAndNothingToNote) {
  const TemporaryFolder folder;
  plant_eight_ranks(folder);
  folder.plant("run.json", "not a map");
  const auto read = read_map_directory(folder.path());
  EXPECT_THAT(ranks_of(read), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
  EXPECT_THAT(read.notes, IsEmpty());
  EXPECT_EQ(read.maps[6].coordinates().pp.rank, 1);
  EXPECT_EQ(read.maps[6].coordinates().dp.rank, 1);
  EXPECT_EQ(read.maps[6].at(0).name, "decoder.layers.1.qkv.weight");
  EXPECT_EQ(read.maps[6].at(0).shard, (ElementRange{16, 32}));
}

TEST(MapDirectory, ReadsWhatParameterMapWrites) {
  const TemporaryFolder folder;
  ParameterInfo info;
  info.name = "weight";
  info.dtype = "float32";
  const ParameterMap written({}, {info}, "monday");
  written.write(folder.path());
  const auto read = read_map_directory(folder.path());
  ASSERT_EQ(read.maps.size(), 1U);
  EXPECT_EQ(read.maps[0].parameters(), written.parameters());
  EXPECT_THAT(read.notes, IsEmpty());
}

TEST(MapDirectory, NotesMissingRanksInRuns) {
  const TemporaryFolder folder;
  plant_eight_ranks(folder);
  for (const char* place : {"tp0pp0dp0", "tp0pp1dp0", "tp1pp1dp0"}) {
    std::filesystem::remove(folder / ("param_manifest_" + std::string(place) + ".json"));
    std::filesystem::remove(folder / ("param_id_name_map_" + std::string(place) + ".json"));
  }
  const auto read = read_map_directory(folder.path());
  EXPECT_THAT(ranks_of(read), ElementsAre(1, 2, 3, 6, 7));
  EXPECT_THAT(read.notes, ElementsAre("no readable map from these of the 8 ranks: 0, 4-5"));
}

TEST(MapDirectory, AClaimOfTwoThousandMillionRanksCostsNothing) {
  const TemporaryFolder folder;
  plant_rank(folder, {.rank = 3, .world = 2147483647}, {{"weight"}});
  const auto read = read_map_directory(folder.path());
  EXPECT_THAT(read.notes, Contains(HasSubstr("0-2, 4-2147483646")));
  EXPECT_THAT(read.notes, Contains(HasSubstr("do not multiply to the number of ranks")));
}

TEST(MapDirectory, ABadManifestGivesANoteAndItsIdNameFileReplacesIt) {
  const TemporaryFolder folder;
  plant_eight_ranks(folder);
  folder.plant("param_manifest_tp1pp0dp1.json", R"({"version":1,"run_)");
  const auto read = read_map_directory(folder.path());
  EXPECT_THAT(ranks_of(read), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
  EXPECT_EQ(read.maps[3].at(1).name, "decoder.layers.0.norm.weight");
  EXPECT_EQ(read.maps[3].at(1).dtype, "");
  EXPECT_THAT(
      read.notes,
      ElementsAre(HasSubstr("param_manifest_tp1pp0dp1.json: cut off: it ends after byte 18"),
                  HasSubstr("for rank 3 (inferred from the name), only ids and names")));
}

TEST(MapDirectory, TheRecipesFilesAloneGiveIdsAndNames) {
  const TemporaryFolder folder;
  for (int rank = 0; rank < 8; ++rank) {
    const PlantedRank place{rank, 8, rank % 2, 2, rank / 4, 2, rank / 2 % 2, 2};
    folder.plant("param_id_name_map_" + suffix_of(place),
                 "{\"0\": \"weight of rank " + std::to_string(rank) + "\"}");
  }
  const auto read = read_map_directory(folder.path());
  ASSERT_THAT(ranks_of(read), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
  for (int rank = 0; rank < 8; ++rank) {
    EXPECT_EQ(read.maps[rank].at(0).name, "weight of rank " + std::to_string(rank));
  }
  EXPECT_EQ(read.maps[5].coordinates().tp, (AxisCoordinate{1, 2}));
  EXPECT_THAT(read.notes, ElementsAre(HasSubstr("there are no manifests")));
}

TEST(MapDirectory, ContextParallelRanksComeFromTheFileName) {
  const TemporaryFolder folder;
  folder.plant("param_id_name_map_tp0pp0dp0cp0.json", R"({"0": "a"})");
  folder.plant("param_id_name_map_tp0pp0dp0cp1.json", R"({"0": "b"})");
  const auto read = read_map_directory(folder.path());
  ASSERT_THAT(ranks_of(read), ElementsAre(0, 1));
  EXPECT_EQ(read.maps[1].coordinates().cp, (AxisCoordinate{1, 2}));
  EXPECT_EQ(read.maps[1].at(0).name, "b");
}

TEST(MapDirectory, NotesAManifestAndAMapThatDisagree) {
  const TemporaryFolder folder;
  plant_rank(folder, {}, {{"first"}, {"second"}});
  folder.plant("param_id_name_map_tp0pp0dp0.json", R"({"0": "first", "1": "other"})");
  EXPECT_THAT(
      read_map_directory(folder.path()).notes,
      ElementsAre(AllOf(HasSubstr("calls parameter 1 second"), HasSubstr("calls it other"))));
  folder.plant("param_id_name_map_tp0pp0dp0.json", R"({"0": "first"})");
  EXPECT_THAT(read_map_directory(folder.path()).notes,
              ElementsAre(AllOf(HasSubstr("has 2 parameters"), HasSubstr("has 1;"))));
  std::filesystem::remove(folder / "param_id_name_map_tp0pp0dp0.json");
  EXPECT_THAT(read_map_directory(folder.path()).notes,
              ElementsAre(HasSubstr("has no param_id_name_map_tp0pp0dp0.json beside it")));
}

TEST(MapDirectory, NotesFilesOfDifferentRuns) {
  const TemporaryFolder folder;
  plant_rank(folder, {.rank = 0, .world = 3, .dp = 0, .dp_size = 3, .run = "monday"}, {{"a"}});
  plant_rank(folder, {.rank = 1, .world = 3, .dp = 1, .dp_size = 3, .run = "monday"}, {{"a"}});
  plant_rank(folder, {.rank = 2, .world = 4, .dp = 2, .dp_size = 4, .run = "tuesday"}, {{"a"}});
  EXPECT_THAT(
      read_map_directory(folder.path()).notes,
      ElementsAre(AllOf(HasSubstr("1 of 3 files state other sizes"), HasSubstr("tp0pp0dp2.json")),
                  "the files are from different runs: monday (rank 0-1); tuesday (rank 2)"));
}

TEST(MapDirectory, SkipsASecondFileOfTheSameRank) {
  const TemporaryFolder folder;
  plant_rank(folder, {.rank = 0, .world = 2, .dp = 0, .dp_size = 2}, {{"a"}});
  plant_rank(folder, {.rank = 0, .world = 2, .dp = 1, .dp_size = 2}, {{"b"}});
  const auto read = read_map_directory(folder.path());
  ASSERT_THAT(ranks_of(read), ElementsAre(0));
  EXPECT_EQ(read.maps[0].at(0).name, "a");
  EXPECT_THAT(read.notes, Contains(AllOf(HasSubstr("param_manifest_tp0pp0dp1.json was skipped"),
                                         HasSubstr("so does param_manifest_tp0pp0dp0.json"))));
}

TEST(MapDirectory, ARenamedManifestIsRefused) {
  const TemporaryFolder folder;
  plant_rank(folder, {.rank = 0, .world = 2, .dp = 0, .dp_size = 2}, {{"a"}});
  std::filesystem::copy(folder / "param_manifest_tp0pp0dp0.json",
                        folder / "param_manifest_tp0pp0dp1.json");
  const auto read = read_map_directory(folder.path());
  EXPECT_THAT(ranks_of(read), ElementsAre(0));
  EXPECT_THAT(read.notes, Contains(HasSubstr("param_manifest_tp0pp0dp1.json: its coordinates "
                                             "belong in param_manifest_tp0pp0dp0.json")));
}

TEST(MapDirectory, ABadRecipeFileIsReportedWithItsFault) {
  const struct {
    const char* text;
    const char* fault;
  } cases[] = {
      {R"({"0": "a", "2": "b"})", "the id \"1\" is missing"},
      {R"({"0": "a", "01": "b"})", "the id \"1\" is missing"},
      {R"({"0": "a", "-1": "b"})", "the id \"1\" is missing"},
      {R"({"0": "a", "0": "b"})", "occurs twice"},
      {R"({"0": "a", "1": "a"})", "have the same name a"},
      {R"({"0": ""})", "empty name"},
      {R"({"0": 7})", "0: found 7, expected a name"},
      {R"(["a"])", "found an array, expected an object of ids and names"},
      {"{\"0\": \"\xff\"}", "not valid JSON"},
      {"", "cut off: it ends after byte 0"},
  };
  for (const auto& [text, fault] : cases) {
    const TemporaryFolder folder;
    folder.plant("param_id_name_map_tp0pp0dp0.json", text);
    const auto message = message_of<FormatError>([&] { (void)read_map_directory(folder.path()); });
    EXPECT_THAT(message, AllOf(HasSubstr("param_id_name_map_tp0pp0dp0.json"), HasSubstr(fault)));
  }
}

TEST(MapDirectory, FilesWithOddNamesGiveANoteAndAreNotRead) {
  const TemporaryFolder folder;
  plant_rank(folder, {}, {{"a"}});
  for (const char* name :
       {"tp0pp0.json", "tp00pp0dp0.json", "tp-1pp0dp0.json", "tp0pp0dp0.json.bak",
        "tp99999999999999999999pp0dp0.json", "tp1048576pp0dp0.json", ""}) {
    folder.plant("param_manifest_" + std::string(name), "{}");
  }
  const auto read = read_map_directory(folder.path());
  EXPECT_EQ(read.maps.size(), 1U);
  EXPECT_EQ(read.notes.size(), 7U);
  EXPECT_THAT(read.notes, Contains(HasSubstr("param_manifest_tp00pp0dp0.json was not read")));
}

TEST(MapDirectory, HugeCoordinatesInFileNamesOverflowNothing) {
  const TemporaryFolder folder;
  folder.plant("param_id_name_map_tp1048575pp1048575dp1048575cp1048575.json", R"({"0": "a"})");
  EXPECT_THAT(message_of<FormatError>([&] { (void)read_map_directory(folder.path()); }),
              HasSubstr("16777216 ranks or more"));
}

TEST(MapDirectory, APipeOrAFolderInPlaceOfAFileIsANote) {
  const TemporaryFolder folder;
  plant_rank(folder, {}, {{"a"}});
  ASSERT_EQ(::mkfifo((folder / "param_manifest_tp1pp0dp0.json").c_str(), 0600), 0);
  std::filesystem::create_directory(folder / "param_id_name_map_tp2pp0dp0.json");
  const auto read = read_map_directory(folder.path());
  EXPECT_EQ(read.maps.size(), 1U);
  EXPECT_THAT(read.notes, Contains(HasSubstr("not a regular file")));
  EXPECT_THAT(read.notes, Contains(HasSubstr("Is a directory")));
}

TEST(MapDirectory, WithoutAnyMapItSaysWhereMapsAre) {
  const TemporaryFolder folder;
  EXPECT_THAT(message_of<FormatError>([&] { (void)read_map_directory(folder.path()); }),
              HasSubstr("holds no parameter map"));
  std::filesystem::create_directory(folder / "a0");
  std::filesystem::create_directory(folder / "a1");
  EXPECT_THAT(message_of<FormatError>([&] { (void)read_map_directory(folder.path()); }),
              HasSubstr("in the folder of an attempt, here a0, a1"));
  EXPECT_THAT(message_of<IoError>([&] { (void)read_map_directory(folder / "none"); }),
              HasSubstr("No such file or directory"));
}

}  // namespace
}  // namespace nanlocator
