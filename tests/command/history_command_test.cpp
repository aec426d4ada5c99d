#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pty.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "command/run_command.hpp"
#include "nanlocator/record/history.hpp"

namespace nanlocator {
namespace {

using namespace testing;  // the planted files, run_command
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

constexpr float kUnseen = std::numeric_limits<float>::quiet_NaN();

/// Three parameters over some steps: one grows by seven decades, one is constant, one falls.
History planted(int rank, std::int64_t last = 108, int steps = 8) {
  History history;
  history.run_id = "monday";
  history.coordinates.rank = history.coordinates.dp.rank = rank;
  history.coordinates.world_size = history.coordinates.dp.size = 2;
  history.coordinates.host = "a17";
  history.phase = "grad_local";
  history.parameters = {{0, "layers.0.stays", {}, {}, {}},
                        {1, "layers.0.grows", {}, {}, {}},
                        {2, "layers.1.falls", {}, {}, {}}};
  for (int step = 0; step < steps; ++step) {
    history.iterations.push_back(last - steps + 1 + step);
    const float values[] = {
        2, std::pow(10.0F, 7.0F * static_cast<float>(step) / static_cast<float>(steps - 1)),
        std::pow(0.5F, static_cast<float>(step))};
    for (int p = 0; p < 3; ++p) {
      const bool is_seen = step != 2;
      history.parameters[p].absmax.push_back(is_seen ? values[p] : kUnseen);
      history.parameters[p].norm.push_back(is_seen ? 3 * values[p] : kUnseen);
      history.parameters[p].nonfinite.push_back(p == 1 && step == steps - 1 ? 5 : 0);
    }
  }
  return history;
}

class HistoryCommand : public ::testing::Test {
 protected:
  HistoryCommand() {
    append_history(folder_.path(), planted(0));
    append_history(folder_.path(), planted(1));
  }
  [[nodiscard]] CommandResult run(std::vector<std::string> arguments) const {
    arguments.insert(arguments.begin(), {"history", folder_.path().string()});
    return run_command(std::move(arguments));
  }
  TemporaryFolder folder_;
};

TEST_F(HistoryCommand, PlotsAParameterInPlainTextIfStdoutIsNotATerminal) {
  const auto result = run({"--param", "grows", "--rank", "1"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.err, "");
  EXPECT_EQ(result.out,
            "layers.0.grows  rank 1 (dp1, host a17)  absmax, last over first 1e+07\n"
            "     1e+07 |       *\n"
            "           |     **\n"
            "           |    *\n"
            "           |   *\n"
            "           | *\n"
            "         1 |*\n"
            "NaN or Inf         x\n"
            "            step 101 to 108\n");
}

TEST_F(HistoryCommand, ShowsTheFastestGrowingFirstAndCountsTheOthers) {
  const auto result = run({"--rank", "0", "--top", "2"});
  const auto grows = result.out.find("layers.0.grows");
  const auto stays = result.out.find("layers.0.stays");
  ASSERT_NE(grows, std::string::npos);
  ASSERT_NE(stays, std::string::npos);
  EXPECT_LT(grows, stays);
  EXPECT_THAT(result.out, AllOf(Not(HasSubstr("layers.1.falls")), HasSubstr("2 of 3")));
}

TEST_F(HistoryCommand, FindsNamesAsMapFindDoes) {
  const auto names_of = [&](const std::string& pattern) {
    std::vector<std::string> names;
    const auto json = json_of(run({"--json", "--rank", "0", "--param", pattern}));
    for (const auto& match : json["matches"]) {
      names.push_back(match["name"]);
    }
    return names;
  };
  EXPECT_THAT(names_of("layers.0"), ElementsAre("layers.0.grows", "layers.0.stays"));
  EXPECT_THAT(names_of("layers.*.?alls"), ElementsAre("layers.1.falls"));
}

TEST_F(HistoryCommand, PrintsJson) {
  const auto json = json_of(run({"--param", "grows", "--metric", "norm", "--json"}));
  EXPECT_EQ(json["version"], 1);
  EXPECT_EQ(json["metric"], "norm");
  EXPECT_EQ(json["matched"], 2);
  const auto& match = json["matches"][0];
  EXPECT_EQ(match["coordinates"]["rank"], 0);
  EXPECT_EQ(match["id"], 1);
  EXPECT_EQ(match["phase"], "grad_local");
  EXPECT_EQ(match["iterations"], nlohmann::json({101, 102, 103, 104, 105, 106, 107, 108}));
  EXPECT_EQ(match["values"], nlohmann::json({3, 30, nullptr, 3000, 30000, 3e5, 3e6, 3e7}));
  EXPECT_EQ(match["nonfinite"][7], 5);
  EXPECT_NEAR(match["growth"].get<double>(), 1e7, 1);
}

TEST_F(HistoryCommand, ShowsTheFindingOfAStep) {
  append_history(folder_.path(), planted(0, 208));
  EXPECT_THAT(run({"--rank", "0"}).out, HasSubstr("step 201 to 208"));
  EXPECT_THAT(run({"--rank", "0", "--step", "108"}).out, HasSubstr("step 101 to 108"));
}

TEST_F(HistoryCommand, SaysWhatToDoIfThereIsNothing) {
  const auto no_name = run({"--param", "nothing"});
  EXPECT_EQ(no_name.exit_code, 1);
  EXPECT_THAT(no_name.out, AllOf(HasSubstr("nothing"), HasSubstr("nanlocator map find")));
  const auto no_step = run({"--step", "5"});
  EXPECT_EQ(no_step.exit_code, 1);
  EXPECT_THAT(no_step.out, HasSubstr("no history of step 5"));
  const TemporaryFolder empty;
  const auto nothing = run_command({"history", empty.path().string()});
  EXPECT_EQ(nothing.exit_code, 1);
  EXPECT_THAT(nothing.out, HasSubstr("when there is a finding"));
  EXPECT_EQ(json_of(run({"--param", "nothing", "--json"}))["matched"], 0);
}

TEST_F(HistoryCommand, WrongUseIsOneClearLine) {
  for (const std::vector<std::string>& arguments : std::vector<std::vector<std::string>>{
           {"--metric", "sum"}, {"--step", "-1"}, {"--top", "x"}}) {
    const auto result = run(arguments);
    EXPECT_EQ(result.exit_code, 2) << arguments[0];
    EXPECT_THAT(result.err, StartsWith("nanlocator: "));
    EXPECT_EQ(std::ranges::count(result.err, '\n'), 1);
  }
  EXPECT_EQ(run_command({"history", (folder_ / "nowhere").string()}).exit_code, 2);
}

TEST_F(HistoryCommand, ANameCannotSteerTheTerminal) {
  auto history = planted(0, 308);
  history.parameters[1].name = "\x1b[2Jlayers.0.grows";
  append_history(folder_.path(), history);
  EXPECT_THAT(run({"--rank", "0"}).out, AllOf(HasSubstr("\\x1b[2J"), Not(HasSubstr("\x1b"))));
}

/// What the command prints on a terminal of `columns` columns.
std::string on_terminal(std::vector<std::string> arguments, unsigned short columns) {
  int controller = -1;
  int terminal = -1;
  winsize size{};
  size.ws_row = 24;
  size.ws_col = columns;
  if (::openpty(&controller, &terminal, nullptr, nullptr, &size) != 0) {
    throw std::runtime_error("openpty failed");
  }
  const std::string path = "/proc/self/fd/" + std::to_string(terminal);
  char name[128] = {};
  if (::ttyname_r(terminal, name, sizeof name) != 0) throw std::runtime_error("ttyname_r failed");
  std::string out;
  std::thread reader([&] {
    char bytes[4096];
    for (;;) {
      const auto count = ::read(controller, bytes, sizeof bytes);
      if (count <= 0) break;
      out.append(bytes, static_cast<std::size_t>(count));
    }
  });
  (void)run_command(std::move(arguments), {"TERM=xterm", "NO_COLOR=1"}, name);
  ::close(terminal);  // the reader's end: EIO
  reader.join();
  ::close(controller);
  std::erase(out, '\r');
  return out;
}

TEST_F(HistoryCommand, PlotsInBrailleWithinTheWidthOfATerminal) {
  const std::vector<std::string> arguments = {
      "history", folder_.path().string(), "--param", "grows", "--rank", "0"};
  EXPECT_EQ(on_terminal(arguments, 100),
            "layers.0.grows  rank 0 (dp0, host a17)  absmax, last over first 1e+07\n"
            "     1e+07 |     ⢀⠔⠁\n"
            "           |   ⢀⠔⠁\n"
            "           |   ⠂\n"
            "         1 |⡠⠂\n"
            "NaN or Inf         x\n"
            "            step 101 to 108\n");
  append_history(folder_.path(), planted(0, 208, 64));
  std::istringstream narrow(on_terminal(arguments, 40));
  int curves = 0;
  for (std::string line; std::getline(narrow, line);) {
    if (line.find('|') == std::string::npos) continue;
    ++curves;
    EXPECT_LE(std::ranges::count_if(line, [](char byte) { return (byte & 0xc0) != 0x80; }), 40)
        << line;
  }
  EXPECT_EQ(curves, 4);
}

}  // namespace
}  // namespace nanlocator
