#include "nanlocator/map/map_query.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "map/planted_maps.hpp"

namespace nanlocator {
namespace {

using namespace testing;  // the planted files
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using Kind = MapDifferenceKind;

ParameterInfo parameter(std::string name, std::vector<std::int64_t> shape = {4}) {
  ParameterInfo info;
  info.name = std::move(name);
  info.shape = std::move(shape);
  info.dtype = "float32";
  return info;
}

ParameterMap map_of(std::vector<ParameterInfo> parameters, RankCoordinates coordinates = {}) {
  for (std::size_t id = 0; id < parameters.size(); ++id) {
    parameters[id].id = static_cast<std::int64_t>(id);
  }
  return {std::move(coordinates), std::move(parameters)};
}

TEST(NameMatches, WithoutWildcardsAnyPartOfTheName) {
  EXPECT_TRUE(name_matches("decoder.layers.3.weight", "layers.3"));
  EXPECT_TRUE(name_matches("a", "a"));
  EXPECT_FALSE(name_matches("decoder.layers.3.weight", "Layers.3"));
  EXPECT_FALSE(name_matches("a", "ab"));
}

TEST(NameMatches, WithWildcardsTheWholeNameOrItsEndFromADotOn) {
  EXPECT_TRUE(name_matches("decoder.layers.3.weight", "*.layers.3.*"));
  EXPECT_TRUE(name_matches("decoder.layers.3.weight", "layers.?.weight"));
  EXPECT_FALSE(name_matches("decoder.layers.13.weight", "layers.?.weight"));
  EXPECT_FALSE(name_matches("decoder.mylayers.3.weight", "layers.*"));
  EXPECT_FALSE(name_matches("decoder.weight_scale", "*.weight"));
  EXPECT_TRUE(name_matches("", "*"));
  EXPECT_TRUE(name_matches("weight", "***"));
  EXPECT_TRUE(name_matches("abcabd", "*abd"));
  EXPECT_FALSE(name_matches("weight", "weight?"));
}

TEST(NameMatches, BracketsAndBackslashesAreThemselves) {
  EXPECT_TRUE(name_matches("a[0].b", "a[0]*"));
  EXPECT_FALSE(name_matches("a0.b", "a[0]*"));
  EXPECT_TRUE(name_matches("a\\*b", "a\\*b"));
}

TEST(NameMatches, ManyStarsTakeNoExponentialTime) {
  std::string pattern;
  for (int i = 0; i < 200; ++i) pattern += "a*";
  EXPECT_FALSE(name_matches(std::string(5000, 'a'), pattern + "b"));
}

TEST(FindParameters, GivesEachRanksSliceAndShard) {
  const TemporaryFolder folder;
  plant_eight_ranks(folder);
  const auto read = read_map_directory(folder.path());
  const auto found = find_parameters(read.maps, "layers.1.qkv.*");
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found[0].name, "decoder.layers.1.qkv.weight");
  ASSERT_EQ(found[0].holders.size(), 4U);
  for (std::size_t i = 0; i < 4; ++i) {  // stage 1 is ranks 4-7
    const auto& holder = found[0].holders[i];
    EXPECT_EQ(holder.map->coordinates().rank, static_cast<int>(4 + i));
    EXPECT_EQ(holder.tp_slice, (AxisCoordinate{static_cast<int>(i % 2), 2}));
    EXPECT_EQ(holder.parameter->shard, (i < 2 ? ElementRange{0, 16} : ElementRange{16, 32}));
  }
}

TEST(FindParameters, ADuplicatedParameterHasNoSlice) {
  const TemporaryFolder folder;
  plant_eight_ranks(folder);
  const auto read = read_map_directory(folder.path());
  const auto found = find_parameters(read.maps, std::int64_t{1});
  ASSERT_EQ(found.size(), 2U);  // one norm on each stage
  EXPECT_EQ(found[0].name, "decoder.layers.0.norm.weight");
  EXPECT_EQ(found[1].name, "decoder.layers.1.norm.weight");
  for (const auto& holder : found[0].holders) EXPECT_EQ(holder.tp_slice, std::nullopt);
}

TEST(FindParameters, AnExpertIsSlicedWhereSeveralTpRanksHoldIt) {
  const auto place = [](int rank) {
    RankCoordinates coordinates;
    coordinates.rank = rank;
    coordinates.world_size = 2;
    coordinates.tp = {.rank = rank, .size = 2};
    return coordinates;
  };
  ParameterInfo shared = parameter("experts.0.weight");
  ParameterInfo first_alone = parameter("experts.1.weight");
  ParameterInfo second_alone = parameter("experts.2.weight");
  shared.is_expert = first_alone.is_expert = second_alone.is_expert = true;
  const std::vector<ParameterMap> maps = {map_of({shared, first_alone}, place(0)),
                                          map_of({shared, second_alone}, place(1))};
  const auto found = find_parameters(maps, "experts");
  ASSERT_EQ(found.size(), 3U);
  EXPECT_EQ(found[0].holders[1].tp_slice, (AxisCoordinate{1, 2}));
  EXPECT_EQ(found[1].holders[0].tp_slice, std::nullopt);
  EXPECT_EQ(found[2].holders[0].tp_slice, std::nullopt);
}

TEST(FindParameters, FindsNothingIfNothingMatches) {
  const std::vector<ParameterMap> maps = {map_of({parameter("a")})};
  EXPECT_THAT(find_parameters(maps, "b"), IsEmpty());
  EXPECT_THAT(find_parameters(maps, std::int64_t{1}), IsEmpty());
}

TEST(CompareMaps, EqualMapsHaveNoDifference) {
  const auto map = map_of({parameter("a"), parameter("b")});
  EXPECT_THAT(compare_maps(map, map), IsEmpty());
  EXPECT_THAT(compare_maps(ParameterMap(), ParameterMap()), IsEmpty());
}

TEST(CompareMaps, AnInsertedParameterShiftsTheIdsBehindItButNotTheOrder) {
  const auto left = map_of({parameter("a"), parameter("b"), parameter("c")});
  const auto right = map_of({parameter("a"), parameter("new"), parameter("b"), parameter("c")});
  EXPECT_THAT(compare_maps(left, right),
              ElementsAre(MapDifference{Kind::id, "b", 1, 2, "", ""},
                          MapDifference{Kind::id, "c", 2, 3, "", ""},
                          MapDifference{Kind::only_right, "new", std::nullopt, 1, "", ""}));
  EXPECT_THAT(compare_maps(right, left),
              ElementsAre(MapDifference{Kind::only_left, "new", 1, std::nullopt, "", ""},
                          MapDifference{Kind::id, "b", 2, 1, "", ""},
                          MapDifference{Kind::id, "c", 3, 2, "", ""}));
}

TEST(CompareMaps, ReportsAnotherOrderOnce) {
  const auto left = map_of({parameter("a"), parameter("b"), parameter("c")});
  const auto right = map_of({parameter("c"), parameter("a"), parameter("b")});
  const auto differences = compare_maps(left, right);
  ASSERT_EQ(differences.size(), 4U);
  EXPECT_EQ(differences[0], (MapDifference{Kind::order, "a", 0, 1, "before c", "after c"}));
  for (std::size_t i = 1; i < 4; ++i) EXPECT_EQ(differences[i].kind, Kind::id);
}

TEST(CompareMaps, ReportsEachValueThatDiffers) {
  const auto left = map_of({parameter("a", {4, 8})});
  ParameterInfo other = parameter("a", {8, 4});
  other.dtype = "bfloat16";
  other.layer = 2;
  other.chunk = 1;
  other.is_tied = true;
  EXPECT_THAT(compare_maps(left, map_of({other})),
              ElementsAre(MapDifference{Kind::shape, "a", 0, 0, "[4, 8]", "[8, 4]"},
                          MapDifference{Kind::dtype, "a", 0, 0, "float32", "bfloat16"},
                          MapDifference{Kind::layer, "a", 0, 0, "none", "2"},
                          MapDifference{Kind::chunk, "a", 0, 0, "0", "1"},
                          MapDifference{Kind::flags, "a", 0, 0, "none", "tied"}));
}

TEST(CompareMaps, PlacementThatDiffersByDesignIsNoDifference) {
  ParameterInfo other = parameter("a");
  other.raw_name = "module.a";
  other.bucket = 1;
  other.bucket_offset = 64;
  other.shard = ElementRange{0, 2};
  EXPECT_THAT(compare_maps(map_of({parameter("a")}), map_of({other})), IsEmpty());
}

TEST(CompareMaps, ComparesOnlyIdsAndNamesIfOneSideKnowsNoMore) {
  ParameterInfo name_alone;
  name_alone.name = "a";
  EXPECT_THAT(compare_maps(map_of({parameter("a")}), map_of({name_alone})), IsEmpty());
  EXPECT_THAT(compare_maps(map_of({parameter("b"), parameter("a")}), map_of({name_alone})),
              ElementsAre(MapDifference{Kind::only_left, "b", 0, std::nullopt, "", ""},
                          MapDifference{Kind::id, "a", 1, 0, "", ""}));
}

}  // namespace
}  // namespace nanlocator
