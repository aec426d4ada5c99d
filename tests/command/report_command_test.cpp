#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <thread>

#include "command/run_command.hpp"
#include "nanlocator/locate/locate.hpp"
#include "nanlocator/record/ledger.hpp"
#include "nanlocator/report/verdict_json.hpp"

namespace nanlocator {
namespace {

using namespace testing;  // TemporaryFolder, run_command
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

using Json = nlohmann::json;

/// Two data-parallel ranks; the gradient of rank 1 is NaN before the reduction.
Ledger ledger_of(int rank, std::int64_t iteration = 7,
                 const std::string& parameter = "layer1.weight") {
  Ledger ledger;
  ledger.run_id = "monday";
  ledger.iteration = iteration;
  ledger.coordinates = {.rank = rank, .world_size = 2, .dp = {rank, 2}};
  ledger.coordinates.host = "a17";
  ledger.coordinates.device = "cpu";
  ledger.backward_order = {{.id = 0, .name = parameter, .shape = {4, 8}}};
  ledger.coverage = {{Phase::grad_local, {0}}};
  ledger.notes = {"a note of rank " + std::to_string(rank)};
  if (rank != 1) return ledger;
  Sighting sighting;
  sighting.iteration = iteration;
  sighting.phase = Phase::grad_local;
  sighting.role = "main_grad";
  sighting.parameter_id = 0;
  sighting.parameter = parameter;
  sighting.dtype = "float32";
  sighting.shape = {4, 8};
  sighting.stats.numel = 32;
  sighting.stats.nan = 1;
  sighting.stats.first_bad = 17;
  ledger.sightings = {sighting};
  return ledger;
}

class ReportCommand : public ::testing::Test {
 protected:
  void plant(std::int64_t iteration = 7) {
    for (const int rank : {0, 1}) append_ledger(folder_.path(), ledger_of(rank, iteration));
  }
  void record(std::int64_t iteration, const std::string& state) {
    const Verdict verdict =
        locate(std::vector{ledger_of(0, iteration), ledger_of(1, iteration)}, 2);
    std::filesystem::create_directory(folder_ / "verdicts");
    folder_.plant("verdicts/step" + std::to_string(iteration) + ".json", to_json(verdict));
    folder_.plant("verdict.json", to_json(verdict));
    const Json status = {{"version", 1},
                         {"run_id", "monday"},
                         {"attempt", 0},
                         {"state", state},
                         {"iteration", iteration},
                         {"summary", "a line"},
                         {"verdict", "verdict.json"},
                         {"silent_ranks", Json::array()},
                         {"time", "2025-01-31T09:30:00Z"}};
    folder_.plant("status.new", status.dump());
    std::filesystem::rename(folder_ / "status.new", folder_ / "status.json");
  }
  CommandResult report(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {"report", folder_.path().string()});
    return run_command(std::move(arguments));
  }

  TemporaryFolder folder_;
};

void expect_wrong_use(const CommandResult& result, const std::string& part) {
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(result.out, "");
  EXPECT_THAT(result.err, AllOf(StartsWith("nanlocator: "), HasSubstr(part)));
  EXPECT_EQ(std::ranges::count(result.err, '\n'), 1) << result.err;
}

TEST_F(ReportCommand, SwappedLettersAreOneSlip) {
  EXPECT_THAT(run_command({"report", "--htlm"}).err, HasSubstr("did you mean --html?"));
}

TEST_F(ReportCommand, PrintsTheVerdictWithoutColoursInAPipe) {
  plant();
  const auto result = report({});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(result.err, "");
  EXPECT_THAT(
      result.out,
      StartsWith(
          "nanlocator ERROR[needs_trace] step 7: RESTART TRACED\n"
          "  restart ONLY TRACED | hosts unchanged | load the newest, after its check | page "
          "nobody | ticket model author\n"));
  EXPECT_THAT(result.out, HasSubstr("NaN (non-finite) in 1 of 32 elements (at [2, 1])"));
  EXPECT_THAT(result.out, Not(HasSubstr("\x1b")));
}

TEST_F(ReportCommand, ListsTheEvidenceOnRequest) {
  plant();
  EXPECT_THAT(report({}).out, Not(HasSubstr("  certainty")));
  EXPECT_THAT(report({"--verbose"}).out,
              AllOf(StartsWith("nanlocator ERROR[needs_trace]"),
                    HasSubstr("step 7: NaN in the gradients of rank 1 (dp1, host a17, cpu)"),
                    HasSubstr("\n  certainty    place ")));
}

TEST_F(ReportCommand, PrintsTheVerdictAsJsonWithTheNotesOnItsFiles) {
  plant();
  folder_.plant("ledger_bad.jsonl", "no JSON");
  const auto result = report({"--json"});
  EXPECT_EQ(result.exit_code, 1);
  const Verdict verdict = verdict_from_json(result.out, "stdout");
  ASSERT_EQ(verdict.origins.size(), 1U);
  EXPECT_EQ(verdict.origins[0].candidates, std::vector{1});
  EXPECT_THAT(verdict.notes.back(), HasSubstr("ledger_bad.jsonl: line 1"));
}

TEST_F(ReportCommand, AHealthyRunIsCleanAndExitsWithZero) {
  folder_.plant("param_manifest_tp0pp0dp0.json", "{}");
  const auto result = report({});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.out, HasSubstr("no findings. Healthy steps write nothing."));
  EXPECT_EQ(report({"--list"}).exit_code, 0);
  EXPECT_EQ(report({"--json"}).exit_code, 0);
}

