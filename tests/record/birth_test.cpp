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

TEST(Birth, EveryKindHasAnOwnNameThatReadsBack) {
  std::set<std::string_view> names;
  for (int kind = 0; kind <= static_cast<int>(BirthKind::collective); ++kind) {
    const auto name = name_of(static_cast<BirthKind>(kind));
    EXPECT_TRUE(names.insert(name).second) << name;
    EXPECT_EQ(value_named<BirthKind>(name), static_cast<BirthKind>(kind));
  }
  EXPECT_EQ(names.count("nan_from_inf"), 1U);
  EXPECT_EQ(names.count("unknown"), 0U);
  EXPECT_EQ(value_named<BirthKind>("unknown"), std::nullopt);
}

TEST(Birth, EveryConclusionHasAnOwnNameThatReadsBack) {
  std::set<std::string_view> names;
  for (int value = 0; value <= static_cast<int>(ReplayConclusion::not_replayed); ++value) {
    const auto name = name_of(static_cast<ReplayConclusion>(value));
    EXPECT_TRUE(names.insert(name).second) << name;
    EXPECT_EQ(value_named<ReplayConclusion>(name), static_cast<ReplayConclusion>(value));
  }
  EXPECT_EQ(names.count("varies"), 1U);
  EXPECT_EQ(names.count("unknown"), 0U);
  EXPECT_EQ(value_named<ReplayConclusion>(""), std::nullopt);
}

Birth read_back(const Birth& birth) {
  const auto json = parse_json(fields_to_json(birth).dump(), "x.json");
  return fields_from_json<Birth>(JsonObject(json, "x.json"));
}

TEST(Birth, IsReadBackAsItWasWritten) {
  Birth birth = planted_birth();
  birth.is_custom_operator = true;
  birth.custom_function = "SquareBug";
  birth.code = CodeLine{"model.py", 412, "forward", "return torch.sqrt(var)"};
  birth.framework_code = CodeLine{"megatron/core/norm.py", 12, "forward", ""};
  birth.operands = {{.name = "tensors",
                     .element = 1,
                     .dtype = "float32",
                     .shape = {2, 3},
                     .stats = TensorStats{.numel = 6, .nan = 1, .zeros = 2, .first_bad = 4},
                     .negatives = 3,
                     .number = {},
                     .at_first_bad = -0.0},
                    {.name = "exponent",
                     .element = {},
                     .dtype = {},
                     .shape = {},
                     .stats = {},
                     .negatives = {},
                     .number = std::numeric_limits<double>::infinity(),
                     .at_first_bad = {}}};
  birth.extent = BadExtent{.dimensions = {{1, 1, 1}, {0, 5, 3}}, .is_block = true};
  birth.weights = {{"decoder.weight", 3e24, {{8, 11}, {0.1F, 88}}, {{11}, {0}}}};
  birth.literal_op = "aten::masked_fill_.Scalar";
  birth.reader = "aten::mul.Tensor";
  birth.writer = "aten::add_.Tensor";
  birth.last_seen = LastSeen::finite;
  birth.inside = "CompiledFunction";
  birth.reached = {{ReachedKind::loss, "loss[1]"},
                   {ReachedKind::parameter, "decoder.weight"},
                   {ReachedKind::other_ranks, {}},
                   {ReachedKind::module, "decoder"}};
  birth.bundle = "bundles/step12-backward-rank3";
  birth.replay = ReplayConclusion::deterministic_overflow;
  birth.replay_lines = {"bad again, finite in fp64"};
  birth.kernel_call = 3;
  birth.kernel_replay = KernelReplay{.conclusion = KernelConclusion::leaves_unwritten,
                                     .problem = "no time was left",
                                     .output = "dq",
                                     .executions = 3,
                                     .has_same_bits = false,
                                     .bad = 8,
                                     .shape = {4, 8},
                                     .extent = BadExtent{.dimensions = {{1, 1, 1}, {0, 7, 8}}},
                                     .argument = "dk",
                                     .reference = "attention backward",
                                     .compared = 24,
                                     .agreeing = 23,
                                     .is_reference_finite = true,
                                     .is_compared_scaled = true};
  EXPECT_EQ(read_back(birth), birth);
  EXPECT_EQ(read_back({}), Birth{});
}

TEST(Birth, EveryReachedKindHasAnOwnNameThatReadsBack) {
  for (int kind = 0; kind <= static_cast<int>(ReachedKind::module); ++kind) {
    const auto name = name_of(static_cast<ReachedKind>(kind));
    EXPECT_EQ(value_named<ReachedKind>(name), static_cast<ReachedKind>(kind)) << name;
  }
  for (int seen = 0; seen <= static_cast<int>(LastSeen::finite); ++seen) {
    const auto name = name_of(static_cast<LastSeen>(seen));
    EXPECT_EQ(value_named<LastSeen>(name), static_cast<LastSeen>(seen)) << name;
  }
  EXPECT_EQ(value_named<ReachedKind>("unknown"), std::nullopt);
}

TEST(Birth, WrittenBeforeOperandsExistedIsStillRead) {
  auto json = parse_json(fields_to_json(planted_birth()).dump(), "x.json");
  for (const char* key :
       {"is_custom_operator", "custom_function", "literal_operator", "code", "framework_code",
        "operands", "extent", "weights", "reader", "writer", "last_seen", "inside"}) {
    ASSERT_EQ(json.erase(key), 1U) << key;
  }
  json["values"] = nlohmann::json::array({{{"name", "self"}, {"value", -0.5}}});
  json["inputs"] = nlohmann::json::array({"self: float32 [4], finite, |x| <= 3.2"});
  json["reached"] = nlohmann::json::array({"loss[0]", "other ranks", "module a.b", "a.b.weight"});
  const Birth birth = fields_from_json<Birth>(JsonObject(json, "x.json"));
  ASSERT_EQ(birth.operands.size(), 1U);
  EXPECT_EQ(birth.operands[0].name, "self");
  EXPECT_EQ(birth.operands[0].at_first_bad, -0.5);
  EXPECT_EQ(birth.reached, std::vector<Reached>({{ReachedKind::loss, "loss[0]"},
                                                 {ReachedKind::other_ranks, {}},
                                                 {ReachedKind::module, "a.b"},
                                                 {ReachedKind::parameter, "a.b.weight"}}));
  EXPECT_EQ(birth.sighting, planted_birth().sighting);
}

TEST(Birth, AnExtentOfMoreIndicesThanThereAreIsRefused) {
  Birth birth = planted_birth();
  birth.extent = BadExtent{.dimensions = {{2, 3, 3}}};
  const auto json = parse_json(fields_to_json(birth).dump(), "x.json");
  EXPECT_THAT(
      message_of<FormatError>([&] { (void)fields_from_json<Birth>(JsonObject(json, "x.json")); }),
      HasSubstr("extent.dimensions[0].count"));
}

TEST(Birth, AnUnknownKindIsRefusedByName) {
  auto json = parse_json(fields_to_json(planted_birth()).dump(), "x.json");
  json["kind"] = "miracle";
  EXPECT_THAT(
      message_of<FormatError>([&] { (void)fields_from_json<Birth>(JsonObject(json, "x.json")); }),
      HasSubstr("x.json: kind: found the string \"miracle\""));
}

}  // namespace
}  // namespace nanlocator
