#include "nanlocator/report/verdict_json.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "nanlocator/error.hpp"
#include "nanlocator/report/sentences.hpp"

namespace nanlocator {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// A fact with all arguments at once. No kind has them all, but the JSON does not depend on that.
Fact every_argument() {
  return {.kind = FactKind::became,
          .source = FactSource::first_pass,
          .ranks = {1, 2},
          .peers = {3},
          .phase = Phase::backward,
          .microbatch = 0,
          .step = 7,
          .last_step = 9,
          .count = 4,
          .of = 5,
          .climbed_on = 2,
          .histories = 3,
          .value = std::numeric_limits<double>::quiet_NaN(),
          .last_value = -std::numeric_limits<double>::infinity(),
          .bad = BadCount{1, 2, 3, 100},
          .loss = true,
          .other_ranks = true,
          .parameter = "p",
          .module = "m",
          .op = "aten::log",
          .node = "LogBackward0",
          .role = "output[0]",
          .dtype = "float32",
          .group = "tp",
          .conclusion = "varies",
          .text = "text",
          .names = {"a", "b"},
          .values = {{"self", 0.0}}};
}

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
  origin.place_confidence = Confidence::high;
  origin.op = "aten::div.Tensor";
  origin.forward_op = "aten::sqrt";
  origin.code = CodeLine{"model.py", 412, "forward"};
  origin.detail = Detail::derivative_at_pole;
  origin.owner = Owner::model_author;
  origin.cause_confidence = Confidence::medium;
  origin.alternatives = {Suspect::upstream};
  origin.refutation = Refutation::finite_in_float64;
  origin.action = Action::guard_slope;
  origin.facts = {every_argument(), {.kind = FactKind::rerun_identical, .count = 212}};
  origin.clean_before = "decoder.layers.3.bias";
  Origin unknown;
  unknown.candidates = {0, 1, 2};
  unknown.is_on_every_candidate = true;
  verdict.origins = {origin, unknown};
  verdict.spread = {{0, 5}, {"b", "a"}, Phase::grad_local};
  verdict.clean = {"c"};
  verdict.silent_ranks = {7};
  verdict.notes = {"a note"};
  verdict.facts = {{.kind = FactKind::ledgers_cut_off, .ranks = {3, 4}}};
  verdict.job = {.on_bad = "stop",
                 .are_weights_updated = false,
                 .are_weights_finite = true,
                 .restart = Restart::before_step,
                 .restart_before = 1280};
  verdict.layout = JobLayout{
      .first_rank = *origin.coordinates, .ranks_per_host = 8, .mentioned = {*origin.coordinates}};
  verdict.decision = {.kind = DecisionKind::older_checkpoint,
                      .origin = 0,
                      .ranks = {origin.coordinates->rank},
                      .newest_step = 1279,
                      .ticket = Owner::cluster_operator,
                      .recurrence = Recurrence::same_device,
                      .rests_on = {FactKind::copies_clean}};
  verdict.launch = Launch{.found = "2026-11-27 02:58",
                          .scheduler = "slurm",
                          .job_id = "88213",
                          .checkpoint_dir = "/ckpt/run17",
                          .checkpoints = {{.step = 1200, .name = "iter_0001200"}}};
  return verdict;
}

