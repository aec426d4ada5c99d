#include "nanlocator/report/read_run.hpp"

#include "nanlocator/report/verdict_json.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "nanlocator/error.hpp"
#include "nanlocator/files/atomic_file.hpp"
#include "nanlocator/record/bundle.hpp"
#include "nanlocator/record/ledger.hpp"
#include "temporary_folder.hpp"

namespace nanlocator {
namespace {

using namespace testing;  // TemporaryFolder, message_of
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int kRanks = 4;

/// Four data-parallel ranks. Before the reduction only rank 2's gradient of layer1.weight is NaN;
/// after it, the gradient is bad on all ranks.
Ledger ledger_of(int rank, std::int64_t iteration = 7, const std::string& run = "monday") {
  Ledger ledger;
  ledger.run_id = run;
  ledger.iteration = iteration;
  ledger.coordinates = {.rank = rank, .world_size = kRanks, .dp = {rank, kRanks}};
  ledger.coordinates.host = "a" + std::to_string(rank);
  ledger.coordinates.device = "cpu";
  ledger.is_backward_order_observed = true;
  for (int id = 2; id >= 0; --id) {
    ledger.backward_order.push_back(
        {.id = id, .name = "layer" + std::to_string(id) + ".weight", .shape = {4, 8}});
  }
  ledger.coverage = {{Phase::grad_local, {0, 1, 2}}, {Phase::grad_reduced, {0, 1, 2}}};
  const auto see = [&](Phase phase) {
    Sighting sighting;
    sighting.iteration = iteration;
    sighting.phase = phase;
    sighting.role = "main_grad";
    sighting.parameter_id = 1;
    sighting.parameter = "layer1.weight";
    sighting.dtype = "float32";
    sighting.shape = {4, 8};
    sighting.stats.numel = 32;
    sighting.stats.nan = 1;
    sighting.stats.first_bad = 17;
    sighting.stats.finite_max = 0.5;
    sighting.stats.absmax = 0.5;
    ledger.sightings.push_back(sighting);
  };
  if (rank == 2) see(Phase::grad_local);
  see(Phase::grad_reduced);
  return ledger;
}

class RunFolder : public ::testing::Test {
 protected:
  void plant_all(std::int64_t iteration = 7, const std::string& run = "monday") {
    for (int rank = 0; rank < kRanks; ++rank) append(ledger_of(rank, iteration, run));
  }
  void append(const Ledger& ledger) { append_ledger(folder_.path(), ledger); }
  [[nodiscard]] RunReport read() const { return read_run(folder_.path()); }
  [[nodiscard]] std::string file_of(int rank) const {
    return "ledger_tp0pp0dp" + std::to_string(rank) + ".jsonl";
  }

  static void expect_rank_two(const Verdict& verdict) {
    ASSERT_EQ(verdict.origins.size(), 1U);
    EXPECT_THAT(verdict.origins[0].candidates, ElementsAre(2));
    EXPECT_EQ(verdict.origins[0].parameter, "layer1.weight");
    EXPECT_EQ(verdict.origins[0].phase, Phase::grad_local);
  }

