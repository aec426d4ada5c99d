#include "nanlocator/step/gradient_locator.hpp"

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cmath>
#include <csignal>
#include <fstream>
#include <nlohmann/json.hpp>

#include "agree/thread_ranks.hpp"
#include "gradients/tensors.hpp"
#include "nanlocator/record/history.hpp"
#include "nanlocator/record/ledger.hpp"
#include "nanlocator/replay/operator_call.hpp"
#include "nanlocator/report/verdict_json.hpp"
#include "temporary_folder.hpp"

namespace nanlocator::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::UnorderedElementsAre;

std::string content_of(const std::filesystem::path& path) {
  std::ifstream file(path);
  EXPECT_TRUE(file) << path;
  return {std::istreambuf_iterator<char>(file), {}};
}

LocatorOptions options_in(const TemporaryFolder& folder) {
  LocatorOptions options;
  options.output_dir = folder / "run";
  options.gather_deadline = kLong;
  return options;
}

at::Tensor healthy() {
  return at::ones({2, 3});
}

at::Tensor with_bad_element(double value = kNan) {
  auto tensor = at::ones({2, 3});
  tensor[1][2] = value;
  return tensor;
}

// One step with the same tensor for "p0" in `phase`.
bool run_step(GradientLocator& locator, std::int64_t iteration, const at::Tensor& gradient,
              Phase phase = Phase::grad_reduced) {
  locator.begin_step(iteration);
  locator.scan(phase, 0, "grad", std::vector{GradientView{0, gradient}});
  locator.start_agreement();
  return locator.finish_agreement();
}

// ------------------------------------------------------------------------------------ a single
// process

class SingleProcess : public ::testing::Test {
 protected:
  GradientLocator make() { return {map_of({{2, 3}, {4}}), options_, nullptr}; }
  TemporaryFolder folder_;
  LocatorOptions options_ = options_in(folder_);
};

TEST_F(SingleProcess, WritesTheMapAndWhatItIsAtInstallAndNothingInHealthySteps) {
  auto locator = make();
  EXPECT_EQ(locator.run_dir(), folder_ / "run/a0");
  for (int step = 1; step <= 5; ++step) EXPECT_FALSE(run_step(locator, step, healthy()));
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(locator.run_dir())) {
    names.push_back(entry.path().filename());
  }
  EXPECT_THAT(names, UnorderedElementsAre("param_id_name_map_tp0pp0dp0.json",
                                          "param_manifest_tp0pp0dp0.json", "run.json"));
  EXPECT_EQ(content_of(locator.run_dir() / "param_id_name_map_tp0pp0dp0.json"),
            R"({"0": "p0", "1": "p1"})");
  const auto run = nlohmann::json::parse(content_of(locator.run_dir() / "run.json"));
  EXPECT_EQ(run["version"], 1);
  EXPECT_EQ(run["attempt"], 0);
  EXPECT_EQ(run["world_size"], 1);
  EXPECT_EQ(run["options"]["on_bad"], "stop");
  EXPECT_EQ(run["run_id"], locator.map().run_id());
  EXPECT_THAT(run["run_id"].get<std::string>(),
              ::testing::MatchesRegex("[0-9]{8}T[0-9]{6}Z-[0-9a-f]{6}"));
}

TEST_F(SingleProcess, EachStartIsAnAttemptOfItsOwn) {
  EXPECT_EQ(make().run_dir(), folder_ / "run/a0");
  EXPECT_EQ(make().run_dir(), folder_ / "run/a1");
  std::ofstream(folder_ / "run/a2") << "not a folder";
  EXPECT_EQ(make().run_dir(), folder_ / "run/a3");
}

TEST_F(SingleProcess, NamesParameterElementAndPhaseInVerdictLedgerAndError) {
  auto locator = make();
  EXPECT_FALSE(run_step(locator, 11, healthy(), Phase::grad_local));
  ASSERT_TRUE(run_step(locator, 12, with_bad_element(), Phase::grad_local));
  const auto& verdict = locator.conclude();
  EXPECT_EQ(verdict.iteration, 12);
  ASSERT_THAT(verdict.origins, SizeIs(1));
  const auto& origin = verdict.origins[0];
  EXPECT_EQ(origin.phase, Phase::grad_local);
  EXPECT_EQ(origin.parameter, "p0");
  EXPECT_THAT(origin.tensor.value().first_bad_index, ElementsAre(1, 2));
  EXPECT_EQ(origin.tensor->nan, 1);
  EXPECT_THAT(NonFiniteGradientError(verdict).what(), HasSubstr("p0"));

  const auto in_file =
      verdict_from_json(content_of(locator.run_dir() / "verdict.json"), "verdict.json");
  EXPECT_EQ(to_json(in_file), to_json(verdict));
  EXPECT_EQ(content_of(locator.run_dir() / "verdicts/step12.json"), to_json(verdict));
  const auto ledgers =
      ledgers_from_jsonl(content_of(locator.run_dir() / "ledger_tp0pp0dp0.jsonl"), "ledger");
  ASSERT_THAT(ledgers, SizeIs(1));
  EXPECT_TRUE(ledgers[0].is_complete);
  EXPECT_EQ(ledgers[0].iteration, 12);
  EXPECT_EQ(ledgers[0].run_id, locator.map().run_id());
  EXPECT_THAT(ledgers[0].sightings, SizeIs(1));
}