TEST_F(ReportCommand, ListsTheStepsAndReportsTheNamedOne) {
  plant(7);
  plant(12);
  const auto result = report({"--list"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.out, AllOf(HasSubstr("\n     7  located  NaN in the gradients of rank 1"),
                                HasSubstr("\n    12  located  ")));
  const Json json = json_of(report({"--list", "--json"}));
  ASSERT_EQ(json["steps"].size(), 2U);
  EXPECT_EQ(json["steps"][1]["iteration"], 12);
  EXPECT_EQ(json["steps"][1]["status"], "located");
  EXPECT_THAT(report({"--step", "7"}).out, HasSubstr("] step 7: "));
  EXPECT_THAT(report({}).out, HasSubstr("] step 12: "));
}

TEST_F(ReportCommand, ShowsWhatRanksSaw) {
  plant();
  const auto result = report({"--rank", "0", "1"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.out, AllOf(HasSubstr("rank 0 (dp0, host a17, cpu): step 7"),
                                HasSubstr("it saw nothing bad"), HasSubstr("a note of rank 1"),
                                HasSubstr("layer1.weight")));
  EXPECT_EQ(report({"--rank", "0"}).exit_code, 0);
  EXPECT_THAT(report({"--rank", "9"}).out, HasSubstr("rank 9: no ledger of step 7"));
  const Json json = json_of(report({"--rank", "0-1", "--json"}));
  ASSERT_EQ(json["ranks"].size(), 2U);
  EXPECT_EQ(json["ranks"][1]["records"][0]["record"], "ledger");
  EXPECT_EQ(json["ranks"][1]["records"].back()["record"], "end");
  // The folder may also come last.
  EXPECT_EQ(run_command({"report", "--rank", "1", folder_.path()}).exit_code, 1);
}

TEST_F(ReportCommand, WritesThePage) {
  plant();
  const auto beside = report({"--html"});
  EXPECT_EQ(beside.exit_code, 1);
  EXPECT_EQ(beside.out, (folder_ / "report.html").string() + "\n");
  EXPECT_GT(std::filesystem::file_size(folder_ / "report.html"), 100U);
  const auto elsewhere = report({"--html=" + (folder_ / "other.html").string()});
  EXPECT_EQ(elsewhere.out, (folder_ / "other.html").string() + "\n");
  EXPECT_THAT(report({"--html=-"}).out, HasSubstr("<html"));
  EXPECT_EQ(run_command({"report", "--html", folder_.path()}).out, beside.out);
  expect_wrong_use(report({"--html=/no/folder/x.html"}), "name a file elsewhere: --html=FILE");
}

TEST_F(ReportCommand, NamesOfAHostileLedgerReachNoTerminal) {
  const std::string name = "\x1b]0;owned\x07<script>alert(1)</script>\xe2\x80\xae";
  for (const int rank : {0, 1}) append_ledger(folder_.path(), ledger_of(rank, 7, name));
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{}, {"--rank", "0-1"}, {"--list"}}) {
    const auto result = report(arguments);
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_THAT(result.out + result.err, AllOf(Not(HasSubstr("\x1b")), Not(HasSubstr("\x07")),
                                               Not(HasSubstr("\xe2\x80\xae"))));
  }
  EXPECT_THAT(report({"--html=-"}).out, Not(HasSubstr("<script>alert(1)")));
}

