#include "nanlocator/locate/verdict.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <nlohmann/json.hpp>

#include "nanlocator/error.hpp"

namespace nanlocator {
namespace {

using testing::HasSubstr;

Verdict example_verdict() {
  Verdict verdict;
  verdict.run_id = "run-1";
  verdict.iteration = 1284;
  verdict.status = VerdictStatus::partial;
  Origin origin;
  origin.phase = Phase::grad_local;
  origin.direction = Direction::backward;
  origin.iteration = 1284;
  origin.microbatch = 2;
  origin.coordinates = RankCoordinates{.rank = 5, .world_size = 8, .tp = {1, 2}, .host = "a17"};
  origin.candidates = {5};
  origin.data_parallel_replica = 1;
  origin.parameter = "decoder.layers.3.weight";
  origin.tensor = OriginTensor{.role = "main_grad",
                               .shape = {192, 128},
                               .dtype = "bfloat16",
                               .nan = 3,
                               .first_bad = 17 * 128 + 3,
                               .first_bad_index = {17, 3},
                               .absmax_finite = 0.1};
  origin.cause = Cause::operator_undefined;
  origin.confidence = Confidence::high;
  origin.evidence = {"one", "two"};
  origin.refutation = "a finite result in float64";
  origin.action = "add an epsilon";
  origin.clean_before = "decoder.layers.3.bias";
  Origin unknown;
  unknown.candidates = {0, 1, 2};
  unknown.is_on_every_candidate = true;
  verdict.origins = {origin, unknown};
  verdict.spread = {{0, 5}, {"b", "a"}, Phase::grad_local};
  verdict.clean = {"c"};
  verdict.silent_ranks = {7};
  verdict.notes = {"a note"};
  return verdict;
}

TEST(Verdict, HasTheDocumentedKeysAndNullWhereNothingIsKnown) {
  const auto json = nlohmann::json::parse(to_json(example_verdict()));
  EXPECT_EQ(json["version"], 1);
  EXPECT_EQ(json["status"], "partial");
  EXPECT_EQ(json["rerun"]["done"], false);
  EXPECT_TRUE(json["rerun"]["reproduced"].is_null());
  const auto& origin = json["origins"][0];
  EXPECT_EQ(origin["coordinates"]["tp"]["rank"], 1);
  EXPECT_EQ(origin["tensor"]["first_bad_index"], nlohmann::json({17, 3}));
  EXPECT_TRUE(origin["module"].is_null());
  EXPECT_TRUE(origin["bundle"].is_null());
  const auto& unknown = json["origins"][1];
  for (const char* key : {"direction", "microbatch", "chunk", "coordinates", "parameter", "tensor",
                          "operator", "data_parallel_replica"}) {
    EXPECT_TRUE(unknown.at(key).is_null()) << key;
  }
}

TEST(Verdict, IsReadBackAsItWasWritten) {
  const std::string text = to_json(example_verdict());
  const Verdict verdict = verdict_from_json(text, "verdict.json");
  EXPECT_EQ(to_json(verdict), text);
  EXPECT_EQ(verdict.origins[0].coordinates->host, "a17");
  EXPECT_EQ(verdict.origins[0].tensor->first_bad, 17 * 128 + 3);
  EXPECT_EQ(verdict.origins[0].tensor->absmax_finite, 0.1);
  EXPECT_FALSE(verdict.origins[1].tensor);
  EXPECT_EQ(verdict.spread.first_seen, Phase::grad_local);
}

TEST(Verdict, WhatIsNotInTheDocumentedFormIsRefusedByName) {
  const auto expect_refused = [](auto change, const std::string& named) {
    auto json = nlohmann::json::parse(to_json(example_verdict()));
    change(json);
    try {
      (void)verdict_from_json(json.dump(), "verdict.json");
      ADD_FAILURE() << "accepted without " << named;
    } catch (const FormatError& error) {
      EXPECT_THAT(error.what(), HasSubstr("verdict.json"));
      EXPECT_THAT(error.what(), HasSubstr(named));
    }
  };
  expect_refused([](auto& json) { json["version"] = 2; }, "version");
  expect_refused([](auto& json) { json["status"] = "fine"; }, "status");
  expect_refused([](auto& json) { json["origins"] = 3; }, "origins");
  expect_refused([](auto& json) { json["origins"][1]["phase"] = "x"; }, "origins[1].phase");
  expect_refused([](auto& json) { json["origins"][0]["cause"] = "bad luck"; }, "origins[0].cause");
  expect_refused([](auto& json) { json["origins"][0]["tensor"]["shape"] = {-1}; },
                 "tensor.shape[0]");
  expect_refused([](auto& json) { json["spread"]["ranks"] = {"a"}; }, "spread.ranks[0]");
  expect_refused([](auto& json) { json.erase("notes"); }, "notes");
  EXPECT_THROW((void)verdict_from_json("", "verdict.json"), FormatError);
  EXPECT_THROW((void)verdict_from_json(std::string(100'000, '['), "verdict.json"), FormatError);
}

TEST(Verdict, EveryCutIsRefused) {
  const std::string text = to_json(example_verdict());
  for (std::size_t length = 0; length < text.size() - 2; length += 7) {
    EXPECT_THROW((void)verdict_from_json(std::string_view(text).substr(0, length), "x"),
                 FormatError);
  }
}

}  // namespace
}  // namespace nanlocator
