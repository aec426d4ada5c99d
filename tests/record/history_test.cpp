#include "nanlocator/record/history.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include "nanlocator/error.hpp"
#include "temporary_folder.hpp"

namespace nanlocator {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::Gt;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using testing::TemporaryFolder;

constexpr float kUnseen = std::numeric_limits<float>::quiet_NaN();

RankCoordinates rank_of(int rank, int size) {
  RankCoordinates coordinates;
  coordinates.rank = coordinates.dp.rank = rank;
  coordinates.world_size = coordinates.dp.size = size;
  coordinates.host = "a17";
  coordinates.device = "cpu";
  return coordinates;
}

History example(int rank = 0, std::vector<std::int64_t> iterations = {1282, 1283, 1284}) {
  History history;
  history.run_id = "run-1";
  history.coordinates = rank_of(rank, 4);
  history.phase = "grad_local";
  history.iterations = std::move(iterations);
  history.parameters = {
      {.id = 0, .name = "a", .norm = {0.1F, kUnseen, 3}, .absmax = {0.1F, kUnseen, 2}},
      {.id = 7, .name = "b.\"c\"", .norm = {1e-45F, 2, 0}, .absmax = {1e-45F, 1, 0}}};
  history.parameters[0].nonfinite = {0, 0, 4};
  history.parameters[1].nonfinite = {0, 0, 0};
  return history;
}

std::vector<std::uint32_t> bits_of(const std::vector<float>& numbers) {
  std::vector<std::uint32_t> bits;
  for (const float number : numbers) {
    bits.push_back(std::isnan(number) ? 1 : std::bit_cast<std::uint32_t>(number));
  }
  return bits;
}

void expect_equal(const History& a, const History& b) {
  EXPECT_EQ(a.run_id, b.run_id);
  EXPECT_EQ(a.attempt, b.attempt);
  EXPECT_EQ(a.coordinates, b.coordinates);
  EXPECT_EQ(a.phase, b.phase);
  EXPECT_EQ(a.iterations, b.iterations);
  ASSERT_EQ(a.parameters.size(), b.parameters.size());
  for (std::size_t i = 0; i < a.parameters.size(); ++i) {
    EXPECT_EQ(a.parameters[i].id, b.parameters[i].id);
    EXPECT_EQ(a.parameters[i].name, b.parameters[i].name);
    EXPECT_EQ(bits_of(a.parameters[i].norm), bits_of(b.parameters[i].norm));
    EXPECT_EQ(bits_of(a.parameters[i].absmax), bits_of(b.parameters[i].absmax));
    EXPECT_EQ(a.parameters[i].nonfinite, b.parameters[i].nonfinite);
  }
}

class HistoryFiles : public ::testing::Test {
 protected:
  std::vector<History> read(std::int64_t iteration = -1, std::optional<int> rank = std::nullopt) {
    notes_.clear();
    return read_histories(folder_.path(), iteration, notes_, rank);
  }