TEST_F(SingleProcess, AFindingTellsTheStepsBeforeItInTheLedgerAndParameterByParameter) {
  options_.on_bad = Policy::report;
  auto locator = make();
  for (int step = 1; step <= 9; ++step) {
    ASSERT_FALSE(run_step(locator, step, healthy() * std::pow(10.0, step), Phase::grad_local));
  }
  EXPECT_FALSE(std::filesystem::exists(locator.run_dir() / "history_tp0pp0dp0.jsonl"));
  ASSERT_TRUE(run_step(locator, 10, with_bad_element(kInfinity), Phase::grad_local));
  const auto& verdict = locator.conclude();
  ASSERT_THAT(verdict.origins, SizeIs(1));
  EXPECT_EQ(verdict.origins[0].cause, Cause::divergence);

  std::vector<std::string> notes;
  const auto histories = read_histories(locator.run_dir(), 10, notes);
  EXPECT_THAT(notes, IsEmpty());
  ASSERT_THAT(histories, SizeIs(1));
  EXPECT_EQ(histories[0].run_id, locator.run_id());
  EXPECT_EQ(histories[0].coordinates, locator.map().coordinates());
  EXPECT_THAT(histories[0].iterations, ElementsAre(1, 2, 3, 4, 5, 6, 7, 8, 9, 10));
  ASSERT_THAT(histories[0].parameters, SizeIs(1)) << "p1 never had a gradient";
  EXPECT_FLOAT_EQ(histories[0].parameters[0].absmax[8], 1e9F);
  EXPECT_THAT(histories[0].parameters[0].nonfinite, ElementsAre(0, 0, 0, 0, 0, 0, 0, 0, 0, 1));

  const auto ledgers =
      ledgers_from_jsonl(content_of(locator.run_dir() / "ledger_tp0pp0dp0.jsonl"), "ledger");
  ASSERT_TRUE(ledgers.at(0).history);
  EXPECT_EQ(*ledgers[0].history, summary_of(histories[0]));

  ASSERT_TRUE(run_step(locator, 11, with_bad_element(), Phase::grad_local));
  (void)locator.conclude();
  EXPECT_THAT(read_histories(locator.run_dir(), 11, notes).at(0).iterations, SizeIs(11));
  EXPECT_THAT(read_histories(locator.run_dir(), 10, notes).at(0).iterations, SizeIs(10));
}

TEST_F(SingleProcess, TheHistoryIsDividedByTheLossScaleOfItsSteps) {
  auto locator = make();
  EXPECT_FALSE(run_step(locator, 1, healthy() * 64.0));
  locator.set_loss_scale(32, false);
  locator.begin_step(2);
  locator.scan(Phase::grad_reduced, 0, "grad", std::vector{GradientView{0, with_bad_element()}});
  locator.set_loss_scale(2, true);
  locator.start_agreement();
  ASSERT_TRUE(locator.finish_agreement());
  (void)locator.conclude();
  std::vector<std::string> notes;
  EXPECT_THAT(read_histories(locator.run_dir(), 2, notes).at(0).parameters.at(0).absmax,
              ElementsAre(2, 0.5));
  const auto ledgers =
      ledgers_from_jsonl(content_of(locator.run_dir() / "ledger_tp0pp0dp0.jsonl"), "ledger");
  ASSERT_EQ(ledgers.size(), 1u);
  EXPECT_EQ(ledgers[0].loss_scale, 2);
}

TEST_F(SingleProcess, CountsADismissedStepAndWritesNothingOfIt) {
  auto locator = make();
  ASSERT_TRUE(run_step(locator, 1, with_bad_element(kInfinity)));
  locator.dismiss();
  EXPECT_EQ(locator.dismissed(), 1);
  EXPECT_EQ(locator.incidents(), 0);
  EXPECT_FALSE(run_step(locator, 2, healthy()));
  EXPECT_FALSE(std::filesystem::exists(locator.run_dir() / "ledger_tp0pp0dp0.jsonl"));
  EXPECT_FALSE(std::filesystem::exists(locator.run_dir() / "verdict.json"));
}

TEST_F(SingleProcess, ANormThatOverflowsThoughEveryGradientIsFiniteIsAFinding) {
  auto locator = make();
  locator.begin_step(1);
  locator.scan(Phase::grad_norm, 0, "grad", std::vector{GradientView{0, at::full({2, 3}, 1e25)}});
  locator.set_gradient_norm(kInfinity);
  locator.start_agreement();
  ASSERT_TRUE(locator.finish_agreement());
  const auto& verdict = locator.conclude();
  EXPECT_THAT(to_json(verdict), HasSubstr("p0"));
  EXPECT_NE(verdict.status, VerdictStatus::clean);
  // The norm applies to its own step only.
  EXPECT_FALSE(run_step(locator, 2, healthy()));
}