TEST_F(ReportCommand, WrongUseIsOneClearLine) {
  plant();
  expect_wrong_use(run_command({"report", "/no/such/folder"}), "there is no folder");
  expect_wrong_use(report({"--step", "8"}), "those with findings: 7");
  expect_wrong_use(report({"--rank", "x"}), "expected global ranks such as 3, 4-7 or 1,2");
  expect_wrong_use(report({"--watch=soon"}), "expected seconds");
  expect_wrong_use(report({"--html", "--json"}), "do not go together");
  const TemporaryFolder empty;
  expect_wrong_use(run_command({"report", empty.path()}), "is not the folder of a run");
}

// Until 0.1 a value could follow the option: `--html FILE`.
TEST_F(ReportCommand, AnOptionalValueWithoutItsEqualsSignIsRefusedWithWhatToType) {
  plant();
  expect_wrong_use(report({"--html", "page.html"}), "(did you mean --html=page.html?)");
  expect_wrong_use(run_command({"report", "--html", "page.html", folder_.path()}),
                   "(did you mean --html=page.html?)");
  expect_wrong_use(run_command({"report", "--html", "/no/page.html"}), "--html=/no/page.html");
  expect_wrong_use(report({"--watch", "1"}), "(did you mean --watch=1?)");
  expect_wrong_use(run_command({"report", "--watch", "1", folder_.path()}),
                   "(did you mean --watch=1?)");
  expect_wrong_use(run_command({"report", "--watch", "1"}), "(did you mean --watch=1?)");
}

TEST_F(ReportCommand, WatchTellsTheVerdictOfARunThatStopped) {
  record(7, "stopped");
  for (const auto& result : {report({"--watch"}), report({"--watch=0.1"}),
                             run_command({"report", "--watch", folder_.path()})}) {
    EXPECT_EQ(result.exit_code, 1) << result.err;
    EXPECT_THAT(result.out, AllOf(HasSubstr("] step 7: "),
                                  HasSubstr("stopped at step 7, 2025-01-31T09:30:00Z\n")));
  }
}

TEST_F(ReportCommand, WatchWaitsForTheFolderAndTellsEachVerdictOnce) {
  std::filesystem::remove(folder_.path());
  CommandResult result;
  std::thread watching([&] { result = report({"--watch=0.02"}); });
  const auto pause = [] { std::this_thread::sleep_for(std::chrono::milliseconds(400)); };
  pause();
  std::filesystem::create_directory(folder_.path());
  pause();
  record(7, "skipped");
  pause();
  record(12, "skipped");
  pause();
  record(15, "stopped");
  watching.join();
  EXPECT_EQ(result.exit_code, 1);
  std::size_t last = 0;
  for (const char* part :
       {"waiting for ", ": no findings so far\n", "] step 7: ", "skipped at step 7",
        "] step 12: ", "skipped at step 12", "] step 15: ", "stopped at step 15"}) {
    const std::size_t at = result.out.find(part, last);
    ASSERT_NE(at, std::string::npos) << part << " in\n" << result.out;
    EXPECT_EQ(result.out.find(part, at + 1), std::string::npos) << part << " stands twice";
    last = at;
  }
}

TEST(ReportOfARun, SaysThatALaterAttemptHasFoundNothing) {
  const TemporaryFolder run;
  for (const char* attempt : {"a0", "a1"}) {
    std::filesystem::create_directory(run / attempt);
    run.plant(std::string(attempt) + "/run.json", R"({"version": 1, "run_id": "monday"})");
  }
  for (const int rank : {0, 1}) append_ledger(run / "a0", ledger_of(rank));
  const auto result = run_command({"report", run.path().string()});
  EXPECT_THAT(result.err, HasSubstr("a1 was started after this attempt, a0, and has no finding so "
                                    "far"));
  EXPECT_THAT(run_command({"report", (run / "a0").string()}).err, Not(HasSubstr("a1 was")));
}

}  // namespace
}  // namespace nanlocator
