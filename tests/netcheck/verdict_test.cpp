#include "netcheck/verdict.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "nanlocator/error.hpp"
#include "netcheck/text.hpp"

namespace nanlocator::netcheck {
namespace {

using Json = nlohmann::ordered_json;
using ::testing::HasSubstr;
using ::testing::Not;

Json rank_result(int rank) {
  return {{"rank", rank},           {"host", "a" + std::to_string(rank / 4)},
          {"local_rank", rank % 4}, {"answered", true},
          {"ended", "finished"},    {"place", nullptr},
          {"own_seconds", 0.0002}};
}

Json place(const std::string& group, std::vector<int> ranks, const std::string& state) {
  return {{"stage", "collectives"}, {"step", "all_reduce bf16 1 KiB"},
          {"group", group},         {"ranks", ranks},
          {"sequence", 12},         {"state", state}};
}

Json run_of(int ranks) {
  Json results = {{"world_size", ranks}, {"backend", "gloo"}, {"seconds", 2.0}};
  results["differences"] = Json::array();
  for (int rank = 0; rank < ranks; ++rank) results["ranks"].push_back(rank_result(rank));
  return results;
}

Json verdict_of(const Json& results) {
  return Json::parse(make_verdict(results.dump()));
}

TEST(NetcheckVerdict, RanksThatAllFinishedAreHealthy) {
  const auto verdict = verdict_of(run_of(8));
  EXPECT_EQ(verdict["verdict"], "healthy");
  EXPECT_TRUE(verdict["findings"].empty());
  EXPECT_TRUE(verdict["hosts"].empty());
}

TEST(NetcheckVerdict, AHangNamesTheRankItsHostTheGroupAndTheWaitingRanks) {
  auto results = run_of(8);
  for (const int rank : {4, 5}) {
    auto& each = results["ranks"][rank];
    each["ended"] = rank == 4 ? "deadline" : "stopped";
    each["place"] = place("tp[4,5]", {4, 5}, rank == 4 ? "launched" : "entered");
  }
  const auto verdict = verdict_of(results);
  EXPECT_EQ(verdict["verdict"], "hang");
  EXPECT_EQ(verdict["ranks"], Json({5}));
  EXPECT_EQ(verdict["hosts"], Json({"a1"}));
  const auto evidence = verdict["findings"][0]["evidence"].dump();
  EXPECT_THAT(evidence,
              HasSubstr("rank 5 on host a1 reached all_reduce bf16 1 KiB on group tp[4,5]"));
  EXPECT_THAT(evidence, HasSubstr("rank 4 waits for it"));
}

TEST(NetcheckVerdict, ADeadRankExplainsTheErrorsOfTheOthers) {
  auto results = run_of(3);
  for (const int rank : {0, 1}) {
    results["ranks"][rank]["ended"] = "error";
    results["ranks"][rank]["error"] = "Connection closed by peer";
    results["ranks"][rank]["place"] = place("WORLD", {0, 1, 2}, "launched");
  }
  results["ranks"][2] = {{"rank", 2},          {"host", "a0"},
                         {"local_rank", 2},    {"answered", false},
                         {"process", "ended"}, {"place", place("WORLD", {0, 1, 2}, "launched")}};
  const auto verdict = verdict_of(results);
  EXPECT_EQ(verdict["verdict"], "hang");
  EXPECT_EQ(verdict["ranks"], Json({2}));
  EXPECT_THAT(verdict["findings"][0]["evidence"][0], HasSubstr("has ended inside all_reduce"));
}

TEST(NetcheckVerdict, ARankThatOnlyReceivedASignalIsNotBlamed) {
  auto results = run_of(4);
  for (const int rank : {0, 1}) {
    results["ranks"][rank]["ended"] = "deadline";
    results["ranks"][rank]["place"] = place("tp[0,1]", {0, 1}, rank == 0 ? "launched" : "entered");
  }
  for (const int rank : {2, 3}) {  // busy with a step of their own when the end was requested
    results["ranks"][rank]["ended"] = "stopped";
    results["ranks"][rank]["place"] = place("tp[2,3]", {2, 3}, "launched");
  }
  const auto verdict = verdict_of(results);
  EXPECT_EQ(verdict["ranks"], Json({1}));
  EXPECT_EQ(verdict["findings"].size(), 1U);
}

TEST(NetcheckVerdict, ARunThatASignalEndedIsInterruptedWithoutBlame) {
  auto results = run_of(2);
  for (auto& rank : results["ranks"]) {
    rank["ended"] = "signal";
    rank["place"] = place("WORLD", {0, 1}, "launched");
  }
  const auto verdict = verdict_of(results);
  EXPECT_EQ(verdict["verdict"], "interrupted");
  EXPECT_TRUE(verdict["findings"].empty());
}

TEST(NetcheckVerdict, AWrongElementThatAllReceiversSeeBlamesItsSender) {
  auto results = run_of(4);
  for (const int rank : {0, 1, 3}) {
    results["ranks"][rank]["wrong"] = Json::array({{{"sequence", 5},
                                                    {"element", 17},
                                                    {"senders", {2}},
                                                    {"receivers", {0, 1, 2, 3}},
                                                    {"text", "got 37 instead of 29"}}});
  }
  const auto verdict = verdict_of(results);
  EXPECT_EQ(verdict["verdict"], "wrong result");
  EXPECT_EQ(verdict["ranks"], Json({2}));
}

TEST(NetcheckVerdict, TheRareVersionIsTheSkew) {
  auto results = run_of(4);
  results["differences"].push_back(
      {{"what", "torch"}, {"values", {{"2.11.0", {0, 1, 2}}, {"2.10.0", {3}}}}});
  const auto verdict = verdict_of(results);
  EXPECT_EQ(verdict["verdict"], "version skew");
  EXPECT_EQ(verdict["ranks"], Json({3}));
  EXPECT_TRUE(verdict["hosts"].empty());  // it needs another installation, not another host
}

TEST(NetcheckVerdict, TwoEquallyCommonVersionsBlameNoSingleRank) {
  auto results = run_of(2);
  results["differences"].push_back(
      {{"what", "torch"}, {"values", {{"2.11.0", {0}}, {"2.10.0", {1}}}}});
  EXPECT_EQ(verdict_of(results)["ranks"], Json({0, 1}));
}

TEST(NetcheckVerdict, ASlowRankExplainsBothOfItsSlowEdges) {
  auto results = run_of(4);
  for (int from = 0; from < 4; ++from) {
    const bool is_slow = from == 1 || from == 2;
    results["ranks"][from]["edges"] = Json::array(
        {{{"from", from}, {"to", (from + 1) % 4}, {"seconds", is_slow ? 0.1 : 0.0003}}});
  }
  const auto verdict = verdict_of(results);
  EXPECT_EQ(verdict["verdict"], "slow link");
  EXPECT_EQ(verdict["ranks"], Json({2}));
}

TEST(NetcheckVerdict, OneSlowEdgeNamesBothEnds) {
  auto results = run_of(4);
  for (int from = 0; from < 4; ++from) {
    results["ranks"][from]["edges"] = Json::array(
        {{{"from", from}, {"to", (from + 1) % 4}, {"seconds", from == 1 ? 0.1 : 0.0003}}});
  }
  const auto verdict = verdict_of(results);
  EXPECT_EQ(verdict["ranks"], Json({1, 2}));
  EXPECT_EQ(verdict["findings"][0]["separated"], false);
}

TEST(NetcheckVerdict, SomeMillisecondsOfABusyHostAreNotAFinding) {
  auto results = run_of(4);
  results["ranks"][1]["own_seconds"] = 0.009;
  EXPECT_EQ(verdict_of(results)["verdict"], "healthy");
}

TEST(NetcheckVerdict, AFaultyDeviceIsTheHeadlineBesideTheWrongResultsItMakes) {
  auto results = run_of(2);
  results["ranks"][1]["device_failures"] = {"matmul bf16 differs from itself"};
  results["ranks"][1]["wrong"] = Json::array({{{"sequence", 5},
                                               {"element", 0},
                                               {"senders", {1}},
                                               {"receivers", {1}},
                                               {"text", "got 1 instead of 2"}}});
  const auto verdict = verdict_of(results);
  EXPECT_EQ(verdict["verdict"], "faulty device");
  EXPECT_EQ(verdict["findings"].size(), 2U);
}

// Ranks whose self-test gave these bits for one operator.
Json run_with_fingerprints(const std::vector<std::string>& fingerprints) {
  auto results = run_of(static_cast<int>(fingerprints.size()));
  for (std::size_t rank = 0; rank < fingerprints.size(); ++rank) {
    results["ranks"][rank]["computes_with"] = "H100, torch 2.11";
    results["ranks"][rank]["fingerprints"] = {{"gemm in float32", fingerprints[rank]},
                                              {"max in float32", "same"}};
  }
  return results;
}

TEST(NetcheckVerdict, ADeviceThatDiffersFromMostOfItsKindIsFaulty) {
  const auto verdict = verdict_of(run_with_fingerprints({"a", "a", "b", "a"}));
  EXPECT_EQ(verdict["verdict"], "faulty device");
  EXPECT_EQ(verdict["ranks"], Json({2}));
  EXPECT_THAT(verdict["findings"][0]["evidence"][0],
              HasSubstr("gemm in float32 gives other bits than on ranks 0-1, 3"));
}

TEST(NetcheckVerdict, TwoDevicesWithDifferentBitsBlameNoSingleRank) {
  const auto verdict = verdict_of(run_with_fingerprints({"a", "b"}));
  EXPECT_EQ(verdict["ranks"], Json({0, 1}));
  EXPECT_EQ(verdict["findings"][0]["separated"], false);
  EXPECT_THAT(verdict["findings"][0]["action"], HasSubstr("may be faulty"));
}

TEST(NetcheckVerdict, OperatorsWithTheSameFindingAreOneLineOfEvidence) {
  auto results = run_with_fingerprints({"a", "b"});
  for (const int rank : {0, 1}) {
    auto& fingerprints = results["ranks"][rank]["fingerprints"];
    for (const char* name : {"norm", "softmax", "sum", "tanh"}) fingerprints[name] = rank;
    for (auto& fingerprint : fingerprints) fingerprint = fingerprint.dump();
  }
  const auto verdict = verdict_of(results);
  ASSERT_EQ(verdict["findings"].size(), 1);
  EXPECT_EQ(verdict["findings"][0]["evidence"],
            Json({"gemm in float32, norm, softmax and 2 more give different bits on ranks "
                  "0-1, though all compute with H100, torch 2.11"}));
}

TEST(NetcheckVerdict, MemoryThatTheTimeDidNotCoverIsANote) {
  auto results = run_of(3);
  for (const int rank : {0, 1}) results["ranks"][rank]["memory_tests_cut"] = 3 - rank;
  const auto verdict = verdict_of(results);
  EXPECT_EQ(verdict["verdict"], "healthy");
  EXPECT_EQ(verdict["notes"], Json({"the time (half a second with --quick, else 20 s) was too "
                                    "short for all memory tests on ranks 0-1"}));
  EXPECT_EQ(verdict["per_rank"][0]["memory_tests_cut"], 3);
}

TEST(NetcheckVerdict, DevicesOfTwoKindsMayHaveDifferentBits) {
  auto results = run_with_fingerprints({"a", "a", "b", "b"});
  for (const int rank : {2, 3}) results["ranks"][rank]["computes_with"] = "A100, torch 2.11";
  EXPECT_EQ(verdict_of(results)["verdict"], "healthy");
}

TEST(NetcheckVerdict, ClocksThatAreSomeSecondsApartAreANoteAndMoreThanAMinuteIsAFinding) {
  auto results = run_of(4);
  results["differences"].push_back({{"what", "clock"},
                                    {"values", {{"the median", {0, 1, 2}}, {"+20 s", {3}}}},
                                    {"seconds", 20.0}});
  auto verdict = verdict_of(results);
  EXPECT_EQ(verdict["verdict"], "healthy");
  EXPECT_EQ(verdict["notes"], Json({"clock is the median on ranks 0-2, +20 s on rank 3"}));
  results["differences"][0]["seconds"] = 61.0;
  verdict = verdict_of(results);
  EXPECT_EQ(verdict["verdict"], "version skew");
  EXPECT_EQ(verdict["ranks"], Json({3}));
  EXPECT_TRUE(verdict["notes"].empty());
}

TEST(NetcheckVerdict, ItsHeadlineIsTheVerdictWithTheFirstEvidence) {
  EXPECT_EQ(headline_of(make_verdict(run_of(2).dump())), "netcheck: healthy");
  EXPECT_THAT(headline_of(make_verdict(run_with_fingerprints({"a", "a", "b"}).dump())),
              HasSubstr("netcheck: faulty device: rank 2 on host a0, device 2: gemm"));
}

TEST(NetcheckVerdict, NcclErrorsComeWithHints) {
  auto results = run_of(2);
  results["ranks"][0]["ended"] = "error";
  results["ranks"][0]["error"] = "NCCL error: unhandled system error";
  results["ranks"][0]["place"] = place("WORLD", {0, 1}, "launched");
  EXPECT_THAT(verdict_of(results)["hints"].dump(), HasSubstr("NCCL_SOCKET_IFNAME"));
  EXPECT_TRUE(verdict_of(run_of(2))["hints"].empty());
}

TEST(NetcheckVerdict, AnInvalidResultIsAFormatError) {
  EXPECT_THROW((void)make_verdict("{"), FormatError);
  EXPECT_THROW((void)make_verdict(R"({"ranks": [{"rank": 0}]})"), FormatError);
}

TEST(NetcheckText, HasTheFamiliarLineOfEachRankAndNoControlCharacters) {
  auto results = run_of(2);
  results["ranks"][1]["host"] = "evil\x1b[2J";
  const auto text = format_verdict(make_verdict(results.dump()));
  EXPECT_THAT(text, HasSubstr("[a0-0] is OK (global rank: 0/2)\n"));
  EXPECT_THAT(text, HasSubstr("verdict: healthy (2 ranks, gloo, 2.0 s)"));
  EXPECT_THAT(text, Not(HasSubstr("\x1b")));
}

}  // namespace
}  // namespace nanlocator::netcheck