TEST_F(SingleProcess, ANormThatIsSetAfterTheAgreementCanStillBeConcluded) {
  auto locator = make();
  EXPECT_FALSE(run_step(locator, 1, healthy()));
  locator.set_gradient_norm(3.0);
  EXPECT_THROW((void)locator.conclude(), UsageError);
  locator.set_gradient_norm(kNan);
  EXPECT_EQ(locator.conclude().iteration, 1);
}

TEST_F(SingleProcess, TellsNanFromInfinity) {
  options_.on_bad = Policy::report;
  auto locator = make();
  ASSERT_TRUE(run_step(locator, 1, with_bad_element(kInfinity)));
  const auto tensor = locator.conclude().origins.at(0).tensor.value();
  EXPECT_EQ(tensor.nan, 0);
  EXPECT_EQ(tensor.pos_inf, 1);
  ASSERT_TRUE(run_step(locator, 2, with_bad_element(kNan)));
  EXPECT_EQ(locator.conclude().origins.at(0).tensor->nan, 1);
  EXPECT_THAT(locator.verdicts(), SizeIs(2));
}

TEST_F(SingleProcess, PastTheLimitFindingsAreCountedAndNotLocated) {
  options_.on_bad = Policy::report;
  options_.max_incidents = 2;
  auto locator = make();
  for (int step = 1; step <= 4; ++step) {
    ASSERT_TRUE(run_step(locator, step, with_bad_element()));
    (void)locator.conclude();
  }
  EXPECT_EQ(locator.incidents(), 4);
  EXPECT_THAT(locator.verdicts(), SizeIs(2));
  EXPECT_FALSE(std::filesystem::exists(locator.run_dir() / "verdicts/step3.json"));
}

TEST_F(SingleProcess, AStepThatIsRepeatedKeepsBothVerdicts) {
  options_.on_bad = Policy::report;
  auto locator = make();
  for (int pass = 0; pass < 2; ++pass) {
    ASSERT_TRUE(run_step(locator, 5, with_bad_element()));
    (void)locator.conclude();
  }
  EXPECT_TRUE(std::filesystem::exists(locator.run_dir() / "verdicts/step5.json"));
  EXPECT_TRUE(std::filesystem::exists(locator.run_dir() / "verdicts/step5-1.json"));
}

TEST_F(SingleProcess, ConcludingAloneKeepsTheFindingsForAConclusionThatStillComes) {
  auto locator = make();
  EXPECT_EQ(locator.conclude_alone("too early"), nullptr);
  locator.begin_step(3);
  locator.scan(Phase::grad_local, 0, "grad", std::vector{GradientView{1, at::ones({4})}});
  EXPECT_EQ(locator.conclude_alone("nothing bad"), nullptr);
  locator.scan(Phase::grad_local, 1, "grad", std::vector{GradientView{0, with_bad_element()}});
  const auto* alone = locator.conclude_alone("the collective has failed");
  ASSERT_NE(alone, nullptr);
  EXPECT_EQ(alone->status, VerdictStatus::partial);
  EXPECT_TRUE(std::filesystem::exists(locator.run_dir() / "verdict_rank0.json"));
  (void)locator.conclude_alone("once more");
  EXPECT_THAT(locator.verdicts(), SizeIs(1));
  EXPECT_EQ(locator.incidents(), 1);
  const auto ledgers =
      ledgers_from_jsonl(content_of(locator.run_dir() / "ledger_tp0pp0dp0.jsonl"), "ledger");
  ASSERT_THAT(ledgers, SizeIs(1));
  EXPECT_THAT(ledgers[0].notes, ::testing::Contains(HasSubstr("the collective has failed")));

  locator.start_agreement();
  ASSERT_TRUE(locator.finish_agreement());
  EXPECT_EQ(locator.conclude().origins.at(0).parameter, "p0");
}

TEST_F(SingleProcess, ParametersAddedLaterGetTheirNamesAndFiles) {
  auto locator = make();
  EXPECT_FALSE(run_step(locator, 1, healthy()));
  const auto run_id = locator.map().run_id();
  locator.set_map(map_of({{2, 3}, {4}, {5}}));
  EXPECT_EQ(locator.map().run_id(), run_id);
  EXPECT_THAT(content_of(locator.run_dir() / "param_id_name_map_tp0pp0dp0.json"),
              HasSubstr(R"("2": "p2")"));
  locator.begin_step(2);
  locator.scan(Phase::grad_local, 0, "grad", std::vector{GradientView{2, at::full({5}, kNan)}});
  locator.start_agreement();
  ASSERT_TRUE(locator.finish_agreement());
  EXPECT_EQ(locator.conclude().origins.at(0).parameter, "p2");
}

TEST_F(SingleProcess, LedgersSayWhetherTheBackwardOrderWasObserved) {
  options_.on_bad = Policy::report;
  auto locator = make();
  ASSERT_TRUE(run_step(locator, 1, with_bad_element()));
  (void)locator.conclude();
  locator.gradient_is_ready(0);
  locator.gradient_is_ready(1);
  ASSERT_TRUE(run_step(locator, 2, with_bad_element()));
  (void)locator.conclude();
  const auto ledgers =
      ledgers_from_jsonl(content_of(locator.run_dir() / "ledger_tp0pp0dp0.jsonl"), "ledger");
  ASSERT_THAT(ledgers, SizeIs(2));
  const auto names = [](const Ledger& ledger) {
    std::vector<std::string> all;
    for (const auto& parameter : ledger.backward_order) all.push_back(parameter.name);
    return all;
  };
  EXPECT_FALSE(ledgers[0].is_backward_order_observed);
  EXPECT_THAT(names(ledgers[0]), ElementsAre("p1", "p0"));  // reverse registration
  EXPECT_TRUE(ledgers[1].is_backward_order_observed);
  EXPECT_THAT(names(ledgers[1]), ElementsAre("p0", "p1"));
}

