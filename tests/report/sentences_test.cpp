#include "nanlocator/report/sentences.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "nanlocator/locate/locate.hpp"
#include "nanlocator/verdict/cause_table.hpp"
#include "report/fact_text.hpp"

namespace nanlocator {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

/// Hosts of `per_host` ranks each, tp fastest.
std::vector<RankCoordinates> ranks_of(int world, int per_host, int tp = 1, int pp = 1, int ep = 1) {
  std::vector<RankCoordinates> ranks;
  for (int rank = 0; rank < world; ++rank) {
    RankCoordinates at;
    at.rank = rank;
    at.world_size = world;
    at.tp = {rank % tp, tp};
    at.pp = {rank / (world / pp), pp};
    at.ep = {rank / tp % ep, ep};
    at.host = "a" + std::to_string(17 + rank / per_host);
    at.local_rank = rank % per_host;
    ranks.push_back(at);
  }
  return ranks;
}

/// The command for a job with these ranks, one of which has seen something bad.
std::string machine_check_command(const std::vector<RankCoordinates>& ranks) {
  std::vector<Ledger> ledgers;
  for (const RankCoordinates& at : ranks) {
    Ledger& ledger = ledgers.emplace_back();
    ledger.coordinates = at;
  }
  const Verdict verdict = locate(ledgers, ranks.front().world_size);
  return nanlocator::machine_check_command(verdict.layout.value());
}

TEST(MachineCheck, OneHostNeedsTheRanksAndTheLayout) {
  EXPECT_EQ(machine_check_command(ranks_of(8, 8, 2, 2)),
            "nanlocator netcheck --nproc-per-node 8 --tp 2 --pp 2");
  EXPECT_EQ(machine_check_command(ranks_of(4, 4)), "nanlocator netcheck --nproc-per-node 4");
}

TEST(MachineCheck, SeveralHostsMeetOnTheFirst) {
  EXPECT_EQ(machine_check_command(ranks_of(32, 8, 4, 1, 8)),
            "nanlocator netcheck --nproc-per-node 8 --nnodes 4 --rdzv-backend c10d --rdzv-endpoint "
            "a17:29400 --tp 4 --ep 8");
}

TEST(MachineCheck, SilentRanksAreCountedWithTheOthersOfTheirHost) {
  auto ranks = ranks_of(16, 8);
  ranks.erase(ranks.begin(), ranks.begin() + 3);
  EXPECT_THAT(machine_check_command(ranks), HasSubstr("--nproc-per-node 8 --nnodes 2 "));
}

TEST(MachineCheck, OneRankHasNobodyToTalkTo) {
  EXPECT_EQ(machine_check_command(ranks_of(1, 1)), "");
}

/// The action for a rank that has seen one birth of this kind and nothing else.
std::string action_after(BirthKind kind) {
  Birth birth;
  birth.kind = kind;
  birth.sighting.phase = Phase::backward;
  birth.sighting.module = "body";
  birth.sighting.dtype = "float32";
  birth.sighting.shape = {2};
  birth.sighting.stats.numel = 2;
  birth.sighting.stats.nan = 1;
  birth.sighting.stats.first_bad = 1;
  birth.reached = {{ReachedKind::loss, "loss"}};
  Ledger ledger;
  ledger.coordinates = ranks_of(2, 2, 2).front();
  ledger.births = {birth};
  const auto verdict = locate({&ledger, 1}, 2);
  return verdict.origins.empty() ? "no origin" : action_of(verdict, verdict.origins.front());
}

TEST(MachineCheck, IsNamedWhereTheMachineMayBeAtFaultAndNowhereElse) {
  EXPECT_THAT(action_after(BirthKind::collective),
              StartsWith("check the machines and their links, on each host: nanlocator netcheck "
                         "--nproc-per-node 1 "
                         "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint a17:29400 --tp 2"));
  EXPECT_THAT(action_after(BirthKind::memory), HasSubstr("nanlocator netcheck"));
  EXPECT_THAT(action_after(BirthKind::nan), Not(HasSubstr("netcheck")));
}

// ---- every row and every kind has its words ----

Origin origin_with(Cause cause, Detail detail = Detail::none) {
  Origin origin;
  origin.phase = Phase::forward;
  origin.coordinates = RankCoordinates{.rank = 0, .world_size = 2, .tp = {0, 2}};
  origin.candidates = {0};
  origin.op = "aten::log";
  origin.tensor = OriginTensor{.dtype = "float32", .nan = 1};
  origin.cause = cause;
  origin.detail = detail;
  complete(origin);
  return origin;
}

TEST(Sentences, EachCauseHasATitleAnOwnerARefutationAndAnAction) {
  const Verdict verdict;
  for (std::size_t i = 0; i < kNames<Cause>.size(); ++i) {
    const auto cause = static_cast<Cause>(i);
    ASSERT_EQ(row_of(cause).cause, cause);
    const Origin origin = origin_with(cause);
    for (const std::string& text : {title_of(origin), owner_of(origin), refutation_of(origin),
                                    action_of(verdict, origin), certainty_of(origin)}) {
      EXPECT_FALSE(text.empty()) << name_of(cause);
    }
    EXPECT_THAT(title_of(origin), Not(HasSubstr("_"))) << "plain English";
  }
}

TEST(Sentences, EachFactHasItsOwnSentence) {
  Origin origin;
  for (std::size_t i = 0; i < kNames<FactKind>.size(); ++i) {
    origin.facts = {{.kind = static_cast<FactKind>(i), .ranks = {1}, .peers = {2}, .text = "text"}};
    if (origin.facts[0].kind == FactKind::stated_action) continue;
    const auto evidence = evidence_of({}, origin);
    ASSERT_EQ(evidence.size(), 1u);
    EXPECT_FALSE(evidence[0].empty()) << kNames<FactKind>[i];
  }
}

TEST(Sentences, AnEpsilonIsAdvisedOnlyWhereASlopeIsInfinite) {
  for (std::size_t i = 0; i < kNames<Detail>.size(); ++i) {
    const auto detail = static_cast<Detail>(i);
    const std::string action = action_of({}, origin_with(Cause::operator_undefined, detail));
    const bool is_warned_of = action.find("not add an epsilon") != std::string::npos ||
                              action.find("an epsilon will not help") != std::string::npos;
    if (detail != Detail::derivative_at_pole && !is_warned_of) {
      EXPECT_THAT(action, Not(HasSubstr("epsilon"))) << name_of(detail);
    }
  }
}

TEST(Sentences, NoActionNeedsWhatAnOriginFromAFileMayLack) {
  for (std::size_t i = 0; i < kNames<Action>.size(); ++i) {
    Origin origin;
    origin.action = static_cast<Action>(i);
    const bool is_silent = origin.action == Action::none || origin.action == Action::stated;
    EXPECT_EQ(action_of({}, origin).empty(), is_silent) << name_of(origin.action);
  }
}

TEST(Sentences, ATransferThatFailedAgainPointsToSoftwareAndNotToTheLink) {
  Origin origin = origin_with(Cause::collective_result);
  EXPECT_THAT(certainty_of(origin), HasSubstr("a link"));
  EXPECT_EQ(origin.owner, Owner::cluster_operator);
  origin.facts = {{.kind = FactKind::transfer_bad_again}};
  complete(origin);
  EXPECT_THAT(certainty_of(origin), Not(HasSubstr("a link")));
  EXPECT_EQ(origin.owner, Owner::framework);
}

TEST(Sentences, WhereACollectiveGaveItsMembersDifferentValuesTheHeadlineAndTheActionSaySo) {
  Verdict verdict;
  verdict.iteration = 3;
  Origin origin;
  origin.phase = Phase::loss;
  origin.cause = Cause::collective_result;
  origin.op = "aten::log";
  origin.candidates = {1};
  origin.tensor = OriginTensor{.role = "output[0]", .neg_inf = 1};
  origin.facts = {{.kind = FactKind::members_got_other_values,
                   .ranks = {1},
                   .peers = {0, 2},
                   .count = 1,
                   .of = 0,
                   .value = 189,
                   .last_value = 190,
                   .op = "c10d::allreduce_",
                   .group = "tp"}};
  complete(origin);
  verdict.origins = {origin};
  EXPECT_THAT(headline_of(verdict),
              HasSubstr("a collective gave rank 1 other values than its peers: "
                        "-Inf born of them in loss"));
  EXPECT_THAT(fact_text(origin.facts[0]),
              HasSubstr("(rank 1: largest magnitude 189, 1 zero; ranks 0, 2: 190, 0 zero)"));
  EXPECT_THAT(action_of(verdict, origin),
              HasSubstr("c10d::allreduce_ of group tp gives rank 1 and ranks 0, 2"));
}

TEST(Sentences, TheJobsStateFollowsFromPolicyAndRerun) {
  Verdict verdict;
  verdict.iteration = 1284;
  verdict.status = VerdictStatus::located;
  EXPECT_EQ(job_of(verdict), "");
  verdict.job = {.on_bad = "stop", .are_weights_updated = false};
  EXPECT_EQ(job_of(verdict), "stops; nothing of step 1284 was applied (on_bad=stop)");
  verdict.job.on_bad = "recover";
  verdict.rerun = {.done = true, .reproduced = false, .not_restored = {}};
  EXPECT_EQ(job_of(verdict), "goes on with the finite gradients of the re-run (on_bad=recover)");
  EXPECT_EQ(restart_of(verdict), "not needed: nothing bad of this step was applied");
}

TEST(Sentences, ARestartIsAdvisedFromTheJobsState) {
  Verdict verdict;
  verdict.iteration = 1284;
  verdict.status = VerdictStatus::located;
  verdict.job = {.on_bad = "stop",
                 .are_weights_updated = false,
                 .are_weights_finite = true,
                 .restart = Restart::latest};
  EXPECT_THAT(restart_of(verdict), StartsWith("from the latest checkpoint"));
  EXPECT_THAT(restart_of(verdict), HasSubstr("every weight was finite before step 1284"));
  verdict.job.are_weights_finite.reset();
  EXPECT_THAT(restart_of(verdict), Not(HasSubstr("finite")));
  verdict.job.restart = Restart::repeats;
  EXPECT_THAT(restart_of(verdict), HasSubstr("step 1284 will be bad again"));
  verdict.job.restart = Restart::before_step;
  verdict.job.restart_before = 1280;
  EXPECT_THAT(restart_of(verdict), StartsWith("only from a checkpoint of step 1279 or earlier"));
  verdict.job.on_bad = "skip";  // bad weights stay bad
  EXPECT_THAT(restart_of(verdict), HasSubstr("step 1279 or earlier"));
}

TEST(Sentences, WhereGradientsThatAreBadAreAppliedTheWeightsAreBadFromThatStepOn) {
  Verdict verdict;
  verdict.iteration = 12;
  verdict.status = VerdictStatus::located;
  verdict.job = {.on_bad = "report", .restart = Restart::repeats};
  EXPECT_EQ(restart_of(verdict), "not needed: nothing bad of this step was applied")
      << "a loss that is bad, and finite gradients";
  verdict.spread.parameters = {"w"};
  EXPECT_THAT(restart_of(verdict), HasSubstr("from a checkpoint of step 11 or earlier"));
  verdict.job.framework_skips_update = true;
  EXPECT_EQ(restart_of(verdict), "not needed: nothing bad of this step was applied");
  EXPECT_EQ(job_of(verdict),
            "goes on; the framework leaves out the update of step 12 (on_bad=report)");
  verdict.job.restart = Restart::before_step;
  EXPECT_THAT(restart_of(verdict), HasSubstr("from a checkpoint of step 11 or earlier"))
      << "the weights were bad";
  verdict.job = {.on_bad = "report", .framework_skips_update = true, .restart = Restart::repeats};
  verdict.rerun = {.done = true, .reproduced = false, .not_restored = {}};
  EXPECT_EQ(restart_of(verdict), "not needed: nothing bad of this step was applied")
      << "the gradients in memory are the re-run's";
  EXPECT_THAT(job_of(verdict), HasSubstr("finite gradients of the re-run"));
}

TEST(Sentences, BothEndsOfASuspectedLinkHaveHostAndDevice) {
  Verdict verdict;
  verdict.layout.emplace();
  verdict.layout->mentioned = {
      {.rank = 1, .world_size = 8, .pp = {0, 2}, .host = "a17", .device = "cuda:1 GPU-6f2e"},
      {.rank = 5, .world_size = 8, .pp = {1, 2}, .host = "a18", .device = "cuda:0 GPU-91aa"}};
  Origin origin = origin_with(Cause::pipeline_transfer);
  origin.facts = {{.kind = FactKind::message_changed, .ranks = {5}, .peers = {1}}};
  EXPECT_EQ(link_of(verdict, origin),
            "from rank 1 (pp0, host a17, cuda:1 GPU-6f2e) to rank 5 (pp1, host a18, cuda:0 "
            "GPU-91aa)");
  origin.facts.push_back({.kind = FactKind::transfer_bad_again});
  complete(origin);
  EXPECT_EQ(link_of(verdict, origin), "") << "no link is suspected";
}

}  // namespace
}  // namespace nanlocator
