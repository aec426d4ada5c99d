#include "nanlocator/record/ledger.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cmath>
#include <fstream>
#include <limits>
#include <random>
#include <sstream>

#include "nanlocator/error.hpp"

namespace nanlocator {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

Ledger example_ledger() {
  Ledger ledger;
  ledger.run_id = "run-1";
  ledger.attempt = 2;
  ledger.iteration = 1284;
  ledger.coordinates = {.rank = 5,
                        .world_size = 8,
                        .tp = {1, 2},
                        .pp = {0, 2},
                        .dp = {1, 2},
                        .host = "a17",
                        .local_rank = 3,
                        .device = "cuda:3 GPU-6f2e 0000:1b:00.0"};
  ledger.is_backward_order_observed = true;
  ledger.gradient_norm = std::numeric_limits<double>::infinity();
  ledger.loss_scale = 1024;
  ledger.gradients_left_by = 11;
  ledger.no_rerun = "it added to gradients of an earlier step";
  ledger.absmax = 0.1;
  ledger.absmax_parameter = "b";
  ledger.weights_finite_after = 1283;
  ledger.optimizer_states = {{0, "exp_avg", {.numel = 3, .nan = 1, .first_bad = 2}},
                             {0, "main_param", {.numel = 3, .zeros = 3, .first_bad = -1}}};
  ledger.backward_order = {
      {.id = 1,
       .name = "b",
       .shape = {192, 128},
       .is_tied = true,
       .chunk = 1,
       .shard = {{64, 128}}},
      {.id = 0, .name = "a", .may_be_untouched = true, .is_tp_duplicate = true}};
  ledger.on_bad = "skip";
  ledger.history = HistorySummary{.iterations = {1281, 1283, 1284},
                                  .absmax = {0.1F, 3, 1e-45F},
                                  .norm = {0.2F, 3.4e38F, 0},
                                  .parameter = "b"};
  ledger.coverage = {{Phase::grad_local, {0, 1}}, {Phase::grad_norm, {}}};
  ledger.coverage.insert(ledger.coverage.begin(), {Phase::params_before, {0, 1}, {0.1F, 3.4e38F}});
  ledger.crossings = {{"tp", {0, 2, 4, 6, 7}, std::nullopt, "sent", 12},
                      {"pp", {1, 5}, 1, "received", 3}};
  ledger.crossings[0].not_scanned = {1, 4, 7, 9};
  ledger.crossings[0].is_unseen_by_member = true;
  ledger.crossings[1].has_unwatched = true;
  ledger.microbatches = {{2, 1, {"tokens: int64 [2, 16]"}}, {3, std::nullopt, {}}};
  Sighting sighting;
  sighting.iteration = 1284;
  sighting.microbatch = 2;
  sighting.phase = Phase::grad_local;
  sighting.module = "decoder";
  sighting.op = "aten::div";
  sighting.role = "main_grad";
  sighting.parameter_id = 1;
  sighting.parameter = "b";
  sighting.dtype = "float32";
  sighting.shape = {192, 128};
  sighting.stats = {.numel = 24576,
                    .nan = 3,
                    .zeros = 7,
                    .first_bad = 17 * 128 + 3,
                    .finite_min = -0.1,
                    .finite_max = 1.0 / 3.0,
                    .absmin = 5e-324,
                    .absmax = 1.0 / 3.0,
                    .sum_of_squares = 12.5,
                    .fingerprint = 0xfedcba9876543210};
  Sighting other = sighting;
  other.microbatch.reset();
  other.chunk = 1;
  other.parameter_id.reset();
  other.parameter.clear();
  other.module.clear();
  other.op.clear();
  other.stats = {.numel = 2, .nan = 2, .first_bad = 0};  // no finite element: the empty extremes
  Sighting received = other;
  received.role = "received";
  received.crossing = Crossing{.group = "pp", .members = {1, 5}, .peer = 1, .sequence = 2};
  received.position = 3;
  Sighting loss = other;
  loss.phase = Phase::loss;
  loss.valid_labels = 0;
  ledger.sightings = {sighting, other, received, loss};
  Birth birth;
  birth.kind = BirthKind::nan_from_inf;
  birth.sighting = sighting;
  birth.sighting.position = 0;
  birth.is_module_inferred = true;
  birth.node = "DivBackward0";
  birth.forward_op = "aten::div.Tensor";
  birth.parent = 0;
  Operand operand;
  operand.name = "self";
  operand.dtype = "float32";
  operand.shape = {192, 128};
  operand.stats = TensorStats{.numel = 192 * 128, .absmax = 3};
  operand.at_first_bad = std::numeric_limits<double>::infinity();
  birth.operands = {operand};
  birth.stack = {"model.py:12 in forward"};
  birth.reached = {{ReachedKind::loss, "loss"}};
  birth.bundle = "bundles/step1284-backward-rank5-decoder";
  birth.replay = ReplayConclusion::deterministic_undefined;
  birth.replay_lines = {"bad again"};
  ledger.births = {birth};
  ledger.rerun = Rerun{.reproduced = true,
                       .control_reproduced = std::nullopt,
                       .gradients = 12,
                       .changed = 1,
                       .bad_parameters = {0, 1},
                       .not_restored = {"the sampler"}};
  ledger.weight_values = {{"b", 17, -0.25}};
  ledger.collective_results = {{.phase = Phase::forward,
                                .microbatch = 2,
                                .module = "decoder",
                                .op = "c10d::allreduce_",
                                .crossing = {.group = "tp", .members = {4, 5}, .sequence = 9},
                                .fingerprint = 0xfedcba9876543210,
                                .absmax = 3,
                                .sum_of_squares = 17.5,
                                .zeros = 2}};
  ledger.notes = {"a note with \"quotes\", a\nline break and \xc3\xa9"};
  return ledger;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

std::string join(const std::vector<std::string>& lines) {
  std::string text;
  for (const auto& line : lines) text += line + "\n";
  return text;
}

TEST(Ledger, IsReadBackAsItWasWritten) {
  const Ledger ledger = example_ledger();
  EXPECT_THAT(ledgers_from_jsonl(to_jsonl(ledger), "x"), ElementsAre(ledger));
}

TEST(Ledger, IsOneJsonValuePerLineAndNamesItsVersion) {
  const auto lines = lines_of(to_jsonl(example_ledger()));
  ASSERT_EQ(lines.size(), 1u + 2 + 3 + 2 + 2 + 2 + 4 + 1 + 1 + 1 + 1 + 1 + 1 + 1);
  EXPECT_THAT(lines.front(), HasSubstr(R"({"record":"ledger","version":1,)"));
  EXPECT_THAT(lines.front(), HasSubstr(R"("gradient_norm":"inf")"));
  EXPECT_THAT(lines.back(), HasSubstr(R"({"record":"end","lines":21,"crc32":")"));
}

TEST(Ledger, SeveralLedgersFollowOneAnother) {
  Ledger second = example_ledger();
  second.iteration = 1290;
  const auto ledgers = ledgers_from_jsonl(to_jsonl(example_ledger()) + to_jsonl(second), "x");
  EXPECT_THAT(ledgers, ElementsAre(example_ledger(), second));
}

TEST(Ledger, TruncatedAtAnyByteIsNeverTakenForComplete) {
  const std::string text = to_jsonl(example_ledger());
  const std::size_t header = text.find('\n');
  for (std::size_t length = 0; length < text.size() - 1; ++length) {
    const std::string_view part = std::string_view(text).substr(0, length);
    if (length < header) {
      EXPECT_THROW((void)ledgers_from_jsonl(part, "x"), FormatError);
      continue;
    }
    const auto ledgers = ledgers_from_jsonl(part, "x");
    ASSERT_EQ(ledgers.size(), 1u);
    EXPECT_FALSE(ledgers.front().is_complete) << length;
    EXPECT_THAT(ledgers.front().notes, Contains(HasSubstr("cut off")));
  }
}

TEST(Ledger, ALineThatCannotBeReadIsSkippedNamedAndMakesTheLedgerIncomplete) {
  const std::vector<std::string> bad = {
      "not json",
      "{\"record\":\"sighting\"}",
      "{\"record\":\"sighting\",\"iteration\":1e999}",
      "{\"record\":\"coverage\",\"phase\":\"grad_local\",\"parameters\":[2,1]}",
      "{\"record\":\"coverage\",\"phase\":\"grad_local\",\"parameters\":[]}",  // occurs twice
      "{\"record\":\"coverage\",\"phase\":\"nowhere\",\"parameters\":[]}",
      "{\"record\":\"coverage\",\"phase\":7,\"parameters\":[]}",
      "{\"record\":\"parameter\",\"id\":99999999999999999999999}",
      "{\"record\":\"note\",\"text\":\"\xff\xfe\"}",
      "{\"record\":\"crossings\",\"group\":\"tp\",\"members\":[-1],\"peer\":null,\"role\":\"sent\","
      "\"count\":1}",
      "{\"record\":\"crossings\",\"group\":\"tp\",\"members\":[0],\"peer\":null,\"role\":\"sent\","
      "\"count\":-1}",
      "{\"record\":\"microbatch\",\"number\":1.5,\"chunk\":null,\"tensors\":[]}",
      "{\"record\":\"something new\"}",
      "[]",
      "null",
      std::string(100'000, '['),
      "{\"record\":" + std::string(100'000, '{'),
  };
  for (const auto& line : bad) {
    auto lines = lines_of(to_jsonl(example_ledger()));
    lines.insert(lines.begin() + 5, line);
    const auto ledgers = ledgers_from_jsonl(join(lines), "ledger.jsonl");
    ASSERT_EQ(ledgers.size(), 1u) << line.substr(0, 80);
    EXPECT_FALSE(ledgers.front().is_complete) << line.substr(0, 80);
    EXPECT_EQ(ledgers.front().sightings.size(), 4u) << line.substr(0, 80);
    EXPECT_THAT(ledgers.front().notes, Contains(HasSubstr("ledger.jsonl: line 6")))
        << line.substr(0, 80);
  }
}

TEST(Ledger, TheCountRevealsALostLine) {
  auto lines = lines_of(to_jsonl(example_ledger()));
  lines.erase(lines.begin() + 5);  // a sighting
  const auto ledgers = ledgers_from_jsonl(join(lines), "x");
  ASSERT_EQ(ledgers.size(), 1u);
  EXPECT_FALSE(ledgers.front().is_complete);
}

TEST(Ledger, AByteThatChangedWithoutBreakingALineIsNoticed) {
  const std::string text = to_jsonl(example_ledger());
  const std::size_t digit = text.find("\"numel\":24576") + 8;
  std::string damaged = text;
  damaged[digit] = '6';
  const auto ledgers = ledgers_from_jsonl(text + damaged, "x");
  ASSERT_EQ(ledgers.size(), 2u);
  EXPECT_TRUE(ledgers[0].is_complete);
  EXPECT_FALSE(ledgers[1].is_complete);
  EXPECT_EQ(ledgers[1].sightings.size(), 4u);
  EXPECT_THAT(ledgers[1].notes, Contains(HasSubstr("crc32: the ledger's bytes have changed")));
}

TEST(Ledger, GroupsOfManyRanksTakeALineOfFewBytes) {
  Ledger ledger = example_ledger();
  std::vector<int> stage(16'384);
  std::ranges::generate(stage, [rank = -8]() mutable { return rank += 8; });
  ledger.crossings = {{"tp_dp_cp", stage, std::nullopt, "sent", 1}};
  const std::string text = to_jsonl(ledger);
  EXPECT_THAT(text, HasSubstr(R"("members":[[0,131064,8]])"));
  EXPECT_EQ(ledgers_from_jsonl(text, "x").at(0).crossings.at(0).members.ranks(), stage);
}

TEST(Ledger, RanksUpToTheLargestNumberAreWritten) {
  Ledger ledger = example_ledger();
  constexpr int kLargest = std::numeric_limits<int>::max();
  ledger.crossings = {{"tp", RankList({kLargest - 1, kLargest}), std::nullopt, "sent", 1}};
  EXPECT_THAT(to_jsonl(ledger), HasSubstr(R"("members":[2147483646,2147483647])"));
}

TEST(Ledger, MembersThatAreNoAscendingProgressionsAreRefused) {
  for (const std::string members :
       {"[[5,1,1]]", "[[0,8,3]]", "[[0,8,0]]", "[[0,8,-1]]", "[[0,8]]", "[[0,8,1,2]]",
        "[[0,9,1],4]", "[[0,9,1],[8,20,4]]", "[[-4,8,4]]", "[[0,99999999999,1]]", "[\"0-8\"]",
        "[[0,8,1.5]]", "[2147483646,2147483647]", "[[0,16777216,1]]"}) {
    auto lines = lines_of(to_jsonl(example_ledger()));
    const std::string crossings = R"({"record":"crossings","group":"tp","members":)" + members +
                                  R"(,"peer":null,"role":"sent","count":1})";
    lines.insert(lines.begin() + 5, crossings);
    const auto ledgers = ledgers_from_jsonl(join(lines), "x");
    EXPECT_THAT(ledgers.at(0).notes, Contains(HasSubstr("x: line 6"))) << members;
    EXPECT_EQ(ledgers.at(0).crossings.size(), 2u) << members;
  }
}

TEST(Ledger, AHeaderWithinALedgerStartsTheNextOne) {
  auto lines = lines_of(to_jsonl(example_ledger()));
  lines.pop_back();
  const auto ledgers = ledgers_from_jsonl(join(lines) + to_jsonl(example_ledger()), "x");
  ASSERT_EQ(ledgers.size(), 2u);
  EXPECT_FALSE(ledgers[0].is_complete);
  EXPECT_EQ(ledgers[1], example_ledger());
}

TEST(Ledger, AHeaderThatCannotBeReadTakesItsLinesWithIt) {
  auto lines = lines_of(to_jsonl(example_ledger()));
  lines.front().replace(lines.front().find("\"version\":1"), 11, "\"version\":2");
  const auto ledgers = ledgers_from_jsonl(join(lines) + to_jsonl(example_ledger()), "x");
  ASSERT_EQ(ledgers.size(), 1u);
  EXPECT_TRUE(ledgers.front().is_complete);
  EXPECT_EQ(ledgers.front().sightings, example_ledger().sightings);
  EXPECT_THAT(ledgers.front().notes, Contains(HasSubstr("x: line 1")));
  EXPECT_THROW((void)ledgers_from_jsonl(join(lines), "x"), FormatError);
}

TEST(Ledger, TextWithoutAnyHeaderIsAFormatErrorThatNamesTheSource) {
  for (const std::string text : {"", "\n\n", "{}", "garbage\n", "\x00\x01\x02"}) {
    try {
      (void)ledgers_from_jsonl(text, "some.jsonl");
      FAIL() << "accepted: " << text;
    } catch (const FormatError& error) {
      EXPECT_THAT(error.what(), HasSubstr("some.jsonl"));
    }
  }
}

TEST(Ledger, CountsThatExceedTheElementsAreRefused) {
  std::string text = to_jsonl(example_ledger());
  text.replace(text.find("\"nan\":3"), 7, "\"nan\":24577");
  const auto ledgers = ledgers_from_jsonl(text, "x");
  EXPECT_FALSE(ledgers.front().is_complete);
  EXPECT_EQ(ledgers.front().sightings.size(), 3u);
}

TEST(Ledger, APositionIsWrittenWhereItIsKnown) {
  const auto lines = lines_of(to_jsonl(example_ledger()));
  EXPECT_THAT(lines, Contains(HasSubstr(R"("position":3)")).Times(1));  // what was received
  EXPECT_THAT(lines, Contains(HasSubstr(R"("position":0)")).Times(1));  // the birth
  EXPECT_THAT(lines, Contains(HasSubstr(R"("position")")).Times(2));
}

TEST(Ledger, APositionThatIsNoCountIsRefused) {
  for (const std::string position :
       {"-1", "1.5", "\"3\"", "true", "[3]", "{}", "9223372036854775808", "1e30"}) {
    std::string text = to_jsonl(example_ledger());
    text.replace(text.find(R"("position":3)"), 12, R"("position":)" + position);
    const auto ledgers = ledgers_from_jsonl(text, "x");
    EXPECT_FALSE(ledgers.at(0).is_complete) << position;
    EXPECT_EQ(ledgers.at(0).sightings.size(), 3U) << position;
    EXPECT_THAT(ledgers.at(0).notes, Contains(HasSubstr("position"))) << position;
  }
}

TEST(Ledger, RandomDamageNeverDoesMoreThanAFormatError) {
  const std::string text = to_jsonl(example_ledger());
  std::mt19937 random(1);
  int whole = 0;
  for (int round = 0; round < 5000; ++round) {
    std::string damaged = text;
    for (int strokes = 1 + static_cast<int>(random() % 8); strokes > 0; --strokes) {
      const std::size_t at = random() % damaged.size();
      switch (random() % 3) {
        case 0:
          damaged[at] = static_cast<char>(random());
          break;
        case 1:
          damaged.erase(at, 1 + random() % 40);
          break;
        case 2:
          damaged.insert(at, damaged.substr(random() % damaged.size(), random() % 40));
          break;
      }
      if (damaged.empty()) damaged = "x";
    }
    try {
      for (const Ledger& ledger : ledgers_from_jsonl(damaged, "x")) whole += ledger.is_complete;
    } catch (const FormatError&) {
    }
  }
  EXPECT_LT(whole, 5000);
}

TEST(Ledger, AFileOfGarbageDoesNotFillTheNotes) {
  auto lines = lines_of(to_jsonl(example_ledger()));
  lines.insert(lines.begin() + 1, 10'000, "garbage");
  const auto ledgers = ledgers_from_jsonl(join(lines), "x");
  EXPECT_LT(ledgers.front().notes.size(), 50u);
}

TEST(Ledger, NamesThatAreNotUtf8AreKeptReadable) {
  Ledger ledger = example_ledger();
  ledger.notes = {"bad \xff byte"};
  const auto ledgers = ledgers_from_jsonl(to_jsonl(ledger), "x");
  EXPECT_THAT(ledgers.front().notes, ElementsAre("bad \xef\xbf\xbd byte"));
  EXPECT_TRUE(ledgers.front().is_complete);
}

class LedgerFile : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = ::testing::TempDir() + "ledger_XXXXXX";
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    directory_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }
  [[nodiscard]] std::filesystem::path path() const { return directory_ / "ledger_tp1pp0dp1.jsonl"; }
  [[nodiscard]] std::string read() const {
    std::ifstream file(path(), std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  std::filesystem::path directory_;
};

TEST_F(LedgerFile, GrowsByOneLedgerPerIncident) {
  append_ledger(directory_, example_ledger());
  append_ledger(directory_, example_ledger());
  EXPECT_THAT(ledgers_from_jsonl(read(), "x"), ElementsAre(example_ledger(), example_ledger()));
}

TEST_F(LedgerFile, AfterACutOffWriteTheNextLedgerIsStillReadable) {
  std::ofstream(path()) << to_jsonl(example_ledger()).substr(0, 700);
  append_ledger(directory_, example_ledger());
  const auto ledgers = ledgers_from_jsonl(read(), "x");
  ASSERT_EQ(ledgers.size(), 2u);
  EXPECT_FALSE(ledgers[0].is_complete);
  EXPECT_EQ(ledgers[1], example_ledger());
}

TEST_F(LedgerFile, AMissingFolderAndAFullDiskAreIoErrorsThatNameThePath) {
  try {
    append_ledger(directory_ / "missing", example_ledger());
    FAIL();
  } catch (const IoError& error) {
    EXPECT_THAT(error.what(), HasSubstr("missing/ledger_tp1pp0dp1.jsonl"));
  }
  std::filesystem::create_symlink("/dev/full", path());
  EXPECT_THROW(append_ledger(directory_, example_ledger()), IoError);
}

/// Numbers that a step may well produce, or at the limits of their type.
class EdgeNumbers {
 public:
  explicit EdgeNumbers(unsigned seed) : random_(seed) {}

  double real() {
    using Limits = std::numeric_limits<double>;
    constexpr double kEdges[] = {0.0,
                                 -0.0,
                                 Limits::quiet_NaN(),
                                 Limits::infinity(),
                                 -Limits::infinity(),
                                 Limits::max(),
                                 Limits::lowest(),
                                 Limits::denorm_min(),
                                 0.1};
    return kEdges[random_() % std::size(kEdges)];
  }
  std::int64_t count() {
    constexpr std::int64_t kEdges[] = {0, 1, 4096, std::int64_t{1} << 53,
                                       std::numeric_limits<std::int64_t>::max()};
    return kEdges[random_() % std::size(kEdges)];
  }
  /// Includes the integer that an Inf is converted to.
  std::int64_t anything() {
    constexpr std::int64_t kEdges[] = {0,
                                       -1,
                                       -2147483648,
                                       7,
                                       std::numeric_limits<std::int64_t>::min(),
                                       std::numeric_limits<std::int64_t>::max()};
    return kEdges[random_() % std::size(kEdges)];
  }
  TensorStats stats() {
    TensorStats stats;
    stats.numel = count();
    stats.nan = stats.numel / 3;
    stats.neg_inf = stats.numel / 3;
    stats.zeros = stats.numel / 4;
    stats.first_bad = stats.numel - 1;
    stats.finite_min = real();
    stats.finite_max = real();
    stats.absmin = real();
    stats.absmax = real();
    stats.sum_of_squares = real();
    stats.fingerprint = static_cast<std::uint64_t>(anything());
    return stats;
  }

 private:
  std::mt19937 random_;
};

TEST(Ledger, AnyNumberThatIsWrittenIsRead) {
  for (unsigned seed = 0; seed < 300; ++seed) {
    EdgeNumbers numbers(seed);
    Ledger ledger = example_ledger();
    ledger.iteration = numbers.count();
    ledger.gradient_norm = numbers.real();
    ledger.loss_scale = numbers.real();
    ledger.absmax = numbers.real();
    for (Sighting& sighting : ledger.sightings) {
      sighting.stats = numbers.stats();
      sighting.shape = {numbers.count(), numbers.count()};
      sighting.valid_labels = numbers.anything();
    }
    for (Birth& birth : ledger.births) {
      birth.sighting.valid_labels = numbers.anything();
      birth.sighting.stats = numbers.stats();
      Operand operand;
      operand.element = 0;
      operand.shape = {numbers.count()};
      operand.stats = numbers.stats();
      operand.negatives = numbers.count();
      operand.number = numbers.real();
      operand.at_first_bad = numbers.real();
      birth.operands = {operand};
      birth.weights = {{"weight", numbers.real()}};
      const std::int64_t last = numbers.count();
      birth.extent = BadExtent{.dimensions = {{0, last, last / 2 + 1}}};
    }
    const std::string text = to_jsonl(ledger);
    const auto ledgers = ledgers_from_jsonl(text, "x.jsonl");
    ASSERT_EQ(ledgers.size(), 1U) << seed;
    EXPECT_TRUE(ledgers[0].is_complete) << seed << ": " << join(ledgers[0].notes);
    EXPECT_EQ(to_jsonl(ledgers[0]), text) << seed;
  }
}

}  // namespace
}  // namespace nanlocator