TEST_F(SingleProcess, ANoteIsInTheLedgerOfItsStepOnly) {
  options_.on_bad = Policy::report;
  auto locator = make();
  locator.begin_step(1);
  locator.add_note("bucket 3 was not reduced");
  locator.scan(Phase::grad_local, 0, "grad", std::vector{GradientView{0, with_bad_element()}});
  locator.start_agreement();
  ASSERT_TRUE(locator.finish_agreement());
  (void)locator.conclude();
  ASSERT_TRUE(run_step(locator, 2, with_bad_element()));
  (void)locator.conclude();
  const auto ledgers =
      ledgers_from_jsonl(content_of(locator.run_dir() / "ledger_tp0pp0dp0.jsonl"), "ledger");
  EXPECT_THAT(ledgers.at(0).notes, ElementsAre("bucket 3 was not reduced"));
  EXPECT_THAT(ledgers.at(1).notes, IsEmpty());
}

TEST_F(SingleProcess, CallsInAnotherOrderSayWhatIsMissing) {
  auto locator = make();
  const auto text = [&](auto act) { return message_of<UsageError>(act); };
  EXPECT_THAT(text([&] { locator.scan(Phase::grad_local, 0, "grad", {}); }),
              HasSubstr("begin_step first"));
  EXPECT_THAT(text([&] { locator.start_agreement(); }), HasSubstr("begin_step first"));
  locator.begin_step(1);
  EXPECT_THAT(text([&] { (void)locator.finish_agreement(); }), HasSubstr("start_agreement first"));
  locator.start_agreement();
  EXPECT_THAT(text([&] { locator.start_agreement(); }), HasSubstr("finish_agreement"));
  EXPECT_THAT(text([&] { locator.begin_step(2); }), HasSubstr("finish_agreement was not"));
  EXPECT_FALSE(locator.finish_agreement());
  EXPECT_THAT(text([&] { (void)locator.conclude(); }), HasSubstr("nothing bad"));
  EXPECT_THAT(text([&] { locator.dismiss(); }), HasSubstr("nothing bad"));
  EXPECT_TRUE(run_step(locator, 2, with_bad_element()));
  EXPECT_THAT(text([&] { locator.begin_step(3); }), HasSubstr("conclude nor dismiss"));
  EXPECT_THAT(text([&] { locator.set_map(map_of({{1}})); }), HasSubstr("agreed on"));
  EXPECT_THAT(text([&] { locator.gradient_is_ready(17); }), HasSubstr("17"));
}

TEST_F(SingleProcess, RefusesOptionsThatMakeNoSense) {
  options_.gather_deadline = milliseconds(0);
  EXPECT_THAT(message_of<UsageError>([&] { make(); }), HasSubstr("gather_deadline"));
  options_ = options_in(folder_);
  options_.max_incidents = 0;
  EXPECT_THAT(message_of<UsageError>([&] { make(); }), HasSubstr("max_incidents"));
  options_ = options_in(folder_);
  options_.threads = 0;
  EXPECT_THAT(message_of<UsageError>([&] { make(); }), HasSubstr("threads"));
}

TEST_F(SingleProcess, AnOutputFolderThatCannotBeMadeIsAnIoErrorWithItsPath) {
  folder_.plant("file", "in the way");
  options_.output_dir = folder_ / "file/run";
  EXPECT_THAT(message_of<IoError>([&] { make(); }), HasSubstr("file/run"));
}

// A file-size limit of zero: write() fails as on a full disk, with EFBIG instead of ENOSPC.
class FullDisk {
 public:
  FullDisk() {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    handler_ = std::signal(SIGXFSZ, SIG_IGN);
    const rlimit nothing{0, before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &nothing);
  }
  ~FullDisk() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }

 private:
  rlimit before_{};
  void (*handler_)(int);
};

TEST_F(SingleProcess, AFullDiskIsANoteInTheVerdictAndNoException) {
  auto locator = make();
  ASSERT_TRUE(run_step(locator, 1, with_bad_element()));
  {
    const FullDisk full;
    (void)locator.conclude();
  }
  const auto& verdict = locator.verdicts().at(0);
  EXPECT_EQ(verdict.origins.at(0).parameter, "p0");
  EXPECT_THAT(verdict.notes, ::testing::Contains(HasSubstr("verdict.json")));
  const auto is_whole = [](const std::filesystem::path& file) {
    return std::filesystem::file_size(file) > 0;
  };
  for (const auto& entry : std::filesystem::recursive_directory_iterator(locator.run_dir())) {
    if (entry.is_regular_file() && entry.path().extension() == ".json") {
      EXPECT_TRUE(is_whole(entry.path())) << entry.path();
    }
  }
}

