#include "nanlocator/report/narrative.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <regex>
#include <set>

#include "nanlocator/error.hpp"
#include "nanlocator/report/terminal.hpp"
#include "nanlocator/verdict/cause_table.hpp"
#include "report/phrasebook.hpp"

namespace nanlocator {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Key;
using ::testing::Not;
using ::testing::Pair;

RankCoordinates place_of_rank(int rank) {
  return {.rank = rank,
          .world_size = 16,
          .dp = {rank, 16},
          .host = rank < 8 ? "a17" : "a18",
          .local_rank = rank % 8,
          .device = "cuda:" + std::to_string(rank % 8) + " GPU-6f2e 0000:1b:00.0"};
}

/// Division by zero in a router, seen in the re-run, too.
Verdict division_by_zero() {
  Verdict verdict;
  verdict.iteration = 2;
  verdict.status = VerdictStatus::located;
  Origin origin;
  origin.phase = Phase::forward;
  origin.direction = Direction::forward;
  origin.iteration = 2;
  origin.microbatch = 1;
  origin.candidates = {3};
  origin.coordinates = place_of_rank(3);
  origin.module = "decoder.layers.2.mlp.router";
  origin.op = "aten::div.Tensor";
  origin.code =
      CodeLine{.file = "model/router.py",
               .line = 515,
               .function = "gate",
               .text = "return t / denominator",
               .expression = Expression{
                   .begin = 7, .end = 22, .call = "div", .arguments = {"t", "denominator"}}};
  origin.tensor = OriginTensor{.role = "output[0]",
                               .shape = {4, 32},
                               .dtype = "float32",
                               .neg_inf = 4,
                               .first_bad = 0,
                               .first_bad_index = {0, 0}};
  origin.cause = Cause::operator_undefined;
  origin.detail = Detail::division_by_zero;
  origin.facts = {
      {.kind = FactKind::made_from_finite, .op = origin.op},
      {.kind = FactKind::values_at_first_bad, .values = {{"self", -0.0228}, {"other", 0}}},
      {.kind = FactKind::rerun_identical, .count = 54},
      {.kind = FactKind::replayed,
       .conclusion = std::string(name_of(ReplayConclusion::deterministic_undefined))}};
  origin.bundle = "bundles/step2";
  complete(origin);
  verdict.origins = {origin};
  verdict.spread = {{0, 3}, {"w"}, Phase::grad_local};
  verdict.rerun = {.done = true, .reproduced = true};
  verdict.job = {.on_bad = "stop",
                 .are_weights_updated = false,
                 .are_weights_finite = true,
                 .restart = Restart::repeats};
  verdict.layout = JobLayout{
      .first_rank = place_of_rank(0), .ranks_per_host = 8, .mentioned = {place_of_rank(3)}};
  verdict.launch = Launch{.found = "2026-11-27 02:58",
                          .scheduler = "slurm",
                          .job_id = "88213",
                          .job_name = "gpt-moe",
                          .checkpoint_dir = "/ckpt/run17",
                          .checkpoints = {{.step = 1, .name = "iter_0000001"}}};
  verdict.decision = decide(verdict);
  return verdict;
}

TEST(Narrative, TheBlockIsTheOrderOfTheDay) {
  EXPECT_EQ(
      format_verdict(division_by_zero(), {.run_dir = "/runs/a0"}),
      R"(nanlocator ERROR[div_zero] 2026-11-27 02:58 UTC job 88213 gpt-moe, step 2: LEAVE IT DOWN, PAGE THE MODEL AUTHOR
  restart NO | hosts none suspected | load after the fix: iter_0000001 | page model author | ticket none
  what:        division by zero: torch.div in decoder.layers.2.mlp.router on rank 3 = a17:GPU3 gave -Inf
               (non-finite) in 4 of 128 elements (first at [0, 0]); it reached the gradients of 1 parameter on
               2 ranks
  cause:       code, proven: a re-run on the same GPU reproduced it bit for bit; this call alone reproduces
               it, also in float64; every input was finite
  state:       stopped before the update of step 2; weights finite, as after step 1; a restart fails again
               until the code is fixed
  checkpoint:  after the fix: LOAD /ckpt/run17/iter_0000001 (after step 1, the newest): saved before this
               fault
  plan:        after the fix: nanlocator next /runs/a0   (prints the orders as of then)
  --- for the model author
  model/router.py:515 in gate, forward, microbatch 1 (rank 3 = a17:GPU3)
  515 |  return t / denominator
      |         ^^^^^^^^^^^^^^^
  here:        t is -0.0228, denominator is 0 at element [0, 0]
  next:        find what made denominator zero
               if a zero may occur there, replace it before torch.div (torch.where after it still gives NaN in
               backward); if it may not, do not clamp it: that would hide the fault
  replay:      nanlocator replay /runs/a0/bundles/step2
)");
}

TEST(Narrative, SaysOnceThatSomethingIsNotFinite) {
  const std::string text = format_verdict(division_by_zero());
  const std::regex pattern("non-finite");
  EXPECT_EQ(std::distance(std::sregex_iterator(text.begin(), text.end(), pattern), {}), 1);
}

TEST(Narrative, AJobThatGoesOnWakesNobody) {
  Verdict verdict = division_by_zero();
  verdict.job.on_bad = "skip";
  verdict.decision = decide(verdict);
  const Narrative told = narrative_of(verdict);
  EXPECT_EQ(told.severity, "WARNING");
  EXPECT_EQ(told.action, "LET IT RUN, FILE A TICKET");
  EXPECT_EQ(told.load, "not needed");
  EXPECT_EQ(told.page, "nobody");
  EXPECT_EQ(told.ticket, "model author");
  EXPECT_THAT(told.rows, Not(Contains(Key("checkpoint"))));
}

TEST(Narrative, OperandsHaveTheNamesOfTheLineWhoseverTheOperatorIs) {
  Verdict verdict = division_by_zero();
  for (const char* const op : {"aten::special_divide_.out", "my_library::divide_.out"}) {
    verdict.origins.front().op = op;
    verdict.origins.front().code->expression->call = "divide";
    EXPECT_THAT(narrative_of(verdict).details,
                Contains(Pair("here", "t is -0.0228, denominator is 0 at element [0, 0]")));
  }
}

TEST(Narrative, ACheckpointThatIsBadIsNotWhatTheRunIsStartedFromAgain) {
  Verdict verdict = division_by_zero();
  verdict.iteration = 1;
  verdict.origins.front().iteration = 1;
  verdict.launch->checkpoints = {
      {.step = 1, .name = "iter_0000001", .is_finite = false, .found = "w holds NaN"}};
  verdict.decision = decide(verdict);
  const Narrative told = narrative_of(verdict);
  EXPECT_EQ(told.load, "nothing now");
  EXPECT_THAT(told.rows, Contains(Pair("checkpoint", HasSubstr("holds no other; the model author "
                                                               "decides: "))));
}

TEST(Narrative, ThePlanIsNamedWhereThereIsSomethingToDo) {
  Verdict verdict = division_by_zero();
  const std::string folder = "/a folder/" + std::string(120, 'x') + "/a0";
  EXPECT_THAT(
      format_verdict(verdict, {.run_dir = folder}),
      HasSubstr("  plan:        after the fix: nanlocator next '" + folder + "'   (prints"));
  EXPECT_THAT(narrative_of(verdict).rows, Not(Contains(Key("plan"))));  // the folder is not known
  verdict.job.on_bad = "skip";
  verdict.decision = decide(verdict);
  EXPECT_THAT(narrative_of(verdict, folder).rows, Not(Contains(Key("plan"))));
}

TEST(Narrative, AJobOnBadWeightsIsKilled) {
  Verdict verdict = division_by_zero();
  verdict.job.on_bad = "report";
  verdict.decision = decide(verdict);
  const Narrative told = narrative_of(verdict);
  EXPECT_EQ(told.severity, "FATAL");
  EXPECT_EQ(told.action, "KILL IT NOW, PAGE THE MODEL AUTHOR");
  EXPECT_THAT(told.rows, Contains(Pair("kill", HasSubstr("s\\cancel --signal=KILL --full 88213"))));
}

/// Only a further attempt is to tell more.
Verdict unexplained() {
  Verdict verdict = division_by_zero();
  verdict.origins.front().cause = Cause::unknown;
  verdict.origins.front().detail = Detail::none;
  verdict.origins.front().facts = {};
  verdict.decision = decide(verdict);
  return verdict;
}

TEST(Narrative, AProvenOriginStandsWithoutASilentRank) {
  Verdict verdict = division_by_zero();
  verdict.silent_ranks = {11};
  const Narrative told = narrative_of(verdict);
  EXPECT_EQ(told.action, "LEAVE IT DOWN, PAGE THE MODEL AUTHOR");
  EXPECT_THAT(told.rows, Contains(Pair("silent", HasSubstr("which stands without it"))));
}

TEST(Narrative, ASilentRankIsNamedWithItsHost) {
  Verdict verdict = unexplained();
  verdict.silent_ranks = {11};
  verdict.layout->mentioned.push_back(place_of_rank(11));
  const Narrative told = narrative_of(verdict);
  EXPECT_EQ(told.action, "FIRST READ THE LOG OF RANK 11 ON a18, THEN RESTART TRACED");
  EXPECT_EQ(told.hosts, "by that log and the check, else unchanged");
  EXPECT_EQ(told.restart, "BY THAT LOG");
  EXPECT_EQ(told.page, "by that log");
  EXPECT_THAT(told.rows, Contains(Pair("silent", "no answer from rank 11 = a18:GPU3")));
  EXPECT_THAT(told.rows,
              Contains(Pair("FIRST", HasSubstr("last lines ('[rank11]: ...') in the job's log"))));
  EXPECT_THAT(told.rows, Contains(Pair("if NOTHING", HasSubstr("(sbatch --exclude=a18)"))));
}

TEST(Narrative, ARankThatEndedByItselfIsTheCause) {
  Verdict verdict = division_by_zero();
  verdict.origins.front().cause = Cause::unknown;
  verdict.origins.front().detail = Detail::none;
  verdict.silent_ranks = {11};
  verdict.layout->mentioned.push_back(place_of_rank(11));
  verdict.launch->logs = {{.rank = 11, .log = "/logs/a18.err"}};
  verdict.launch->endings = {
      {11, EndingKind::killed, "torch.OutOfMemoryError: CUDA out of memory"}};
  verdict.decision = decide(verdict);
  const Narrative told = narrative_of(verdict);
  EXPECT_EQ(told.code, "silent_ranks");
  EXPECT_EQ(told.action, "RESTART ONCE, UNCHANGED");
  EXPECT_THAT(
      told.rows,
      Contains(Pair("what", HasSubstr("rank 11 = a18:GPU3 ended with: "
                                      "torch.OutOfMemoryError: CUDA out of memory (its log: "
                                      "/logs/a18.err); in the same step: "))));
  EXPECT_THAT(told.rows, Contains(Pair("cause", HasSubstr("memory or a kill, likely"))));
  EXPECT_THAT(told.rows, Not(Contains(Key("silent"))));
  EXPECT_THAT(told.rows, Contains(Pair("if AGAIN", HasSubstr("with such an end of any rank"))));
  EXPECT_THAT(told.details, Contains(Pair("next", "mend first what ended rank 11")));
}

Verdict bad_sample() {
  Verdict verdict = division_by_zero();
  Origin& origin = verdict.origins.front();
  origin.cause = Cause::bad_input;
  origin.detail = Detail::none;
  origin.tensor->shape = {8, 3, 32, 32};
  origin.tensor->first_bad_index = {6, 2, 4, 4};
  origin.facts = {};
  complete(origin);
  verdict.decision = decide(verdict);
  return verdict;
}

TEST(Narrative, ABatchIsSkippedAndItsSampleIsNamed) {
  const Narrative told = narrative_of(bad_sample());
  EXPECT_EQ(told.action, "RESTART, SKIPPING BAD BATCHES");
  EXPECT_THAT(
      told.rows,
      Contains(
          Pair("skip", HasSubstr("(sbatch --export=ALL,NANLOCATOR_ON_BAD=skip ...): this batch "
                                 "(first bad in sample 6, from 0, of 8 of microbatch 1 on rank 3 = "
                                 "a17:GPU3)"))));
}

TEST(Narrative, ASampleIsNamedByItsIndexInTheDataSet) {
  Verdict verdict = bad_sample();
  verdict.origins.front().facts.push_back(
      {.kind = FactKind::samples,
       .ranks = {3},
       .text = "sample 77 of Feats",
       .names = {"samples 70 to 79 of Feats; NaN or Inf in 77"}});
  const Narrative told = narrative_of(verdict);
  EXPECT_THAT(told.rows, Contains(Pair("skip", HasSubstr("this batch (sample 77 of Feats)"))));
  EXPECT_THAT(told.details, Contains(Pair("batch", "samples 70 to 79 of Feats; NaN or Inf in 77")));
}

/// The weights are bad by now, and the same batch would make them bad again.
TEST(Narrative, ABatchIsSkippedAfterAKill) {
  Verdict verdict = bad_sample();
  verdict.job.on_bad = "report";
  verdict.decision = decide(verdict);
  const Narrative told = narrative_of(verdict);
  EXPECT_EQ(told.action, "KILL IT NOW, THEN RESTART, SKIPPING BAD BATCHES");
  EXPECT_EQ(told.load, "iter_0000001");
  EXPECT_THAT(told.rows, Contains(Key("skip")));
  EXPECT_THAT(told.rows,
              Contains(Pair("state", HasSubstr("the weights were last finite after step 1"))));
}

/// A collective that returned NaN to rank 3 for finite inputs.
Verdict bad_collective() {
  Verdict verdict = division_by_zero();
  Origin& origin = verdict.origins.front();
  origin.cause = Cause::collective_result;
  origin.detail = Detail::none;
  origin.op = "c10d::allreduce_";
  origin.code.reset();
  origin.facts = {{.kind = FactKind::collective_changed,
                   .ranks = {3},
                   .peers = {3, 11},
                   .op = "c10d::allreduce_"},
                  {.kind = FactKind::happened_once}};
  complete(origin);
  verdict.layout->mentioned = {place_of_rank(3), place_of_rank(11)};
  verdict.rerun = {.done = true, .reproduced = false};
  verdict.decision = decide(verdict);
  return verdict;
}

TEST(Narrative, SuspectedHostsAreNamedWithTheirGpusAndACheck) {
  const Narrative told = narrative_of(bad_collective());
  EXPECT_EQ(told.action, "RESTART WITHOUT a17");
  EXPECT_EQ(told.hosts, "without a17");
  EXPECT_EQ(told.page, "nobody");
  EXPECT_EQ(told.ticket, "cluster on-call");
  EXPECT_THAT(told.rows,
              Contains(Pair("what", HasSubstr("an all-reduce of rank 3 = a17:GPU3 and rank 11 = "
                                              "a18:GPU3 in decoder.layers.2.mlp.router returned "
                                              "-Inf (non-finite)"))));
  EXPECT_THAT(told.rows, Contains(Pair("cause", HasSubstr("hardware or code, open"))));
  EXPECT_THAT(
      told.rows,
      Contains(Pair("check", HasSubstr("cluster on-call, on a17, out of the job: nanlocator "
                                       "netcheck --nproc-per-node 8"))));
  EXPECT_THAT(told.rows, Contains(Key("if FAIL")));
  EXPECT_THAT(told.rows, Contains(Key("if PASS")));
}

TEST(Narrative, ADeviceWithASecondEventStaysOut) {
  Verdict verdict = bad_collective();
  verdict.decision.recurrence = Recurrence::same_device;
  EXPECT_THAT(narrative_of(verdict).rows,
              Contains(Pair("if PASS", HasSubstr("stays out all the same"))));
}

TEST(Narrative, GradientsThatWereLeftBehindSendTheReaderToTheirStep) {
  Verdict verdict = division_by_zero();
  Origin& origin = verdict.origins.front();
  origin.cause = Cause::left_gradients;
  origin.facts = {{.kind = FactKind::gradients_left, .step = 1}};
  complete(origin);
  verdict.decision = decide(verdict);
  EXPECT_EQ(narrative_of(verdict).action, "RESTART ONCE, UNCHANGED");
  follow(division_by_zero(), verdict);
  const Narrative told = narrative_of(verdict, "/runs/a0");
  EXPECT_EQ(told.action, "LEAVE IT DOWN, PAGE THE MODEL AUTHOR");
  EXPECT_THAT(told.rows,
              Contains(Pair("decides", HasSubstr("nanlocator report /runs/a0 --step 1"))));
}

TEST(Narrative, ACollectiveThatFailsAgainIsRatherTheCode) {
  Verdict verdict = bad_collective();
  verdict.origins[0].facts.pop_back();
  verdict.origins[0].facts.push_back({.kind = FactKind::rerun_identical});
  verdict.rerun.reproduced = true;
  verdict.decision = decide(verdict);
  const Narrative told = narrative_of(verdict);
  EXPECT_EQ(told.action, "CHECK a17; IF CLEAN: LEAVE IT DOWN, PAGE THE FRAMEWORK TEAM");
  EXPECT_THAT(told.rows, Contains(Pair("cause", HasSubstr("hardware or code, open"))));
  EXPECT_THAT(told.rows, Contains(Pair("check", HasSubstr("nvidia-smi -q -d ECC"))));
}

TEST(Narrative, NoMachineIsNamedWhereTheCodeIsProven) {
  const Narrative told = narrative_of(division_by_zero());
  EXPECT_EQ(told.hosts, "none suspected");
  EXPECT_THAT(told.rows, Not(Contains(Key("check"))));
}

TEST(Narrative, CheckpointsThatHoldTheFaultAreNeverLoaded) {
  Verdict verdict = division_by_zero();
  verdict.iteration = 900;
  Origin& origin = verdict.origins.front();
  origin.cause = Cause::bad_weight;
  origin.parameter = "head.weight";
  origin.facts = {};
  complete(origin);
  verdict.job.restart = Restart::before_step;
  verdict.job.restart_before = 650;
  verdict.job.are_weights_finite = false;
  verdict.launch->checkpoints = {{.step = 800, .name = "iter_0000800"},
                                 {.step = 700, .name = "iter_0000700"},
                                 {.step = 600, .name = "iter_0000600"}};
  verdict.decision = decide(verdict);
  const Narrative told = narrative_of(verdict);
  EXPECT_EQ(told.action, "CHECK a17, THEN MOVE 2 CHECKPOINTS AWAY, THEN RESTART FROM iter_0000600");
  EXPECT_THAT(
      told.rows,
      Contains(
          Pair("checkpoint",
               HasSubstr("NEVER LOAD iter_0000700 or anything newer (it may hold the fault); LOAD "
                         "/ckpt/run17/iter_0000600 (after step 600), once "
                         "nanlocator check-checkpoint "
                         "/ckpt/run17/iter_0000600 finds it finite, else the "
                         "one before"))));
}

TEST(Narrative, CheckpointsOfARunThatWasResumedCountItsEarlierSteps) {
  Verdict verdict = division_by_zero();
  verdict.iteration = 35;
  verdict.job.are_weights_finite = false;
  verdict.origins.front().cause = Cause::bad_weight;
  verdict.origins.front().facts = {};
  complete(verdict.origins.front());
  verdict.job.restart = Restart::before_step;
  verdict.job.restart_before = 31;
  verdict.launch->steps_before = 800;
  verdict.launch->checkpoints = {{.step = 833, .name = "step_833"},
                                 {.step = 830, .name = "step_830"},
                                 {.step = 800, .name = "step_800"}};
  verdict.decision = decide(verdict);
  const auto checkpoint_of = [&] {
    for (const auto& [label, text] : narrative_of(verdict).rows) {
      if (std::string_view(label) == "checkpoint") return text;
    }
    return std::string();
  };
  EXPECT_THAT(checkpoint_of(), HasSubstr("NEVER LOAD step_833 (it may hold the fault); LOAD "
                                         "/ckpt/run17/step_830 (after step 830)"));

  verdict.launch->steps_before.reset();
  EXPECT_THAT(checkpoint_of(),
              HasSubstr("LOAD the newest from before the update of step 31 (the names "
                        "in /ckpt/run17 count other steps), NEVER LOAD anything newer"));
  Verdict alone = division_by_zero();
  alone.launch->steps_before.reset();
  EXPECT_THAT(
      narrative_of(alone).rows,
      Contains(Pair("checkpoint",
                    HasSubstr("LOAD /ckpt/run17/iter_0000001 (after step 1, the newest)"))));
}

TEST(Narrative, CheckpointsThatWereReadNeedNoCheck) {
  Verdict verdict = division_by_zero();
  verdict.iteration = 35;
  verdict.job.are_weights_finite = false;
  Origin& origin = verdict.origins.front();
  origin.cause = Cause::bad_weight;
  origin.parameter = "head.weight";
  origin.facts = {};
  origin.alternatives = {Suspect::checkpoint, Suspect::last_update};
  complete(origin);
  verdict.job.restart = Restart::check_first;
  verdict.launch->steps_before = 800;
  verdict.launch->loaded = "step_800";
  verdict.launch->checkpoints = {
      {.step = 830, .name = "step_830"},
      {.step = 800, .name = "step_800", .is_finite = false, .found = "head.weight holds NaN"},
      {.step = 790, .name = "step_790", .is_finite = true}};
  verdict.decision = decide(verdict);
  Narrative told = narrative_of(verdict);
  EXPECT_EQ(told.action, "MOVE 2 CHECKPOINTS AWAY, THEN RESTART FROM step_790");
  EXPECT_EQ(told.load, "step_790");
  EXPECT_THAT(told.rows, Contains(Pair("cause",
                                       "checkpoint, proven: step_800, which this run had "
                                       "loaded: head.weight holds NaN")));
  EXPECT_THAT(
      told.rows,
      Contains(Pair("aside", HasSubstr("mkdir -p /ckpt/run17.set_aside && mv /ckpt/run17/step_830 "
                                       "/ckpt/run17/step_800 /ckpt/run17.set_aside/"))));
  EXPECT_THAT(
      told.rows,
      Contains(Pair(
          "checkpoint",
          "NEVER LOAD step_830 (it may hold the fault); NEVER LOAD step_800 (head.weight holds "
          "NaN); LOAD /ckpt/run17/step_790 (after step 790): everything in it "
          "was read and is finite")));

  for (CheckpointFile& each : verdict.launch->checkpoints) each.is_finite = false;
  verdict.decision = decide(verdict);
  EXPECT_EQ(verdict.decision.kind, DecisionKind::do_not_restart);
  EXPECT_THAT(narrative_of(verdict).action,
              HasSubstr("AWAY, LEAVE THE JOB DOWN, PAGE THE MODEL AUTHOR"));
  told = narrative_of(verdict);
  EXPECT_EQ(told.rows.front().first, "aside");
  EXPECT_THAT(told.rows, Contains(Pair("checkpoint", HasSubstr("/ckpt/run17 holds no other; the "
                                                               "model author decides: "))));
  EXPECT_THAT(told.rows, Contains(Pair("", "(now, so that no resubmit loads it)")));
}

TEST(Narrative, TheLearningRateIsNoSuspectOfAWeightThatJumped) {
  Verdict verdict = division_by_zero();
  Origin& origin = verdict.origins.front();
  origin.cause = Cause::operator_overflow;
  origin.detail = Detail::exceeds_range;
  origin.facts = {{.kind = FactKind::weights_magnitude, .values = {{"head.weight", 3e24}}},
                  {.kind = FactKind::learning_rate, .value = 1e-3},
                  {.kind = FactKind::weight_maxima,
                   .value = 3e24,
                   .parameter = "head.weight",
                   .values = {{"1", 0.11}}}};
  complete(origin);
  ASSERT_EQ(origin.action, Action::find_weight_writer);
  verdict.decision = decide(verdict);
  EXPECT_THAT(narrative_of(verdict).rows, Not(Contains(Pair("cause", HasSubstr("learning rate")))));
  origin.facts.pop_back();
  complete(origin);
  verdict.decision = decide(verdict);
  EXPECT_THAT(narrative_of(verdict).rows,
              Contains(Pair("cause", HasSubstr("learning rate or code, open: the learning rate is "
                                               "0.001"))));
}

TEST(Narrative, OfCheckpointsOfARunThatGrewTheNewestThatHadNotIsNamed) {
  Verdict verdict = division_by_zero();
  verdict.iteration = 35;
  Origin& origin = verdict.origins.front();
  origin.cause = Cause::divergence;
  origin.facts = {};
  complete(origin);
  verdict.job.restart = Restart::before_step;
  verdict.job.restart_before = 29;
  verdict.launch->checkpoints = {
      {.step = 30, .name = "step_30", .is_finite = true, .largest = 4e8},
      {.step = 28, .name = "step_28", .is_finite = true, .largest = 7e3},
      {.step = 20, .name = "step_20", .is_finite = true, .largest = 0.5},
      {.step = 10, .name = "step_10", .is_finite = true, .largest = 0.4}};
  verdict.decision = decide(verdict);
  EXPECT_THAT(
      narrative_of(verdict).rows,
      Contains(Pair("checkpoint", HasSubstr("LOAD /ckpt/run17/step_20 (after step 20): finite, and "
                                            "its largest weight, 0.5, had not grown"))));
  verdict.launch->checkpoints.pop_back();  // nothing to compare with
  EXPECT_THAT(narrative_of(verdict).rows,
              Contains(Pair("checkpoint", HasSubstr("LOAD the newest of step 28 or older"))));
}

TEST(Narrative, SilentRanksWhoseLogIsKnownAreLeftToThePlan) {
  Verdict verdict = unexplained();
  verdict.silent_ranks = {1, 4};
  verdict.launch->log = "/logs/my job.out";
  verdict.decision = decide(verdict);
  const Narrative told = narrative_of(verdict);
  EXPECT_THAT(told.rows, Contains(Pair("silent",
                                       "no answer from 2 ranks: 1, 4; its log: "
                                       "'/logs/my job.out'")));
  EXPECT_EQ(told.action, "FIRST nanlocator next (2 RANKS ARE SILENT), THEN RESTART TRACED");
  EXPECT_EQ(told.hosts, "as nanlocator next says, else unchanged");
  EXPECT_THAT(told.rows, Contains(Pair("FIRST", HasSubstr("reads that log again"))));
  verdict.launch->endings = {{4, EndingKind::of_peers, "exit code -15"}};
  EXPECT_THAT(narrative_of(verdict).rows,
              Contains(Pair("silent", HasSubstr("whose last words are 'exit code -15'"))));
}

TEST(Narrative, ACleanAndAnEmptyVerdictSaySo) {
  Verdict verdict;
  verdict.iteration = 3;
  EXPECT_EQ(format_verdict(verdict),
            "nanlocator INFO[clean] step 3: NO ACTION\n"
            "  what:        no NaN or Inf in what was seen\n");
  verdict.status = VerdictStatus::partial;
  verdict.decision = decide(verdict);
  EXPECT_THAT(format_verdict(verdict), HasSubstr("ERROR[incomplete] step 3: RESTART TRACED"));
}

TEST(Narrative, NamesCannotWriteEscapeSequences) {
  Verdict verdict = division_by_zero();
  verdict.origins[0].module = "x\033[2J\r\nstep 1: clean\x9b\xe2\x80\xae";
  verdict.origins[0].code->text = "\033]0;title\007";
  verdict.launch->job_name = "\x1b[31mred";
  verdict.launch->checkpoints.front().name = "iter\n_1";
  const std::string text = format_verdict(verdict);
  for (const char byte : text) {
    EXPECT_TRUE(byte == '\n' || static_cast<unsigned char>(byte) >= 0x20) << static_cast<int>(byte);
  }
  EXPECT_THAT(text, Not(HasSubstr("\xe2\x80\xae")));
  EXPECT_THAT(text, Not(HasSubstr("\nstep 1")));
}

// Every origin has a code, and every code its five phrases.
TEST(Phrasebook, KnowsEveryCauseAndDetail) {
  const auto known = explained_codes();
  const std::set<std::string> codes(known.begin(), known.end());
  EXPECT_EQ(codes.size(), known.size()) << "a code stands twice";
  for (std::size_t cause = 0; cause < kNames<Cause>.size(); ++cause) {
    for (std::size_t detail = 0; detail < kNames<Detail>.size(); ++detail) {
      Verdict verdict = division_by_zero();
      verdict.origins[0].cause = static_cast<Cause>(cause);
      verdict.origins[0].detail = static_cast<Detail>(detail);
      complete(verdict.origins[0]);
      EXPECT_TRUE(codes.contains(error_code_of(verdict))) << error_code_of(verdict);
      const Narrative told = narrative_of(verdict);
      EXPECT_THAT(told.rows, Contains(Pair("what", Not(HasSubstr("{"))))) << told.code;
    }
  }
  for (const std::string& code : known) {
    EXPECT_THAT(explanation_of(code), HasSubstr("\n  confirm   ")) << code;
    EXPECT_FALSE(phrase(code, "what").empty()) << code;
  }
}

TEST(Phrasebook, RefusesAnUnknownCode) {
  EXPECT_THROW((void)explanation_of("no_such_code"), UsageError);
}

}  // namespace
}  // namespace nanlocator
