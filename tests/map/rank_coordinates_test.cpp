#include "nanlocator/map/rank_coordinates.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>

#include "map/coordinates_json.hpp"
#include "nanlocator/error.hpp"
#include "temporary_folder.hpp"

namespace nanlocator {
namespace {

using ::testing::HasSubstr;
using testing::message_of;

RankCoordinates rank_five() {
  return {.rank = 5,
          .world_size = 8,
          .tp = {.rank = 1, .size = 2},
          .pp = {.rank = 0, .size = 1},
          .dp = {.rank = 2, .size = 4},
          .cp = {},
          .ep = {.rank = 1, .size = 2},
          .host = "a17",
          .local_rank = 3,
          .device = "cuda:3 GPU-6f2e 0000:1b:00.0"};
}

TEST(RankCoordinates, FileSuffixNamesContextParallelRanksOnlyIfThereAreSeveral) {
  RankCoordinates coordinates = rank_five();
  EXPECT_EQ(coordinates.file_suffix(), "tp1pp0dp2");
  coordinates.cp = {.rank = 3, .size = 4};
  EXPECT_EQ(coordinates.file_suffix(), "tp1pp0dp2cp3");
}

TEST(RankCoordinates, DescriptionLeavesOutAxesOfSizeOne) {
  EXPECT_EQ(rank_five().describe(), "rank 5 (tp1 dp2 ep1, host a17, cuda:3 GPU-6f2e 0000:1b:00.0)");
  EXPECT_EQ(RankCoordinates{}.describe(), "rank 0");
  RankCoordinates alone;
  alone.host = "laptop";
  alone.device = "cpu";
  EXPECT_EQ(alone.describe(), "rank 0 (host laptop, cpu)");
}

TEST(RankCoordinates, AreReadBackAsTheyWereWritten) {
  const nlohmann::json json = nlohmann::json::parse(fields_to_json(rank_five()).dump());
  EXPECT_EQ(json["tp"]["rank"], 1);
  EXPECT_EQ(json["tp"]["size"], 2);
  EXPECT_EQ(json["host"], "a17");
  EXPECT_EQ(fields_from_json<RankCoordinates>(JsonObject(json, "x.json")), rank_five());
}

TEST(RankCoordinates, ARankThatIsNotBelowItsSizeIsAFormatError) {
  nlohmann::json json = nlohmann::json::parse(fields_to_json(rank_five()).dump());
  json["tp"]["rank"] = 2;
  EXPECT_THAT(message_of<FormatError>([&] {
                (void)fields_from_json<RankCoordinates>(JsonObject(json, "x.json", "coordinates"));
              }),
              HasSubstr("x.json: coordinates: tp rank 2: expected 0 to 1"));
  json["tp"] = nlohmann::json::array({1, 2});
  EXPECT_THAT(message_of<FormatError>([&] {
                (void)fields_from_json<RankCoordinates>(JsonObject(json, "x.json", "coordinates"));
              }),
              HasSubstr("x.json: coordinates.tp: found an array, expected an object"));
}

class DataParallelCoordinates : public ::testing::Test {
 protected:
  void TearDown() override { ::unsetenv("LOCAL_RANK"); }
};

TEST_F(DataParallelCoordinates, FillHostLocalRankAndDevice) {
  ::setenv("LOCAL_RANK", "3", 1);
  char host[256] = {};
  ASSERT_EQ(::gethostname(host, sizeof host - 1), 0);
  const auto coordinates = data_parallel_coordinates(11, 16);
  EXPECT_EQ(coordinates.rank, 11);
  EXPECT_EQ(coordinates.world_size, 16);
  EXPECT_EQ(coordinates.dp, (AxisCoordinate{.rank = 11, .size = 16}));
  EXPECT_EQ(coordinates.tp, AxisCoordinate{});
  EXPECT_EQ(coordinates.host, host);
  EXPECT_EQ(coordinates.local_rank, 3);
  EXPECT_EQ(coordinates.device, "cpu");
}

TEST_F(DataParallelCoordinates, LocalRankIsZeroWhereTheLauncherSetsNone) {
  ::unsetenv("LOCAL_RANK");
  EXPECT_EQ(data_parallel_coordinates(0, 1).local_rank, 0);
}

TEST_F(DataParallelCoordinates, RefuseALocalRankThatIsNotANumber) {
  for (const char* value : {"", "x", "-1", "3 ", "99999999999"}) {
    ::setenv("LOCAL_RANK", value, 1);
    EXPECT_THROW((void)data_parallel_coordinates(0, 1), UsageError) << value;
  }
}

TEST_F(DataParallelCoordinates, RefuseARankOutsideOfTheWorld) {
  EXPECT_THROW((void)data_parallel_coordinates(2, 2), UsageError);
  EXPECT_THROW((void)data_parallel_coordinates(-1, 2), UsageError);
  EXPECT_THROW((void)data_parallel_coordinates(0, 0), UsageError);
}

TEST(DescribeRanks, FoldsRunsAndSorts) {
  EXPECT_EQ(describe_ranks({}), "");
  EXPECT_EQ(describe_ranks({4}), "4");
  EXPECT_EQ(describe_ranks({7, 2, 0, 1, 3, 3, 9, 8}), "0-3, 7-9");
  EXPECT_EQ(describe_ranks({5, 5}), "5");
}

}  // namespace
}  // namespace nanlocator