TEST_F(SingleProcess, ARunFolderThatHasGoneIsANoteInTheVerdict) {
  auto locator = make();
  std::filesystem::remove_all(folder_ / "run");
  folder_.plant("run", "in the way");
  ASSERT_TRUE(run_step(locator, 1, with_bad_element()));
  EXPECT_EQ(locator.conclude().origins.at(0).parameter, "p0");
  EXPECT_THAT(locator.verdicts().at(0).notes, ::testing::Contains(HasSubstr("not on disk")));
}

// A bundle of one tensor.
std::string keep_bundle(GradientLocator& locator) {
  Bundle bundle;
  bundle.coordinates = locator.map().coordinates();
  bundle.birth.sighting.op = "aten::log";
  auto storages = std::make_shared<StorageCollector>();
  auto& call = bundle.operator_call.emplace();
  call.op = "aten::log";
  call.arguments.push_back(storages->add(healthy(), "argument.0.self"));
  auto contents = storages->finish(bundle);
  return locator.keep_bundle(bundle, std::move(contents), std::move(storages));
}

TEST_F(SingleProcess, BundlesAreWrittenWhenTheVerdictIsOut) {
  auto locator = make();
  ASSERT_TRUE(run_step(locator, 1, with_bad_element()));
  const auto first = keep_bundle(locator);
  const auto second = keep_bundle(locator);
  EXPECT_EQ(first, "bundles/step0-grad_local-rank0-aten__log");
  EXPECT_EQ(second, first + "-2");
  EXPECT_FALSE(std::filesystem::exists(locator.run_dir() / "bundles"));
  EXPECT_THAT(locator.conclude().notes, IsEmpty());
  for (const auto& folder : {first, second}) {
    const auto file = locator.run_dir() / folder / "bundle.json";
    EXPECT_THAT(OpenBundle(file).verify(), IsEmpty());
    EXPECT_GE(std::filesystem::last_write_time(file),
              std::filesystem::last_write_time(locator.run_dir() / "verdict.json"));
  }
}

TEST_F(SingleProcess, ABundleOfAStepThatIsDismissedIsDropped) {
  auto locator = make();
  ASSERT_TRUE(run_step(locator, 1, with_bad_element()));
  EXPECT_NE(keep_bundle(locator), "");
  locator.dismiss();
  ASSERT_TRUE(run_step(locator, 2, with_bad_element()));
  (void)locator.conclude();
  EXPECT_FALSE(std::filesystem::exists(locator.run_dir() / "bundles"));
}

// ----------------------------------------------------------------------------------------- several
// ranks

class SeveralRanks : public ::testing::Test {
 protected:
  GradientLocator make(const std::shared_ptr<Communicator>& communicator, LocatorOptions options) {
    return {map_of({{2, 3}, {4}}, data_parallel_rank(communicator->rank(), communicator->size())),
            std::move(options), communicator};
  }
  TemporaryFolder folder_;
  LocatorOptions options_ = options_in(folder_);
};

TEST_F(SeveralRanks, OneBadRankGivesEveryRankTheSameVerdictThatNamesIt) {
  std::vector<std::string> verdicts(3);
  run_ranks(3, one_hash_store(), [&](const auto& communicator) {
    auto locator = make(communicator, options_);
    EXPECT_EQ(locator.run_dir(), folder_ / "run/a0");
    const int rank = communicator->rank();
    EXPECT_FALSE(run_step(locator, 1, healthy(), Phase::grad_local));
    ASSERT_TRUE(
        run_step(locator, 2, rank == 1 ? with_bad_element() : healthy(), Phase::grad_local));
    verdicts[rank] = to_json(locator.conclude());
  });
  EXPECT_EQ(verdicts[1], verdicts[0]);
  EXPECT_EQ(verdicts[2], verdicts[0]);
  const auto verdict = verdict_from_json(verdicts[0], "verdict");
  ASSERT_THAT(verdict.origins, SizeIs(1));
  EXPECT_EQ(verdict.origins[0].coordinates.value().rank, 1);
  EXPECT_THAT(verdict.silent_ranks, IsEmpty());
  EXPECT_EQ(content_of(folder_ / "run/a0/verdict.json"), verdicts[0]);
  for (const char* suffix : {"dp0", "dp1", "dp2"}) {
    const std::string name = std::string("run/a0/ledger_tp0pp0") + suffix + ".jsonl";
    EXPECT_TRUE(std::filesystem::exists(folder_ / name)) << name;
  }
}

TEST_F(SeveralRanks, ABundleThatCannotBeWrittenIsANoteOfTheVerdictOnDisk) {
  run_ranks(2, one_hash_store(), [&](const auto& communicator) {
    auto locator = make(communicator, options_);
    const bool is_guilty = communicator->rank() == 1;
    ASSERT_TRUE(run_step(locator, 2, is_guilty ? with_bad_element() : healthy()));
    if (is_guilty) {
      std::ofstream(locator.run_dir() / "bundles") << "in the way";
      EXPECT_NE(keep_bundle(locator), "");
    }
    EXPECT_THAT(locator.conclude().notes, IsEmpty());  // already published before
  });
  const auto verdict = verdict_from_json(content_of(folder_ / "run/a0/verdict.json"), "verdict");
  EXPECT_EQ(verdict.origins.at(0).coordinates.value().rank, 1);
  EXPECT_THAT(verdict.notes, ElementsAre(AllOf(HasSubstr("of rank 1 could not be written"),
                                               HasSubstr("run/a0/bundles"))));
}