  TemporaryFolder folder_;
  std::vector<std::string> notes_;
};

TEST_F(HistoryFiles, AreReadAsTheyWereWrittenToTheLastBit) {
  std::mt19937 random(3);
  auto history = example();
  for (auto& parameter : history.parameters) {
    for (auto& number : parameter.norm) {
      do {
        number = std::abs(std::bit_cast<float>(static_cast<std::uint32_t>(random())));
      } while (!std::isfinite(number));
    }
  }
  append_history(folder_.path(), history);
  const auto read_back = read();
  ASSERT_THAT(read_back, SizeIs(1));
  expect_equal(read_back[0], history);
  EXPECT_THAT(notes_, IsEmpty());
}

TEST_F(HistoryFiles, GiveEachRanksLatestHistoryOrThatOfAStep) {
  append_history(folder_.path(), example(2, {10, 11, 12}));
  append_history(folder_.path(), example(2, {11, 12, 13}));
  append_history(folder_.path(), example(1, {10, 11, 12}));
  const auto latest = read();
  ASSERT_THAT(latest, SizeIs(2));
  EXPECT_EQ(latest[0].coordinates.rank, 1);
  EXPECT_EQ(latest[0].iterations.back(), 12);
  EXPECT_EQ(latest[1].iterations.back(), 13);
  EXPECT_THAT(read(12), SizeIs(2));
  EXPECT_THAT(read(13), SizeIs(1));
  EXPECT_THAT(read(11), IsEmpty());
  ASSERT_THAT(read(12, 2), SizeIs(1));
  EXPECT_EQ(read(12, 2)[0].coordinates.rank, 2);
  EXPECT_THAT(notes_, IsEmpty());
}

TEST_F(HistoryFiles, GiveTheLaterHistoryOfAStepWrittenTwice) {
  auto history = example();
  append_history(folder_.path(), history);
  history.parameters[0].name = "later";
  append_history(folder_.path(), history);
  ASSERT_THAT(read(1284), SizeIs(1));
  EXPECT_EQ(read(1284)[0].parameters[0].name, "later");
}

TEST_F(HistoryFiles, KeepTheWholeLinesOfATruncatedHistoryWithANote) {
  const auto text = to_jsonl(example());
  for (std::size_t bytes = 0; bytes < text.size(); ++bytes) {
    folder_.plant("history_tp0pp0dp0.jsonl", text.substr(0, bytes));
    const auto histories = read();
    ASSERT_LE(histories.size(), 1U);
    if (bytes == 0) {
      EXPECT_THAT(histories, IsEmpty());
    }
    if (bytes + 1 < text.size()) {  // without its last byte, the newline, it is whole
      EXPECT_THAT(notes_, SizeIs(Gt(0U))) << bytes;
    }
  }
  EXPECT_THAT(read()[0].parameters, SizeIs(2));
  EXPECT_THAT(notes_, IsEmpty());
}

TEST_F(HistoryFiles, AppendOnANewLineAfterACut) {
  folder_.plant("history_tp0pp0dp0.jsonl", to_jsonl(example()).substr(0, 300));
  append_history(folder_.path(), example(0, {1285, 1286, 1287}));
  ASSERT_THAT(read(), SizeIs(1));
  EXPECT_EQ(read()[0].iterations.back(), 1287);
  EXPECT_THAT(notes_, IsEmpty());
}

TEST_F(HistoryFiles, LinesThatCannotBeReadAreSkippedAndNamed) {
  const std::string header = to_jsonl(example()).substr(0, to_jsonl(example()).find('\n') + 1);
  const std::string good =
      R"({"record":"parameter","id":3,"name":"a","norm":[1,2,3],"absmax":[1,2,3],"nonfinite":[0,0,0]})";
  for (
      const char* bad : {
          R"({"record":"parameter","id":4,"name":"a","norm":[1,2],"absmax":[1,2,3],"nonfinite":[0,0,0]})",
          R"({"record":"parameter","id":4,"name":"a","norm":[1,2,-3],"absmax":[1,2,3],"nonfinite":[0,0,0]})",
          R"({"record":"parameter","id":4,"name":"a","norm":[1,2,1e39],"absmax":[1,2,3],"nonfinite":[0,0,0]})",
          R"({"record":"parameter","id":4,"name":"a","norm":[1,2,1e999],"absmax":[1,2,3],"nonfinite":[0,0,0]})",
          R"({"record":"parameter","id":4,"name":"a","norm":[1,2,"inf"],"absmax":[1,2,3],"nonfinite":[0,0,0]})",
          R"({"record":"parameter","id":4,"name":"a","norm":[1,2,3],"absmax":[1,2,3],"nonfinite":[0,0,-1]})",
          R"({"record":"parameter","id":4,"name":"a","norm":[1,2,3],"absmax":7,"nonfinite":[0,0,0]})",
          R"({"record":"parameter","id":-1,"name":"a","norm":[1,2,3],"absmax":[1,2,3],"nonfinite":[0,0,0]})",
          R"({"record":"parameter","id":3,"name":"a","norm":[1,2,3],"absmax":[1,2,3],"nonfinite":[0,0,0]})",
          R"({"record":"parameters"})",
          R"([])",
          "garbage",
          "\xff\xfe",
      }) {
    folder_.plant("history_tp0pp0dp0.jsonl",
                  header + good + "\n" + bad + "\n" + R"({"record":"end","lines":1})" + "\n");
    ASSERT_THAT(read(), SizeIs(1)) << bad;
    EXPECT_THAT(read()[0].parameters, SizeIs(1)) << bad;
    ASSERT_THAT(notes_, SizeIs(1)) << bad;
    EXPECT_THAT(notes_[0], HasSubstr("line 3")) << bad;
  }
}

TEST_F(HistoryFiles, HeadersThatCannotBeTrueAreSkippedAndNamed) {
  const auto plant_with = [&](const std::string& from, const std::string& to) {
    auto text = to_jsonl(example());
    const auto at = text.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    folder_.plant("history_tp0pp0dp0.jsonl", text.replace(at, from.size(), to));
    EXPECT_THAT(read(), IsEmpty()) << to;
    EXPECT_THAT(notes_, SizeIs(1)) << to;
  };
  plant_with("[1282,1283,1284]", "[]");
  plant_with("[1282,1283,1284]", "[1282,1284,1283]");
  plant_with("[1282,1283,1284]", "[1283,1283,1284]");
  plant_with("grad_local", "grad_remote");
  plant_with(R"("version":1)", R"("version":2)");
  plant_with(R"("dp":{"rank":0,"size":4})", R"("dp":{"rank":1,"size":4})");  // another file's
  std::string many = "[0";
  for (std::size_t i = 1; i <= kHistorySteps; ++i) many += "," + std::to_string(i);
  plant_with("[1282,1283,1284]", many + "]");
}

TEST_F(HistoryFiles, LimitTheNotesOnAFileOfGarbage) {
  std::string text = to_jsonl(example()).substr(0, to_jsonl(example()).find('\n') + 1);
  for (int line = 0; line < 1000; ++line) text += "garbage\n";
  folder_.plant("history_tp0pp0dp0.jsonl", text);
  EXPECT_THAT(read(), SizeIs(1));
  EXPECT_THAT(notes_, SizeIs(21));
}

TEST_F(HistoryFiles, OfAnotherRunAreSkipped) {
  append_history(folder_.path(), example(0));
  auto other = example(1);
  other.run_id = "run-2";
  append_history(folder_.path(), other);
  EXPECT_THAT(read(), SizeIs(1));
  EXPECT_THAT(notes_, ElementsAre(HasSubstr("of another run")));
}

TEST_F(HistoryFiles, AMissingFolderIsAnErrorAndAnEmptyOneIsNot) {
  EXPECT_THAT(read(), IsEmpty());
  EXPECT_THAT(notes_, IsEmpty());
  EXPECT_THROW((void)read_histories(folder_ / "nowhere", -1, notes_), IoError);
  std::filesystem::create_directory(folder_ / "history_tp0pp0dp0.jsonl");
  EXPECT_THAT(read(), IsEmpty());
  EXPECT_THAT(notes_, Contains(HasSubstr("history_tp0pp0dp0.jsonl")));
}

// ---- the summary in the ledger ----

TEST(HistorySummary, CombinesAllParametersAndOmitsUnseenSteps) {
  History history;
  history.iterations = {5, 6, 7};
  history.parameters = {
      {.id = 0, .name = "a", .norm = {3, kUnseen, 6}, .absmax = {2, kUnseen, 1}, .nonfinite = {}},
      {.id = 1, .name = "b", .norm = {4, kUnseen, 8}, .absmax = {1, kUnseen, 5}, .nonfinite = {}}};
  history.parameters[0].nonfinite = {0, 0, 0};
  history.parameters[1].nonfinite = {0, 0, 1};
  const auto summary = summary_of(history);
  EXPECT_THAT(summary.iterations, ElementsAre(5, 7));
  EXPECT_THAT(summary.absmax, ElementsAre(2, 5));
  EXPECT_THAT(summary.norm, ElementsAre(5, 10));
  EXPECT_EQ(summary.parameter, "a") << "of step 5, the last without NaN and Inf";
}

TEST(HistorySummary, StaysWithinAFloat) {
  constexpr float kLargest = std::numeric_limits<float>::max();
  History history;
  history.iterations = {1};
  for (int i = 0; i < 2; ++i) {
    history.parameters.push_back({i, "p", {kLargest}, {kLargest}, {0}});
  }
  EXPECT_THAT(summary_of(history).norm, ElementsAre(kLargest));
}

TEST(MaximaBefore, CoverTheLastFiveStepsSeenBeforeTheFinding) {
  History history;
  history.iterations = {3, 4, 5, 6, 7, 8, 9, 10};
  history.parameters = {{.id = 0, .name = "a", .norm = {}, .absmax = {}, .nonfinite = {}},
                        {.id = 1,
                         .name = "b",
                         .norm = {},
                         .absmax = {1, 2, 3, kUnseen, 5, 6, 7, 8},
                         .nonfinite = {}}};
  EXPECT_EQ(maxima_before(history, "b", 10), (Maxima{{4, 5, 7, 8, 9}, {2, 3, 5, 6, 7}}));
  EXPECT_EQ(maxima_before(history, "b", 4), (Maxima{{3}, {1}}));
  EXPECT_EQ(maxima_before(history, "c", 10), Maxima{});
}

}  // namespace
}  // namespace nanlocator