  TemporaryFolder folder_;
};

// ---- choice of folder and step ----

TEST_F(RunFolder, LedgersCopiedTogetherAreMerged) {
  plant_all();
  const RunReport report = read();
  EXPECT_EQ(report.verdict.status, VerdictStatus::located);
  expect_rank_two(report.verdict);
  EXPECT_EQ(report.ledgers.size(), 4U);
  EXPECT_THAT(report.notes, IsEmpty());
}

TEST_F(RunFolder, TheLatestAttemptWithFindingsIsRead) {
  for (const char* name : {"a0", "a2", "a10", "a11"}) {
    std::filesystem::create_directory(folder_ / name);
  }
  for (int rank = 0; rank < kRanks; ++rank) {
    append_ledger(folder_ / "a2", ledger_of(rank, 5));
    append_ledger(folder_ / "a10", ledger_of(rank, 9));
  }
  EXPECT_EQ(read().verdict.iteration, 9);
  EXPECT_EQ(read().run_dir, (folder_ / "a10").string());
  EXPECT_EQ(read_run(folder_ / "a2").verdict.iteration, 5);
  EXPECT_EQ(latest_attempt(folder_.path()), folder_ / "a11");
}

TEST_F(RunFolder, TheLatestStepIsToldUnlessAnotherIsNamed) {
  plant_all(7);
  plant_all(12);
  EXPECT_EQ(read().verdict.iteration, 12);
  EXPECT_EQ(read_run(folder_.path(), 7).verdict.iteration, 7);
  EXPECT_THAT(message_of<UsageError>([&] { (void)read_run(folder_.path(), 8); }),
              HasSubstr("step 8 has no findings in " + folder_.path().string() +
                        "; those with findings: 7, 12"));
  const StepVerdicts all = read_verdicts(folder_.path());
  ASSERT_EQ(all.verdicts.size(), 2U);
  expect_rank_two(all.verdicts[0]);
}

TEST_F(RunFolder, AStepOfOneRankAloneNamesTheFullerOne) {
  plant_all(7);
  append(ledger_of(1, 8));
  EXPECT_THAT(read().notes, Contains(HasSubstr("step 7 has the ledgers of ranks 0-3, step 8 only "
                                               "of rank 1; --step 7 reports that one")));
}

TEST_F(RunFolder, WhatIsNoRunIsRefusedAndAHealthyRunIsClean) {
  EXPECT_THAT(message_of<FormatError>([&] { (void)read(); }),
              HasSubstr("is not the folder of a run"));
  EXPECT_THAT(message_of<IoError>([&] { (void)read_run(folder_ / "missing"); }),
              HasSubstr("there is no folder"));
  folder_.plant("param_manifest_tp0pp0dp0.json", "{}");
  EXPECT_EQ(read().verdict.status, VerdictStatus::clean);
  EXPECT_THAT(read().ledgers, IsEmpty());
}

// ---- missing, duplicate and foreign ledgers ----

TEST_F(RunFolder, AMissingRankIsSilentAndTheVerdictPartial) {
  plant_all();
  std::filesystem::remove(folder_ / file_of(1));
  const RunReport report = read();
  EXPECT_EQ(report.verdict.status, VerdictStatus::partial);
  EXPECT_THAT(report.verdict.silent_ranks, ElementsAre(1));
  expect_rank_two(report.verdict);
}

TEST_F(RunFolder, OfTwoLedgersOfOneRankTheOneThatSawMoreCounts) {
  plant_all();
  Ledger less = ledger_of(2);
  less.sightings.pop_back();
  append(less);
  Ledger lost;  // as written when other ranks fall silent
  lost.run_id = "monday";
  lost.iteration = 7;
  lost.coordinates = ledger_of(0).coordinates;
  lost.notes = {"rank 3 has not answered."};
  append(lost);
  const RunReport report = read();
  expect_rank_two(report.verdict);
  EXPECT_THAT(report.notes, ElementsAre(HasSubstr("rank 2 has two ledgers of this step")));
  EXPECT_THAT(report.ledgers[0].notes, ElementsAre("rank 3 has not answered."));
}

TEST_F(RunFolder, AFileThatWasCopiedTwiceChangesNothing) {
  plant_all();
  std::filesystem::copy(folder_ / file_of(2), folder_ / "a2-ledger_tp0pp0dp2.jsonl");
  EXPECT_THAT(read().notes, IsEmpty());
  expect_rank_two(read().verdict);
}

TEST_F(RunFolder, OfSeveralRunsTheOneOfMostRanksIsTold) {
  plant_all(7);
  append(ledger_of(0, 900, "tuesday"));
  const RunReport report = read();
  EXPECT_EQ(report.verdict.run_id, "monday");
  EXPECT_THAT(report.notes,
              ElementsAre("the ledgers of rank 0 of the run tuesday are skipped; reporting run "
                          "monday"));
}

TEST_F(RunFolder, ALedgerThatContradictsTheRestIsLeftOut) {
  plant_all();
  Ledger other_size = ledger_of(1);
  other_size.coordinates.dp.size = 8;
  other_size.coordinates.world_size = 8;
  std::filesystem::remove(folder_ / file_of(1));
  append(other_size);
  std::filesystem::rename(folder_ / file_of(0), folder_ / "ledger_tp1pp0dp0.jsonl");
  const RunReport report = read();
  EXPECT_THAT(report.verdict.silent_ranks, ElementsAre(0, 1));
  EXPECT_THAT(
      report.notes,
      AllOf(Contains(HasSubstr("it states other sizes (ranks 8, ")),
            Contains(HasSubstr("it says that it is of tp0pp0dp0, which is not the file's"))));
  expect_rank_two(report.verdict);
}

TEST_F(RunFolder, ARankThatItsPlaceDoesNotHaveIsLeftOut) {
  plant_all();
  Ledger ledger = ledger_of(3);
  ledger.coordinates.rank = 1;
  std::filesystem::remove(folder_ / file_of(1));
  std::filesystem::remove(folder_ / file_of(3));
  append(ledger);
  EXPECT_THAT(read().verdict.silent_ranks, ElementsAre(1, 3));
  EXPECT_THAT(read().notes,
              ElementsAre(HasSubstr("ledger_tp0pp0dp3.jsonl: the ledger of rank 1 is left out: its "
                                    "place (tp0pp0dp3) has rank 3")));
}

TEST_F(RunFolder, ASightingThatContradictsItsLedgerIsLeftOut) {
  plant_all();
  Ledger ledger = ledger_of(0);
  ledger.sightings[0].parameter = "liyer1.weight";
  std::filesystem::remove(folder_ / file_of(0));
  append(ledger);
  EXPECT_THAT(read().notes,
              ElementsAre(HasSubstr("ledger_tp0pp0dp0.jsonl: 1 sightings contradict")));
  EXPECT_FALSE(read().ledgers[0].is_complete);
}

TEST_F(RunFolder, AWorldOfTwoThousandMillionRanksIsLeftOut) {
  Ledger ledger = ledger_of(0);
  ledger.coordinates.world_size = std::numeric_limits<int>::max();
  ledger.coordinates.dp.size = std::numeric_limits<int>::max();
  append(ledger);
  EXPECT_THAT(message_of<FormatError>([&] { (void)read(); }),
              HasSubstr("no ledger of step 7 can be read"));
}

TEST_F(RunFolder, FilesThatCannotBeReadAreNamed) {
  plant_all();
  folder_.plant("ledger_empty.jsonl", "");
  folder_.plant("ledger_garbage.jsonl", std::string("\xff\xfe\0{]", 5));
  folder_.plant("ledger_numbers.jsonl", "{\"record\":\"ledger\",\"version\":1e999}\n");
  folder_.plant("ledger_deep.jsonl", std::string(100'000, '['));
  std::filesystem::create_directory(folder_ / "ledger_folder.jsonl");
  folder_.plant("run.json", "{\"version\":1}");
  folder_.plant("verdict.json", "not JSON");
  const RunReport report = read();
  expect_rank_two(report.verdict);
  for (const char* name :
       {"ledger_empty.jsonl", "ledger_garbage.jsonl", "ledger_numbers.jsonl", "ledger_deep.jsonl",
        "ledger_folder.jsonl", "run.json", "verdict.json"}) {
    EXPECT_THAT(report.notes, Contains(HasSubstr(name)));
  }
}

TEST_F(RunFolder, OnlyGarbageIsAnErrorThatSaysWhy) {
  folder_.plant("ledger_tp0pp0dp0.jsonl", "garbage\n");
  EXPECT_THAT(message_of<FormatError>([&] { (void)read(); }),
              AllOf(HasSubstr("none of its ledgers can be read"), HasSubstr("line 1")));
}

TEST_F(RunFolder, LedgersWithSpacesInTheirJsonAreFoundToo) {
  plant_all();
  std::string text = to_jsonl(ledger_of(2));
  text.replace(0, text.find(','), "{\"record\" : \"ledger\"");
  folder_.plant(file_of(2), text);
  EXPECT_THAT(read().notes, IsEmpty());
  expect_rank_two(read().verdict);
}

// ---- the verdict that the run recorded ----

TEST_F(RunFolder, ARecordedVerdictOfMoreRanksIsPreferred) {
  plant_all();
  folder_.plant("verdict.json", to_json(read().verdict));
  for (const int rank : {1, 2, 3}) std::filesystem::remove(folder_ / file_of(rank));
  const RunReport report = read();
  EXPECT_EQ(report.verdict.status, VerdictStatus::located);
  expect_rank_two(report.verdict);
  EXPECT_THAT(report.notes, Contains(HasSubstr("it rests on the ledgers of 4 ranks, and 1 are here "
                                               "and whole; these alone name other origins")));
}

TEST_F(RunFolder, ARecordedVerdictWithoutLedgersIsTold) {
  plant_all();
  const Verdict verdict = read().verdict;
  for (int rank = 0; rank < kRanks; ++rank) std::filesystem::remove(folder_ / file_of(rank));
  std::filesystem::create_directory(folder_ / "verdicts");
  folder_.plant("verdicts/step7.json", to_json(verdict));
  const RunReport report = read();
  expect_rank_two(report.verdict);
  EXPECT_THAT(report.notes, ElementsAre(HasSubstr("there is no ledger of step 7 here")));
}

TEST_F(RunFolder, ARecordedVerdictThatSaysOtherwiseIsNamedAndItsNotesAreKeptWhereItAgrees) {
  plant_all();
  Verdict verdict = read().verdict;
  verdict.notes = {"rank 3 has not answered since iteration 7."};
  folder_.plant("verdict.json", to_json(verdict));
  EXPECT_THAT(read().verdict.notes, Contains("rank 3 has not answered since iteration 7."));
  EXPECT_THAT(read().notes, IsEmpty());
  verdict.origins[0].candidates = {1};
  verdict.origins[0].coordinates->rank = 1;
  folder_.plant("verdict.json", to_json(verdict));
  expect_rank_two(read().verdict);
  EXPECT_THAT(read().notes, ElementsAre(HasSubstr("names other origins")));
}

// ---- tensors ----

TEST_F(RunFolder, WindowsShowTheTensorAroundItsFirstBadElement) {
  std::vector<float> input(2 * 100 * 100, 2.0F);
  std::vector<float> output(2 * 100 * 100, 1.0F);
  output[(1 * 100 + 90) * 100 + 50] = std::numeric_limits<float>::quiet_NaN();
  input[(1 * 100 + 90) * 100 + 50] = -1.0F;
  Ledger ledger = ledger_of(2);
  Birth birth;
  birth.sighting = ledger.sightings[0];
  birth.sighting.phase = Phase::backward;
  birth.sighting.op = "aten::log";
  birth.sighting.role = "output[0]";
  birth.sighting.shape = {2, 100, 100};
  birth.sighting.parameter_id.reset();
  birth.sighting.parameter.clear();
  birth.reached = {{ReachedKind::parameter, "layer1.weight"}};
  Bundle bundle{.run_id = "monday", .coordinates = ledger.coordinates, .birth = birth};
  const auto value = [](const char* storage) {
    BundleValue tensor;
    tensor.kind = BundleValueKind::tensor;
    tensor.tensor = {.storage = storage,
                     .dtype = "float32",
                     .sizes = {2, 100, 100},
                     .strides = {10000, 100, 1},
                     .device = "cpu"};
    return tensor;
  };
  bundle.operator_call = {.op = "aten::log",
                          .schema = "aten::log(Tensor self) -> Tensor",
                          .arguments = {value("in")},
                          .outputs = {value("out")}};
  BundleContents contents;
  contents.storages = {{"in", "F32", {2, 100, 100}, std::as_bytes(std::span(input))},
                       {"out", "F32", {2, 100, 100}, std::as_bytes(std::span(output))}};
  birth.bundle = BundleStore(folder_.path(), {}).write(bundle, contents);
  ledger.births = {birth};
  for (const int rank : {0, 1, 3}) append(ledger_of(rank));
  append(ledger);

  const RunReport report = read();
  ASSERT_EQ(report.windows.size(), 1U) << ::testing::PrintToString(report.notes);
  ASSERT_EQ(report.windows[0].windows.size(), 2U);
  const TensorWindow& window = report.windows[0].windows[0];
  EXPECT_EQ(window.name, "output[0]");
  EXPECT_THAT(window.first_bad, ElementsAre(1, 90, 50));
  EXPECT_THAT(window.fixed, ElementsAre(1));
  EXPECT_EQ(window.first_row, 68);  // at the lower edge: 100 - 32
  EXPECT_EQ(window.first_column, 26);
  EXPECT_EQ(window.rows, 32);
  EXPECT_EQ(window.columns, 48);
  ASSERT_EQ(window.values.size(), 32U * 48U);
  const std::size_t bad = (90 - 68) * 48 + (50 - 26);
  for (std::size_t i = 0; i < window.values.size(); ++i) {
    EXPECT_EQ(std::isnan(window.values[i]), i == bad) << i;
  }
  EXPECT_EQ(report.windows[0].windows[1].name, "input[0]");
  EXPECT_EQ(report.windows[0].windows[1].values[bad], -1);
  EXPECT_EQ(report.windows[0].windows[1].values[0], 2);

  EXPECT_THAT(read_run(folder_.path(), std::nullopt, RunDetail::verdict).windows, IsEmpty());
}

TEST_F(RunFolder, ABundleOutsideOfTheFolderIsNotOpened) {
  plant_all();
  Verdict verdict = read().verdict;
  for (int rank = 0; rank < kRanks; ++rank) std::filesystem::remove(folder_ / file_of(rank));
  for (const char* path : {"../../etc", "/etc"}) {
    verdict.origins[0].bundle = path;
    folder_.plant("verdict.json", to_json(verdict));
    EXPECT_THAT(read().notes, Contains(HasSubstr("is not below the run's folder")));
  }
}

// ---- damage ----

/// Expects that no wrong rank is named with high confidence; unreadable data may throw Error.
void expect_no_wrong_rank(const std::filesystem::path& directory, const std::string& what,
                          int right = 2) {
  try {
    const RunReport report = read_run(directory, std::nullopt, RunDetail::verdict);
    for (const Origin& origin : report.verdict.origins) {
      if (origin.place_confidence != Confidence::high) continue;
      EXPECT_THAT(origin.candidates, Contains(right)) << what;
    }
  } catch (const Error&) {
  }
}

TEST_F(RunFolder, ALedgerThatIsCutAnywhereNeverAccusesAWrongRank) {
  for (const int damaged : {0, 2}) {
    plant_all();
    const std::string text = to_jsonl(ledger_of(damaged));
    for (std::size_t length = 0; length < text.size(); length += 7) {
      folder_.plant(file_of(damaged), text.substr(0, length));
      expect_no_wrong_rank(folder_.path(), "cut after byte " + std::to_string(length));
      if (HasFailure()) return;
    }
    folder_.plant(file_of(damaged), text);
  }
}

TEST_F(RunFolder, FlippedBytesNeverAccuseAWrongRank) {
  plant_all();
  std::mt19937 random(7);
  for (int round = 0; round < 1000; ++round) {
    const int damaged = static_cast<int>(random() % kRanks);
    const std::string whole = to_jsonl(ledger_of(damaged));
    std::string text = whole;
    const std::size_t at = random() % text.size();
    text[at] = static_cast<char>(text[at] ^ (1 << random() % 8));
    folder_.plant(file_of(damaged), text);
    expect_no_wrong_rank(folder_.path(), "rank " + std::to_string(damaged) + ", byte " +
                                             std::to_string(at) + ": " +
                                             text.substr(at > 30 ? at - 30 : 0, 60));
    folder_.plant(file_of(damaged), whole);
    if (HasFailure()) return;
  }
}

/// Ledgers of a real run of eight ranks, and the rank with the overwritten gradient (planted.json).
TEST(RecordedRun, ALedgerThatIsCutAnywhereNeverAccusesAWrongRank) {
  constexpr int kPlantedRank = 7;
  const std::string source = "gradient_element.jsonl";
  const auto recorded = std::filesystem::path(NANLOCATOR_TESTS_SOURCE) / "locate/recorded" / source;
  const auto ledgers = ledgers_from_jsonl(read_file(recorded), source);
  const TemporaryFolder folder;
  for (const Ledger& ledger : ledgers) append_ledger(folder.path(), ledger);
  const Verdict whole = read_run(folder.path(), std::nullopt, RunDetail::verdict).verdict;
  ASSERT_EQ(whole.origins.size(), 1U);
  ASSERT_THAT(whole.origins[0].candidates, ElementsAre(kPlantedRank));
  for (const Ledger& ledger : ledgers) {
    const int rank = ledger.coordinates.rank;
    if (rank != kPlantedRank && rank != 0) continue;  // the others are like rank 0
    const std::string file = "ledger_" + ledger.coordinates.file_suffix() + ".jsonl";
    const std::string text = to_jsonl(ledger);
    for (std::size_t length = 0; length < text.size(); length += 7) {
      folder.plant(file, text.substr(0, length));
      expect_no_wrong_rank(folder.path(), file + " cut after byte " + std::to_string(length),
                           kPlantedRank);
      if (::testing::Test::HasFailure()) return;
    }
    folder.plant(file, text);
  }
}

}  // namespace
}  // namespace nanlocator