TEST_F(SeveralRanks, FindingsOfManyStepsDoNotCollide) {
  options_.on_bad = Policy::report;
  run_ranks(2, one_hash_store(), [&](const auto& communicator) {
    auto locator = make(communicator, options_);
    for (int step = 1; step <= 6; ++step) {
      const bool is_guilty = step % 2 == communicator->rank();
      ASSERT_TRUE(run_step(locator, 1 + step / 2, is_guilty ? with_bad_element() : healthy(),
                           Phase::grad_local));
      EXPECT_EQ(locator.conclude().origins.at(0).coordinates.value().rank, step % 2);
    }
    EXPECT_THAT(locator.verdicts(), SizeIs(6));
  });
}

TEST_F(SeveralRanks, ARankThatDiesBeforeItsLedgerIsSilentInAPartialVerdict) {
  options_.gather_deadline = 3 * kShort;
  run_ranks(3, one_hash_store(), [&](const auto& communicator) {
    auto locator = make(communicator, options_);
    ASSERT_TRUE(run_step(locator, 4, communicator->rank() == 0 ? with_bad_element() : healthy(),
                         Phase::grad_local));
    if (communicator->rank() == 2) return;
    const auto& verdict = locator.conclude();
    EXPECT_EQ(verdict.status, VerdictStatus::partial);
    EXPECT_THAT(verdict.silent_ranks, ElementsAre(2));
  });
}

TEST_F(SeveralRanks, WithoutRankZeroEachRankConcludesFromTheLedgersThatItCanRead) {
  options_.gather_deadline = 3 * kShort;
  run_ranks(3, one_hash_store(), [&](const auto& communicator) {
    auto locator = make(communicator, options_);
    ASSERT_TRUE(run_step(locator, 4, communicator->rank() == 2 ? with_bad_element() : healthy(),
                         Phase::grad_local));
    if (communicator->rank() == 0) return;
    const auto& verdict = locator.conclude();
    EXPECT_EQ(verdict.status, VerdictStatus::partial);
    EXPECT_THAT(verdict.silent_ranks, ElementsAre(0));
    EXPECT_EQ(verdict.origins.at(0).coordinates.value().rank, 2);
    EXPECT_THAT(verdict.notes, ::testing::Contains(HasSubstr("2 of 3")));
  });
  EXPECT_TRUE(std::filesystem::exists(folder_ / "run/a0/verdict_rank1.json"));
  EXPECT_TRUE(std::filesystem::exists(folder_ / "run/a0/verdict_rank2.json"));
}

nlohmann::json status_in(const std::filesystem::path& run_dir) {
  return nlohmann::json::parse(content_of(run_dir / "status.json"));
}

Rerun repeat_that_is(std::optional<bool> bad_again) {
  Rerun rerun;
  rerun.reproduced = bad_again;
  return rerun;
}

TEST_F(SingleProcess, StatusSaysWhatAFindingHasLedTo) {
  struct Case {
    Policy policy;
    std::optional<Rerun> rerun;
    const char* state;
  };
  for (const auto& [policy, rerun, state] :
       {Case{Policy::stop, {}, "stopped"}, Case{Policy::report, {}, "reported"},
        Case{Policy::skip, {}, "skipped"},
        Case{Policy::recover, repeat_that_is(false), "recovered"},
        Case{Policy::recover, repeat_that_is(true), "stopped"},
        Case{Policy::recover, {}, "stopped"}}) {
    options_.on_bad = policy;
    auto locator = make();
    ASSERT_TRUE(run_step(locator, 6, with_bad_element()));
    if (rerun) locator.set_rerun(*rerun);
    (void)locator.conclude();
    const auto status = status_in(locator.run_dir());
    EXPECT_EQ(status["version"], 1);
    EXPECT_EQ(status["state"], state);
    EXPECT_EQ(status["iteration"], 6);
    EXPECT_EQ(status["run_id"], locator.run_id());
    EXPECT_EQ(status["verdict"], "verdict.json");
    EXPECT_THAT(status["silent_ranks"], IsEmpty());
    EXPECT_THAT(status["summary"].get<std::string>(), HasSubstr("step 6: "));
  }
}

TEST_F(SingleProcess, PastTheLimitOfFindingsTheRepeatStillDecidesWhetherToGoOn) {
  options_.on_bad = Policy::recover;
  options_.max_incidents = 1;
  auto locator = make();
  for (int step = 1; step <= 3; ++step) {
    ASSERT_TRUE(run_step(locator, step, with_bad_element()));
    locator.set_rerun(repeat_that_is(step == 3));
    const auto& verdict = locator.conclude();
    EXPECT_EQ(outcome_of(Policy::recover, verdict.rerun), step == 3 ? "stopped" : "recovered");
  }
  EXPECT_THAT(locator.verdicts(), SizeIs(1));
}

