#include "nanlocator/record/birth.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <set>

#include "nanlocator/error.hpp"
#include "record/birth_json.hpp"
#include "record/planted_bundle.hpp"
#include "temporary_folder.hpp"

namespace nanlocator {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using testing::planted_birth;

TEST(Birth, EveryKindHasANameOfItsOwnThatReadsBack) {
  std::set<std::string_view> names;
  for (int kind = 0; kind <= static_cast<int>(BirthKind::collective); ++kind) {
    const auto name = name_of(static_cast<BirthKind>(kind));
    EXPECT_TRUE(names.insert(name).second) << name;
    EXPECT_EQ(birth_kind_from_name(name), static_cast<BirthKind>(kind));
  }
  EXPECT_EQ(names.count("nan_from_inf"), 1U);
  EXPECT_EQ(names.count("unknown"), 0U);
  EXPECT_EQ(birth_kind_from_name("unknown"), std::nullopt);
}

TEST(Birth, EveryConclusionHasANameOfItsOwnThatReadsBack) {
  std::set<std::string_view> names;
  for (int value = 0; value <= static_cast<int>(ReplayConclusion::not_replayed); ++value) {
    const auto name = name_of(static_cast<ReplayConclusion>(value));
    EXPECT_TRUE(names.insert(name).second) << name;
    EXPECT_EQ(replay_conclusion_from_name(name), static_cast<ReplayConclusion>(value));
  }
  EXPECT_EQ(names.count("varies"), 1U);
  EXPECT_EQ(names.count("unknown"), 0U);
  EXPECT_EQ(replay_conclusion_from_name(""), std::nullopt);
}

Birth read_back(const Birth& birth) {
  const auto json = parse_json(birth_to_json(birth).dump(), "x.json");
  return birth_from_json(JsonObject(json, "x.json"));
}

TEST(Birth, IsReadBackAsItWasWritten) {
  Birth birth = planted_birth();
  birth.values = {{"self", -0.0}, {"other", std::numeric_limits<double>::infinity()}};
  birth.reached = {"loss", "decoder.weight"};
  birth.bundle = "bundles/step12-backward-rank3";
  birth.replay = ReplayConclusion::deterministic_overflow;
  birth.replay_lines = {"bad again, finite in fp64"};
  EXPECT_EQ(read_back(birth), birth);
  EXPECT_EQ(read_back({}), Birth{});
}

TEST(Birth, AnUnknownKindIsRefusedByName) {
  auto json = parse_json(birth_to_json(planted_birth()).dump(), "x.json");
  json["kind"] = "miracle";
  EXPECT_THAT(message_of<FormatError>([&] { (void)birth_from_json(JsonObject(json, "x.json")); }),
              HasSubstr("x.json: kind: found the string \"miracle\""));
}

}  // namespace
}  // namespace nanlocator