TEST(Verdict, HasTheDocumentedKeysAndNullWhereNothingIsKnown) {
  const auto json = nlohmann::json::parse(to_json(example_verdict()));
  EXPECT_EQ(json["version"], 3);
  EXPECT_EQ(json["decision"]["kind"], "OLDER_CHECKPOINT");
  EXPECT_EQ(json["decision"]["hosts"], nlohmann::json({"a17"}));
  EXPECT_EQ(json["launch"]["job_id"], "88213");
  EXPECT_TRUE(json["launch"]["job_name"].is_null());
  EXPECT_EQ(json["narrative"]["restart"], "ONCE");
  EXPECT_EQ(json["status"], "partial");
  EXPECT_EQ(json["rerun"]["done"], false);
  EXPECT_TRUE(json["rerun"]["reproduced"].is_null());
  const auto& origin = json["origins"][0];
  EXPECT_EQ(origin["coordinates"]["tp"]["rank"], 1);
  EXPECT_EQ(origin["tensor"]["first_bad_index"], nlohmann::json({17, 3}));
  EXPECT_TRUE(origin["module"].is_null());
  EXPECT_TRUE(origin["bundle"].is_null());
  EXPECT_EQ(origin["code"]["line"], 412);
  EXPECT_EQ(origin["detail"], "derivative_at_pole");
  EXPECT_EQ(origin["owner"], "model_author");
  EXPECT_EQ(origin["place_confidence"], "high");
  EXPECT_EQ(origin["cause_confidence"], "medium");
  EXPECT_EQ(json["job"]["weights_updated"], false);
  const auto& unknown = json["origins"][1];
  for (const char* key : {"direction", "microbatch", "chunk", "coordinates", "parameter", "tensor",
                          "operator", "data_parallel_replica", "code", "detail"}) {
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
  EXPECT_THAT(verdict.notes, ElementsAre("a note"));
  EXPECT_EQ(verdict.facts, example_verdict().facts);
  EXPECT_EQ(verdict.decision, example_verdict().decision);
  EXPECT_EQ(verdict.launch->checkpoints, example_verdict().launch->checkpoints);
}

TEST(Verdict, OfVersion2TheDecisionIsMadeFromItsFacts) {
  auto json = nlohmann::json::parse(to_json(example_verdict()));
  json["version"] = 2;
  json.erase("decision");
  json.erase("launch");
  const Verdict verdict = verdict_from_json(json.dump(), "verdict.json");
  EXPECT_EQ(verdict.decision, decide(verdict));
  EXPECT_FALSE(verdict.launch);
}

TEST(Verdict, EachFactStandsBesideItsSentence) {
  const auto origin = nlohmann::json::parse(to_json(example_verdict()))["origins"][0];
  ASSERT_EQ(origin["facts"].size(), 2u);
  ASSERT_EQ(origin["evidence"].size(), 2u);
  EXPECT_EQ(origin["facts"][0]["kind"], "rerun_identical");  // in the report's order
  EXPECT_EQ(origin["evidence"][0],
            "the step was re-run and came out bit-identical (212 gradients): it repeats with the "
            "same data, weights and random numbers");
}

TEST(Verdict, EveryArgumentOfAFactSurvives) {
  const auto verdict = verdict_from_json(to_json(example_verdict()), "verdict.json");
  Fact read = verdict.origins[0].facts[1];
  Fact written = every_argument();
  ASSERT_TRUE(std::isnan(read.value.value()));
  written.value = read.value = 0;
  EXPECT_EQ(read, written);
}

TEST(Verdict, OfVersion1TheSentencesAreKeptAsTheyStand) {
  const Verdict verdict = verdict_from_json(R"({"version": 1, "run": "r", "iteration": 3,
    "status": "located", "origins": [{"phase": "backward", "direction": "backward",
    "iteration": 3, "microbatch": null, "chunk": null, "coordinates": null, "candidates": [1],
    "is_on_every_candidate": false, "data_parallel_replica": 0, "module": "m",
    "operator": "aten::div", "parameter": null, "tensor": null, "cause": "operator_undefined",
    "confidence": "high", "evidence": ["one", "two"], "refuted_by": "three",
    "action": "add an epsilon", "bundle": null, "clean_before": null, "clean_after": null}],
    "spread": {"ranks": [1], "parameters": ["p"], "first_seen": "backward"}, "clean": [],
    "rerun": {"done": false, "reproduced": null, "not_restored": []}, "silent_ranks": [],
    "notes": ["a note"]})",
                                            "verdict.json");
  const Origin& origin = verdict.origins.at(0);
  EXPECT_EQ(origin.place_confidence, Confidence::high);
  EXPECT_EQ(origin.owner, Owner::model_author);  // follows from the cause
  EXPECT_THAT(evidence_of(verdict, origin), ElementsAre("one", "two"));
  EXPECT_EQ(action_of(verdict, origin), "add an epsilon");
  EXPECT_THAT(verdict.notes, ElementsAre("a note"));
  // Writing it again gives version 3 with the same content.
  const Verdict again = verdict_from_json(to_json(verdict), "verdict.json");
  EXPECT_THAT(evidence_of(again, again.origins[0]), ElementsAre("one", "two"));
  EXPECT_EQ(action_of(again, again.origins[0]), "add an epsilon");
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
  expect_refused([](auto& json) { json["version"] = 4; }, "version");
  expect_refused([](auto& json) { json["status"] = "fine"; }, "status");
  expect_refused([](auto& json) { json["origins"] = 3; }, "origins");
  expect_refused([](auto& json) { json["origins"][1]["phase"] = "x"; }, "origins[1].phase");
  expect_refused([](auto& json) { json["origins"][0]["cause"] = "bad luck"; }, "origins[0].cause");
  expect_refused([](auto& json) { json["origins"][0]["tensor"]["shape"] = {-1}; },
                 "tensor.shape[0]");
  expect_refused([](auto& json) { json["origins"][0]["facts"][0]["kind"] = "x"; },
                 "origins[0].facts[0].kind");
  expect_refused([](auto& json) { json["origins"][0]["owner"] = "you"; }, "origins[0].owner");
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