TEST_F(SeveralRanks, AFailedReductionWaitsUntilItIsKnownWhoIsLostAndNamesItInEveryFile) {
  options_.gather_deadline = 4 * kShort;
  const auto errors = try_ranks(
      3, one_hash_store(),
      [&](const auto& communicator) {
        auto locator = make(communicator, options_);
        locator.begin_step(7);
        if (communicator->rank() == 1) return communicator->monitor()->leave("ValueError: no data");
        locator.start_agreement();
        (void)locator.finish_agreement();
      },
      /*flag_timeout=*/milliseconds(100));
  for (const int rank : {0, 2}) {
    const auto text = text_of<AgreementError>(errors[rank]);
    EXPECT_THAT(text, HasSubstr("ended by ValueError: no data (in iteration 7)"));
    const auto name = "run/a0/verdict_rank" + std::to_string(rank) + ".json";
    const auto verdict = verdict_from_json(content_of(folder_ / name), name);
    EXPECT_EQ(verdict.status, VerdictStatus::partial);
    EXPECT_EQ(verdict.iteration, 7);
    EXPECT_THAT(verdict.silent_ranks, ElementsAre(1));
    EXPECT_THAT(verdict.notes.at(0), HasSubstr("rank 1 (dp1"));
    const auto ledger = "run/a0/ledger_tp0pp0dp" + std::to_string(rank) + ".jsonl";
    EXPECT_THAT(content_of(folder_ / ledger), HasSubstr("ValueError: no data"));
  }
  const auto verdict = verdict_from_json(content_of(folder_ / "run/a0/verdict.json"), "verdict");
  EXPECT_THAT(verdict.silent_ranks, ElementsAre(1));
  const auto status = status_in(folder_ / "run/a0");
  EXPECT_EQ(status["state"], "rank_lost");
  EXPECT_THAT(status["silent_ranks"], ElementsAre(1));
  EXPECT_THAT(status["summary"].get<std::string>(), HasSubstr("rank 1"));
}

TEST_F(SeveralRanks, AnErrorOfARanksOwnWithoutAFindingCostsNoWaitAndWritesNothing) {
  run_ranks(2, one_hash_store(), [&](const auto& communicator) {
    auto locator = make(communicator, options_);
    EXPECT_EQ(locator.conclude_alone("before the first step"), nullptr);
    EXPECT_FALSE(run_step(locator, 1, healthy()));
    locator.begin_step(2);
    const auto before = std::chrono::steady_clock::now();
    EXPECT_EQ(locator.conclude_alone("ValueError: no data"), nullptr);
    EXPECT_LT(std::chrono::steady_clock::now() - before, kShort);
    ASSERT_TRUE(communicator->pass_barrier("before a rank leaves", {}, after(kLong)));
  });
  for (const auto& entry : std::filesystem::directory_iterator(folder_ / "run/a0")) {
    EXPECT_THAT(entry.path().filename().string(),
                ::testing::AnyOf(::testing::StartsWith("param_"), "run.json"));
  }
}

TEST_F(SeveralRanks, AFailureOfPeersThoughAllAnswerIsLeftAtTheDeadlineWithNothingToTell) {
  options_.gather_deadline = kShort;
  run_ranks(2, one_hash_store(), [&](const auto& communicator) {
    auto locator = make(communicator, options_);
    locator.begin_step(1);
    EXPECT_EQ(locator.conclude_alone("a time-out", Failure::of_peers), nullptr);
    EXPECT_EQ(locator.conclude_alone("a time-out", Failure::of_peers), nullptr);
    ASSERT_TRUE(communicator->pass_barrier("before a rank leaves", {}, after(kLong)));
  });
}

TEST_F(SeveralRanks, AFindingWaitsForNoRankThatIsKnownToBeLost) {
  options_.gather_deadline = milliseconds(24'000);  // ranks check for news every two seconds
  run_ranks(3, one_hash_store(), [&](const auto& communicator) {
    auto locator = make(communicator, options_);
    ASSERT_TRUE(run_step(locator, 4, communicator->rank() == 1 ? with_bad_element() : healthy(),
                         Phase::grad_local));
    if (communicator->rank() == 2) return communicator->monitor()->leave("MemoryError: none left");
    const auto before = std::chrono::steady_clock::now();
    const auto& verdict = locator.conclude();
    EXPECT_LT(std::chrono::steady_clock::now() - before, options_.gather_deadline / 2);
    EXPECT_EQ(verdict.origins.at(0).coordinates.value().rank, 1);
    EXPECT_THAT(verdict.silent_ranks, ElementsAre(2));
    EXPECT_THAT(verdict.notes, ::testing::Contains(HasSubstr("MemoryError: none left")));
  });
  EXPECT_EQ(status_in(folder_ / "run/a0")["state"], "stopped");
}

TEST_F(SeveralRanks, ARankThatIsLostAfterTheVerdictIsAddedToItAndReplacesNothing) {
  options_.on_bad = Policy::report;
  options_.gather_deadline = kShort;
  run_ranks(2, one_hash_store(), [&](const auto& communicator) {
    auto locator = make(communicator, options_);
    ASSERT_TRUE(run_step(locator, 4, with_bad_element(), Phase::grad_local));
    (void)locator.conclude();
    if (communicator->rank() == 1) return communicator->monitor()->leave("ValueError: no data");
    ASSERT_THAT(communicator->monitor()->wait_for_loss(after(kLong)), SizeIs(1));
    const auto is_told = [&] {  // the status is written last
      return status_in(locator.run_dir())["silent_ranks"].size() == 1;
    };
    for (const auto limit = after(kLong); !is_told() && after(milliseconds(0)) < limit;) {
      std::this_thread::sleep_for(milliseconds(10));
    }
    const auto verdict =
        verdict_from_json(content_of(locator.run_dir() / "verdict.json"), "verdict");
    EXPECT_THAT(verdict.notes.at(0), HasSubstr("no data"));
    EXPECT_EQ(verdict.origins.size(), locator.verdicts().at(0).origins.size());
    EXPECT_THAT(verdict.silent_ranks, IsEmpty());  // its ledger had arrived
    const auto status = status_in(locator.run_dir());
    EXPECT_EQ(status["state"], "reported");
    EXPECT_THAT(status["silent_ranks"], ElementsAre(1));
  });
}

TEST_F(SeveralRanks, ANormThatIsBadOnOneRankOnlyCostsADeadlineAndHangsNobody) {
  options_.gather_deadline = kShort;
  run_ranks(2, one_hash_store(), [&](const auto& communicator) {
    auto locator = make(communicator, options_);
    locator.begin_step(1);
    locator.start_agreement();
    if (communicator->rank() == 1) locator.set_gradient_norm(kNan);
    EXPECT_EQ(locator.finish_agreement(), communicator->rank() == 1);
    if (communicator->rank() == 1) EXPECT_EQ(locator.conclude().status, VerdictStatus::partial);
  });
}

TEST_F(SeveralRanks, ANormThatIsKnownBeforeTheAgreementIsAgreedOn) {
  run_ranks(2, one_hash_store(), [&](const auto& communicator) {
    auto locator = make(communicator, options_);
    locator.begin_step(1);
    if (communicator->rank() == 1) locator.set_gradient_norm(kNan);
    locator.start_agreement();
    ASSERT_TRUE(locator.finish_agreement());
    (void)locator.conclude();
  });
}

TEST_F(SeveralRanks, OptionsThatDifferAreRefusedAlikeOnEveryRank) {
  const auto errors = try_ranks(2, one_hash_store(), [&](const auto& communicator) {
    auto options = options_;
    if (communicator->rank() == 1) options.on_bad = Policy::report;
    make(communicator, options);
  });
  const auto text = text_of<AgreementError>(errors[0]);
  EXPECT_THAT(text, HasSubstr(R"(on_bad is "report" on rank 1, "stop" on rank 0)"));
  EXPECT_EQ(text_of<AgreementError>(errors[1]), text);
}

TEST_F(SeveralRanks, AnOutputFolderThatRankZeroCannotMakeFailsOnEveryRank) {
  folder_.plant("run", "in the way");
  const auto errors = try_ranks(2, one_hash_store(),
                                [&](const auto& communicator) { make(communicator, options_); });
  const auto text = text_of<IoError>(errors[0]);
  EXPECT_THAT(text, HasSubstr("run"));
  EXPECT_EQ(text_of<IoError>(errors[1]), text);
}

TEST_F(SeveralRanks, AMapThatOneRankCannotWriteFailsOnEveryRank) {
  // Rank 1 finds a folder in place of its manifest as soon as rank 0 has made the attempt's folder.
  const auto manifest = folder_ / "run/a0/param_manifest_tp0pp0dp1.json/in the way";
  class BlockingStore : public c10d::HashStore {
   public:
    explicit BlockingStore(std::filesystem::path blocked) : blocked_(std::move(blocked)) {}
    c10::intrusive_ptr<c10d::Store> clone() override {
      return c10::intrusive_ptr<BlockingStore>::unsafe_reclaim_from_nonowning(this);
    }
    void set(const std::string& key, const std::vector<uint8_t>& value) override {
      if (key.find("run") != std::string::npos) std::filesystem::create_directories(blocked_);
      HashStore::set(key, value);
    }

   private:
    std::filesystem::path blocked_;
  };
  const auto store = c10::make_intrusive<BlockingStore>(manifest);
  const auto errors = try_ranks(
      2, [&](int) { return store; },
      [&](const auto& communicator) { make(communicator, options_); });
  EXPECT_THAT(text_of<AgreementError>(errors[0]), HasSubstr("on rank 1"));
  EXPECT_THAT(text_of<IoError>(errors[1]), HasSubstr("param_manifest_tp0pp0dp1.json"));
}

TEST_F(SeveralRanks, CoordinatesThatAreNotTheCommunicatorsAreRefused) {
  const auto errors = try_ranks(1, one_hash_store(), [&](const auto& communicator) {
    GradientLocator(map_of({{1}}, data_parallel_rank(0, 4)), options_, communicator);
  });
  EXPECT_THAT(text_of<UsageError>(errors[0]), HasSubstr("rank 0 of 4"));
}

}  // namespace
}  // namespace nanlocator::testing
