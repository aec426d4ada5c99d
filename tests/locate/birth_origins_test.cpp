#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "nanlocator/locate/locate.hpp"
#include "record/planted_operand.hpp"
#include "support/fact_matchers.hpp"

namespace nanlocator {
namespace {

using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::Optional;
using ::testing::Pair;

/// A rank of a data-parallel job whose only two gradients are bad after the reduction.
Ledger ledger_of(int rank, int world) {
  Ledger ledger;
  ledger.run_id = "run";
  ledger.iteration = 7;
  ledger.coordinates.rank = rank;
  ledger.coordinates.world_size = world;
  ledger.coordinates.dp = {rank, world};
  ledger.backward_order = {{1, "head.weight", {4}, false, false, false, 0},
                           {0, "body.weight", {4}, false, false, false, 0}};
  ledger.coverage = {{Phase::grad_reduced, {0, 1}}};
  for (const auto& parameter : ledger.backward_order) {
    Sighting sighting;
    sighting.iteration = 7;
    sighting.phase = Phase::grad_reduced;
    sighting.role = "grad";
    sighting.parameter_id = parameter.id;
    sighting.parameter = parameter.name;
    sighting.dtype = "float32";
    sighting.shape = {4};
    sighting.stats.numel = 4;
    sighting.stats.nan = 4;
    sighting.stats.first_bad = 0;
    ledger.sightings.push_back(sighting);
  }
  return ledger;
}

Birth birth_of(BirthKind kind, Phase phase, const std::string& op) {
  Birth birth;
  birth.kind = kind;
  birth.sighting.phase = phase;
  birth.sighting.module = "body";
  birth.sighting.op = op;
  birth.sighting.role = "output[0]";
  birth.sighting.dtype = "float32";
  birth.sighting.shape = {2, 3};
  birth.sighting.stats.numel = 6;
  birth.sighting.stats.nan = kind == BirthKind::inf ? 0 : 1;
  birth.sighting.stats.pos_inf = kind == BirthKind::inf ? 1 : 0;
  birth.sighting.stats.first_bad = 4;
  birth.reached = {{ReachedKind::loss, "loss"}};
  return birth;
}

Verdict locate_one(const Ledger& ledger) {
  return locate({&ledger, 1}, ledger.coordinates.world_size);
}

TEST(BirthOrigins, ABirthTakesThePlaceOfTheGradientsThatItMadeBad) {
  Ledger ledger = ledger_of(0, 1);
  ledger.births = {birth_of(BirthKind::nan, Phase::forward, "aten::log")};
  ledger.births[0].replay = ReplayConclusion::deterministic_undefined;
  ledger.births[0].operands = {operand_at_first_bad("self", 0.0)};
  const Verdict verdict = locate_one(ledger);
  ASSERT_EQ(verdict.origins.size(), 1u);
  const Origin& origin = verdict.origins[0];
  EXPECT_EQ(origin.op, "aten::log");
  EXPECT_EQ(origin.module, "body");
  EXPECT_EQ(origin.direction, Direction::forward);
  EXPECT_EQ(origin.cause, Cause::operator_undefined);
  EXPECT_EQ(origin.place_confidence, Confidence::high);
  EXPECT_THAT(origin.tensor->first_bad_index, ElementsAre(1, 1));
  EXPECT_THAT(origin.facts, HasFact(FactKind::values_at_first_bad,
                                    Field(&Fact::values, ElementsAre(Pair("self", 0.0)))));
  EXPECT_EQ(origin.detail, Detail::log_of_zero);
  EXPECT_THAT(verdict.spread.parameters, ElementsAre("head.weight", "body.weight"));
}

TEST(BirthOrigins, TheInfinityIsTheOriginOfTheNanThatItBecame) {
  Ledger ledger = ledger_of(0, 1);
  Birth overflow = birth_of(BirthKind::inf, Phase::forward, "aten::exp");
  overflow.reached.clear();
  overflow.replay = ReplayConclusion::deterministic_overflow;
  Birth nan = birth_of(BirthKind::nan_from_inf, Phase::forward, "aten::sub.Tensor");
  nan.parent = 0;
  ledger.births = {overflow, nan};
  const Verdict verdict = locate_one(ledger);
  ASSERT_EQ(verdict.origins.size(), 1u);
  EXPECT_EQ(verdict.origins[0].op, "aten::exp");
  EXPECT_EQ(verdict.origins[0].cause, Cause::operator_overflow);
  EXPECT_THAT(verdict.origins[0].facts,
              HasFact(FactKind::became, Field(&Fact::op, "aten::sub.Tensor")));
}

/// An overflow in backward, whose gradients carry a loss scale.
Ledger ledger_of_scaled_overflow() {
  Ledger ledger = ledger_of(0, 1);
  ledger.loss_scale = 65536;
  ledger.births = {birth_of(BirthKind::inf, Phase::backward, "aten::mm")};
  ledger.births[0].sighting.dtype = "float16";
  ledger.births[0].replay = ReplayConclusion::deterministic_overflow;
  return ledger;
}

TEST(BirthOrigins, AnOverflowOfFp16GradientsUnderALossScaleThatFallsIsBenign) {
  const Verdict verdict = locate_one(ledger_of_scaled_overflow());
  EXPECT_EQ(verdict.status, VerdictStatus::benign);
  ASSERT_EQ(verdict.origins.size(), 1u);
  EXPECT_EQ(verdict.origins[0].cause, Cause::loss_scale);
  EXPECT_EQ(verdict.origins[0].place_confidence, Confidence::medium);
  EXPECT_THAT(verdict.origins[0].facts,
              HasFact(FactKind::scaled_by_loss_scale, Field(&Fact::value, 65536.0)));
  EXPECT_EQ(verdict.origins[0].action, Action::wait);
  EXPECT_EQ(verdict.origins[0].owner, Owner::nobody);
}

TEST(BirthOrigins, WhatNoLossScaleExplainsIsNotBenign) {
  Ledger with_nan = ledger_of_scaled_overflow();
  with_nan.births.push_back(birth_of(BirthKind::nan, Phase::forward, "aten::log"));
  const Verdict verdict = locate_one(with_nan);
  EXPECT_EQ(verdict.status, VerdictStatus::located);
  ASSERT_EQ(verdict.origins.size(), 2u);
  EXPECT_EQ(verdict.origins[0].op, "aten::log");
  EXPECT_EQ(verdict.origins[1].cause, Cause::loss_scale);

  Ledger constant_scale = ledger_of_scaled_overflow();
  constant_scale.loss_scale.reset();
  Ledger in_forward = ledger_of_scaled_overflow();
  in_forward.births[0].sighting.phase = Phase::forward;
  Ledger in_bf16 = ledger_of_scaled_overflow();
  in_bf16.births[0].sighting.dtype = "bfloat16";
  for (const Ledger& ledger : {constant_scale, in_forward, in_bf16}) {
    const Verdict other = locate_one(ledger);
    EXPECT_EQ(other.status, VerdictStatus::located);
    EXPECT_EQ(other.origins.at(0).cause, Cause::operator_overflow);
  }
}

TEST(BirthOrigins, AnIntendedInfinityIsNotTheOriginOfWhatWasMadeOfIt) {
  Ledger ledger = ledger_of(0, 1);
  Birth mask = birth_of(BirthKind::literal, Phase::forward, "aten::masked_fill.Scalar");
  mask.reached.clear();
  Birth nan = birth_of(BirthKind::nan_from_inf, Phase::forward, "aten::_softmax");
  nan.parent = 0;
  ledger.births = {mask, nan};
  const Verdict verdict = locate_one(ledger);
  ASSERT_EQ(verdict.origins.size(), 1u);
  EXPECT_EQ(verdict.origins[0].op, "aten::_softmax");
}

TEST(BirthOrigins, ABirthThatReachedNothingIsNoOrigin) {
  Ledger ledger = ledger_of(0, 1);
  ledger.births = {birth_of(BirthKind::nan, Phase::forward, "aten::log")};
  ledger.births[0].reached.clear();
  for (const Origin& origin : locate_one(ledger).origins) EXPECT_EQ(origin.op, "");
}

TEST(BirthOrigins, ParentsInACircleDoNotHang) {
  Ledger ledger = ledger_of(0, 1);
  ledger.births = {birth_of(BirthKind::nan, Phase::forward, "aten::a"),
                   birth_of(BirthKind::nan, Phase::forward, "aten::b")};
  ledger.births[0].parent = 1;
  ledger.births[1].parent = 0;
  EXPECT_FALSE(locate_one(ledger).origins.empty());
  ledger.births[0].parent = 99;
  ledger.births[1].parent = -3;
  EXPECT_EQ(locate_one(ledger).origins.size(), 2u);
}

TEST(BirthOrigins, OnlyTheRankThatSawTheBirthIsAccused) {
  std::vector<Ledger> ledgers = {ledger_of(0, 2), ledger_of(1, 2)};
  Birth received = birth_of(BirthKind::collective, Phase::backward, "");
  ledgers[0].births = {received};
  ledgers[1].births = {birth_of(BirthKind::nan, Phase::backward, "aten::div.Tensor")};
  const Verdict verdict = locate(ledgers, 2);
  ASSERT_EQ(verdict.origins.size(), 1u);
  EXPECT_EQ(verdict.origins[0].candidates, std::vector<int>{1});
  EXPECT_EQ(verdict.origins[0].coordinates->rank, 1);
  EXPECT_EQ(verdict.origins[0].op, "aten::div.Tensor");
}

TEST(BirthOrigins, ABufferThatAnotherRankHasSentExplainsTheGradientsOfWhoReceivedIt) {
  std::vector<Ledger> ledgers = {ledger_of(0, 2), ledger_of(1, 2)};
  ledgers[0].births = {birth_of(BirthKind::buffer, Phase::forward, "")};
  ledgers[1].births = {birth_of(BirthKind::collective, Phase::forward, "c10d::broadcast_")};
  for (Ledger& ledger : ledgers) {
    ledger.births[0].sighting.parameter = "scale";
    for (Sighting& sighting : ledger.sightings) sighting.phase = Phase::grad_local;
    ledger.coverage = {{Phase::grad_local, {0, 1}}};
    ledger.rerun = Rerun{.reproduced = true};
  }
  const Verdict verdict = locate(ledgers, 2);
  ASSERT_EQ(verdict.origins.size(), 1u);
  EXPECT_EQ(verdict.origins[0].cause, Cause::bad_buffer);
  EXPECT_EQ(verdict.origins[0].candidates, std::vector<int>{0});
}

TEST(BirthOrigins, WhatOnlyACollectiveTellsIsACollectiveResult) {
  std::vector<Ledger> ledgers = {ledger_of(0, 2), ledger_of(1, 2)};
  ledgers[0].births = {birth_of(BirthKind::collective, Phase::backward, "")};
  const Verdict verdict = locate(ledgers, 2);
  ASSERT_EQ(verdict.origins.size(), 1u);
  EXPECT_EQ(verdict.origins[0].cause, Cause::collective_result);
}

TEST(BirthOrigins, WhatAMemberHadReceivedBeforeAndPassedOnIsItsOriginAlone) {
  std::vector<Ledger> ledgers = {ledger_of(0, 2), ledger_of(1, 2)};
  ledgers[0].births = {birth_of(BirthKind::collective, Phase::backward, "c10d::_reduce_scatter_")};
  ledgers[1].births = {birth_of(BirthKind::collective, Phase::forward, "c10d::allgather_")};
  ledgers[1].births[0].reached.push_back({ReachedKind::other_ranks, ""});
  Verdict verdict = locate(ledgers, 2);
  ASSERT_EQ(verdict.origins.size(), 1u);
  EXPECT_EQ(verdict.origins[0].candidates, std::vector<int>{1});
  ledgers[0].births[0].members = {0};  // a group without rank 1
  EXPECT_EQ(locate(ledgers, 2).origins.size(), 2u);
  ledgers[0].births[0].members = {};
  ledgers[0].births[0].sighting.phase = Phase::forward;
  ledgers[0].births[0].reached.push_back({ReachedKind::other_ranks, ""});
  EXPECT_EQ(locate(ledgers, 2).origins.size(), 2u) << "who was first is not known";
  ledgers[0].births[0].reached.pop_back();
  ledgers[1].births[0].sighting.phase = Phase::backward;
  EXPECT_EQ(locate(ledgers, 2).origins.size(), 2u) << "no backward makes a forward bad";
}

TEST(BirthOrigins, ACollectiveThatIsBadInManyPlacesIsOneOriginWithItsGroup) {
  std::vector<Ledger> ledgers = {ledger_of(0, 2), ledger_of(1, 2)};
  for (const char* const module : {"a", "b", "c"}) {
    Birth birth = birth_of(BirthKind::collective, Phase::forward, "c10d::allgather_");
    birth.sighting.module = module;
    birth.group = "dp_shard";
    birth.members = {0, 1};
    ledgers[1].births.push_back(birth);
  }
  const Verdict verdict = locate(ledgers, 2);
  ASSERT_EQ(verdict.origins.size(), 1u);
  const Fact& came = verdict.origins[0].facts.front();
  EXPECT_EQ(came.group, "dp_shard");
  EXPECT_EQ(came.peers, (std::vector{0, 1}));
  const Fact* const elsewhere =
      find_fact(verdict.origins[0].facts, FactKind::same_collective_elsewhere);
  ASSERT_NE(elsewhere, nullptr);
  EXPECT_EQ(elsewhere->count, 2);
}

TEST(BirthOrigins, ALineThatOverflowsInAnotherLayerOfEachReplicaIsOneOrigin) {
  std::vector<Ledger> ledgers = {ledger_of(0, 2), ledger_of(1, 2)};
  for (int rank = 0; rank < 2; ++rank) {
    Birth overflow = birth_of(BirthKind::inf, Phase::forward, "aten::bmm");
    overflow.sighting.module = "layers." + std::to_string(rank);
    overflow.replay = ReplayConclusion::deterministic_overflow;
    overflow.code = CodeLine{.file = "model.py", .line = 10};
    ledgers[static_cast<std::size_t>(rank)].births = {overflow};
  }
  const Verdict verdict = locate(ledgers, 2);
  ASSERT_EQ(verdict.origins.size(), 1u);
  EXPECT_EQ(verdict.origins[0].module, "layers.0");
  EXPECT_EQ(verdict.origins[0].candidates, std::vector{0});
  const Fact* const elsewhere = find_fact(verdict.origins[0].facts, FactKind::same_line_elsewhere);
  ASSERT_NE(elsewhere, nullptr);
  EXPECT_EQ(elsewhere->names, std::vector<std::string>{"layers.1 in forward on rank 1"});

  ledgers[1].births[0].code->line = 11;
  EXPECT_EQ(locate(ledgers, 2).origins.size(), 2u);
}

TEST(BirthOrigins, OnlyFp16HasAWiderPrecisionAsARemedyOfAnOverflow) {
  Ledger ledger = ledger_of(0, 1);
  Birth overflow = birth_of(BirthKind::inf, Phase::forward, "aten::mm");
  overflow.replay = ReplayConclusion::deterministic_overflow;
  const auto action_in = [&](const std::string& dtype) {
    overflow.sighting.dtype = dtype;
    ledger.births = {overflow};
    return locate_one(ledger).origins.at(0).action;
  };
  EXPECT_EQ(action_in("float16"), Action::widen_or_scale);
  EXPECT_EQ(action_in("bfloat16"), Action::scale_inputs);  // both end at 3.4e38
  EXPECT_EQ(action_in("float32"), Action::scale_inputs);
}

TEST(BirthOrigins, ADivisionInAModuleIsAnEmptyLossWhereTheLossCountsNoLabel) {
  Ledger ledger = ledger_of(0, 1);
  Birth quotient = birth_of(BirthKind::nan, Phase::forward, "aten::div.Tensor");
  quotient.replay = ReplayConclusion::deterministic_undefined;
  quotient.operands = {operand_at_first_bad("self", 0.0), operand_at_first_bad("other", 0.0)};
  ledger.births = {quotient};
  Sighting loss = quotient.sighting;
  loss.phase = Phase::loss;
  loss.role = "loss";
  loss.valid_labels = 7;
  ledger.sightings.push_back(loss);
  EXPECT_EQ(locate_one(ledger).origins.at(0).cause, Cause::operator_undefined);
  ledger.sightings.back().valid_labels = 0;
  EXPECT_EQ(locate_one(ledger).origins.at(0).cause, Cause::empty_loss_mask);
}

TEST(BirthOrigins, TheSameBirthOnSeveralRanksIsOneOriginWithACommonCause) {
  std::vector<Ledger> ledgers = {ledger_of(0, 2), ledger_of(1, 2)};
  for (Ledger& ledger : ledgers) {
    Birth weight = birth_of(BirthKind::weight, Phase::forward, "aten::mm");
    weight.sighting.parameter = "body.weight";
    ledger.births = {weight};
  }
  const Verdict verdict = locate(ledgers, 2);
  ASSERT_EQ(verdict.origins.size(), 1u);
  EXPECT_THAT(verdict.origins[0].candidates, ElementsAre(0, 1));
  EXPECT_FALSE(verdict.origins[0].coordinates.has_value());
  EXPECT_EQ(verdict.origins[0].cause, Cause::bad_weight);
  EXPECT_THAT(verdict.origins[0].facts, HasFact(FactKind::same_on_ranks, OnRanks({0, 1})));
  EXPECT_TRUE(verdict.origins[0].is_on_every_candidate);
}

TEST(BirthOrigins, AnInfinityAndANanOfOneOperatorInTwoMicrobatchesAreOneOrigin) {
  Ledger ledger = ledger_of(0, 1);
  for (const BirthKind kind : {BirthKind::inf, BirthKind::nan}) {
    Birth birth = birth_of(kind, Phase::backward, "aten::div.Tensor");
    birth.sighting.microbatch = static_cast<int>(ledger.births.size());
    ledger.births.push_back(birth);
  }
  const Verdict verdict = locate_one(ledger);
  ASSERT_EQ(verdict.origins.size(), 1u);
  EXPECT_EQ(verdict.origins[0].microbatch, 0);
  EXPECT_THAT(verdict.origins[0].facts, HasFact(FactKind::same_in_microbatches, Counts(2)));
}

TEST(BirthOrigins, ManyBadWeightsAreOneOriginThatCountsThem) {
  Ledger ledger = ledger_of(0, 1);
  for (const std::string name : {"body.weight", "body.bias", "head.weight"}) {
    Birth weight = birth_of(BirthKind::weight, Phase::forward, "aten::mm");
    weight.sighting.parameter = name;
    weight.sighting.module = name.substr(0, 4);
    ledger.births.push_back(weight);
  }
  const Verdict verdict = locate_one(ledger);
  ASSERT_EQ(verdict.origins.size(), 1u);
  EXPECT_EQ(verdict.origins[0].parameter, "body.weight");
  EXPECT_THAT(verdict.origins[0].facts,
              HasFact(FactKind::further_weights_bad, Counts(2),
                      Field(&Fact::names, ElementsAre("body.bias", "head.weight"))));
}

TEST(BirthOrigins, ABadLossWithFiniteGradientsIsAnOriginOfItsOwn) {
  Ledger ledger = ledger_of(0, 1);
  ledger.sightings.clear();
  Sighting loss;
  loss.phase = Phase::loss;
  loss.role = "loss";
  loss.dtype = "float32";
  loss.stats.numel = 1;
  loss.stats.nan = 1;
  loss.stats.first_bad = 0;
  ledger.sightings.push_back(loss);
  Verdict verdict = locate_one(ledger);
  ASSERT_EQ(verdict.origins.size(), 1u);
  EXPECT_EQ(verdict.origins[0].phase, Phase::loss);
  EXPECT_EQ(verdict.spread.first_seen, Phase::loss);
  EXPECT_THAT(verdict.spread.ranks, ElementsAre(0));
  ledger.births = {birth_of(BirthKind::nan, Phase::forward, "aten::nll_loss_forward")};
  verdict = locate_one(ledger);
  ASSERT_EQ(verdict.origins.size(), 1u);
  EXPECT_EQ(verdict.origins[0].cause, Cause::empty_loss_mask);
}

TEST(BirthOrigins, ZeroOverACountOfZeroInTheLossIsAnEmptyLossMaskAndElsewhereIsNot) {
  Ledger ledger = ledger_of(0, 1);
  Birth quotient = birth_of(BirthKind::nan, Phase::loss, "aten::div.Tensor");
  quotient.sighting.shape = {};
  quotient.operands = {operand_at_first_bad("self", 0.0), operand_at_first_bad("other", 0.0)};
  quotient.replay = ReplayConclusion::deterministic_undefined;
  ledger.births = {quotient};
  EXPECT_EQ(locate_one(ledger).origins.at(0).cause, Cause::empty_loss_mask);
  ledger.births[0].sighting.phase = Phase::forward;
  EXPECT_EQ(locate_one(ledger).origins.at(0).cause, Cause::operator_undefined);
  ledger.births[0].sighting.phase = Phase::loss;
  ledger.births[0].operands[0].at_first_bad = 3;
  EXPECT_EQ(locate_one(ledger).origins.at(0).cause, Cause::operator_undefined);
}

TEST(BirthOrigins, ZeroOverAZeroThatIsNoCountIsNoEmptyLossMask) {
  Ledger ledger = ledger_of(0, 1);
  Birth quotient = birth_of(BirthKind::nan, Phase::loss, "aten::div.Tensor");
  quotient.replay = ReplayConclusion::deterministic_undefined;
  quotient.operands = {operand_at_first_bad("self", 0.0), operand_at_first_bad("other", 0.0)};
  const auto cause_of = [&](std::vector<std::int64_t> shape, bool requires_grad) {
    quotient.sighting.shape = std::move(shape);
    quotient.operands[1].requires_grad = requires_grad;
    ledger.births = {quotient};
    return locate_one(ledger).origins.at(0).cause;
  };
  EXPECT_EQ(cause_of({}, false), Cause::empty_loss_mask);
  EXPECT_EQ(cause_of({}, true), Cause::operator_undefined);    // the area of a union of boxes
  EXPECT_EQ(cause_of({4}, false), Cause::operator_undefined);  // in one of four elements
  quotient.code = CodeLine{"loss.py", 3, "f", "loss = error / base"};
  EXPECT_EQ(cause_of({}, false), Cause::operator_undefined);  // nothing is counted there
  quotient.code = CodeLine{"loss.py", 3, "f", "loss = losses.sum() / mask.sum()"};
  EXPECT_EQ(cause_of({}, false), Cause::empty_loss_mask);
}

TEST(BirthOrigins, InfOfAReductionIsAnOverflowIfTheMembersInputsAddUpToOne) {
  const auto cause_of = [](double largest, std::int64_t nan) {
    std::vector<Ledger> ledgers = {ledger_of(0, 2), ledger_of(1, 2)};
    for (Ledger& ledger : ledgers) {
      Birth received = birth_of(BirthKind::collective, Phase::backward, "c10d::allreduce_");
      received.group = "tp";
      received.members = {0, 1};
      received.sighting.dtype = "float16";
      received.sighting.stats.nan = nan;
      received.sighting.stats.pos_inf = 1;
      received.largest_sent = largest;
      ledger.births = {received};
    }
    return locate(ledgers, 2).origins.at(0).cause;
  };
  EXPECT_EQ(cause_of(40000, 0), Cause::collective_sum);  // fp16 ends at 65504
  EXPECT_EQ(cause_of(30000, 0), Cause::collective_result);
  EXPECT_EQ(cause_of(40000, 1), Cause::collective_result);
}

TEST(BirthOrigins, EachKindHasItsCause) {
  const auto cause_of = [](BirthKind kind, Phase phase) {
    Ledger ledger = ledger_of(0, 1);
    ledger.births = {birth_of(kind, phase, "aten::mul.Tensor")};
    return locate_one(ledger).origins.at(0).cause;
  };
  EXPECT_EQ(cause_of(BirthKind::buffer, Phase::forward), Cause::bad_buffer);
  EXPECT_EQ(cause_of(BirthKind::data, Phase::forward), Cause::bad_input);
  EXPECT_EQ(cause_of(BirthKind::data, Phase::params_after), Cause::optimizer_state);
  EXPECT_EQ(cause_of(BirthKind::nan, Phase::params_after), Cause::optimizer_update);
  EXPECT_EQ(cause_of(BirthKind::memory, Phase::backward), Cause::memory_corruption);
  EXPECT_EQ(cause_of(BirthKind::user_hook, Phase::backward), Cause::user_hook);
  EXPECT_EQ(cause_of(BirthKind::literal, Phase::forward), Cause::bad_scalar);
  EXPECT_EQ(cause_of(BirthKind::opaque, Phase::forward), Cause::unknown);
  EXPECT_EQ(cause_of(BirthKind::nan, Phase::forward), Cause::unknown);  // not replayed
}

TEST(BirthOrigins, WhatNobodyWroteIsCompiledCodesWhereTheStepIsFiniteWithoutIt) {
  const auto origin_of = [](BirthKind kind, Phase phase, bool is_bad_eager) {
    Ledger ledger = ledger_of(0, 1);
    ledger.births = {birth_of(kind, phase, "")};
    ledger.births[0].reader = "aten::addmm";
    ledger.rerun = Rerun{.reproduced = true, .gradients = 2};
    ledger.rerun->variants = {{RerunVariant::eager, is_bad_eager}, {RerunVariant::compiled, true}};
    return locate_one(ledger).origins.at(0);
  };
  for (const BirthKind kind : {BirthKind::data, BirthKind::memory}) {
    const Origin origin = origin_of(kind, Phase::forward, false);
    EXPECT_EQ(origin.cause, Cause::compiled_region);
    EXPECT_EQ(origin.place_confidence, Confidence::medium);
    EXPECT_THAT(origin.facts, HasFact(FactKind::came_from_opaque_call));
    EXPECT_THAT(origin.facts, Not(HasFact(FactKind::data_was_bad)));
    EXPECT_THAT(origin.facts, Not(HasFact(FactKind::made_before_pass)));
  }
  EXPECT_EQ(origin_of(BirthKind::data, Phase::forward, true).cause, Cause::bad_input);
  EXPECT_EQ(origin_of(BirthKind::data, Phase::params_after, false).cause, Cause::optimizer_state);
}

TEST(BirthOrigins, AFaultThatIsGoneInTheRepeatAccusesNoMachineWithHighConfidence) {
  Ledger ledger = ledger_of(0, 1);
  ledger.rerun = Rerun{.reproduced = false, .control_reproduced = false, .gradients = 2};
  const Verdict verdict = locate_one(ledger);
  EXPECT_TRUE(verdict.rerun.done);
  EXPECT_EQ(verdict.rerun.reproduced, false);
  ASSERT_FALSE(verdict.origins.empty());
  for (const Origin& origin : verdict.origins) {
    EXPECT_EQ(origin.cause, Cause::not_reproduced);
    EXPECT_NE(origin.place_confidence, Confidence::high);
    EXPECT_THAT(origin.facts, HasFact(FactKind::rerun_clean));
  }
}

TEST(BirthOrigins, GoneNeedsEveryRanksWord) {
  std::vector<Ledger> ledgers = {ledger_of(0, 2), ledger_of(1, 2)};
  ledgers[0].rerun = Rerun{.reproduced = false};
  ledgers[1].rerun = Rerun{};  // its re-run did not complete
  const Verdict verdict = locate(ledgers, 2);
  EXPECT_TRUE(verdict.rerun.done);
  EXPECT_FALSE(verdict.rerun.reproduced.has_value());
  for (const Origin& origin : verdict.origins) EXPECT_NE(origin.cause, Cause::not_reproduced);
}

TEST(BirthOrigins, WhatCouldNotBePutBackIsNamed) {
  Ledger ledger = ledger_of(0, 1);
  ledger.rerun = Rerun{.reproduced = true, .gradients = 2, .changed = 1};
  ledger.rerun->not_restored = {"the sampler: cannot seek"};
  const Verdict verdict = locate_one(ledger);
  EXPECT_THAT(verdict.rerun.not_restored, ElementsAre("the sampler: cannot seek"));
  EXPECT_THAT(verdict.origins.at(0).facts,
              HasFact(FactKind::rerun_differs, Counts(1), Field(&Fact::of, Optional(2))));
}

TEST(BirthOrigins, WhatACustomOperatorMakesIsItsAuthorsNotTheMathematicsOfTheInputs) {
  Ledger ledger = ledger_of(0, 1);
  ledger.births = {birth_of(BirthKind::nan, Phase::forward, "mylib::fused_norm")};
  ledger.births[0].is_custom_operator = true;
  ledger.births[0].replay = ReplayConclusion::deterministic_custom;
  Origin origin = locate_one(ledger).origins.at(0);
  EXPECT_EQ(origin.cause, Cause::operator_bug);
  EXPECT_EQ(origin.detail, Detail::custom_code);
  EXPECT_EQ(origin.action, Action::correct_custom_code);
  EXPECT_NE(origin.cause_confidence, Confidence::high);
  EXPECT_THAT(origin.alternatives, Contains(Suspect::mathematics));

  ledger.births = {birth_of(BirthKind::nan, Phase::backward, "aten::div.Tensor")};
  ledger.births[0].custom_function = "SquareBug";
  ledger.births[0].operands = {operand_at_first_bad("self", 1), operand_at_first_bad("other", 0)};
  ledger.births[0].replay = ReplayConclusion::deterministic_undefined;
  origin = locate_one(ledger).origins.at(0);
  EXPECT_EQ(origin.cause, Cause::operator_undefined);
  EXPECT_EQ(origin.detail, Detail::division_by_zero);
  EXPECT_EQ(origin.custom_function, "SquareBug");
  EXPECT_EQ(origin.action, Action::correct_custom_code);
}

TEST(BirthOrigins, TheFirstOfManyBadWeightsLeadsWhicheverReachedALossFirst) {
  Ledger ledger = ledger_of(0, 1);
  for (const std::string name : {"body.weight", "head.weight"}) {
    Birth weight = birth_of(BirthKind::weight, Phase::forward, "aten::mm");
    weight.sighting.parameter = name;
    weight.sighting.module = name.substr(0, 4);
    ledger.births.push_back(weight);
  }
  // The first weight's damage is seen in a descendant that comes after the second weight.
  ledger.births[0].reached.clear();
  Birth descendant = birth_of(BirthKind::nan_from_inf, Phase::forward, "aten::sub.Tensor");
  descendant.parent = 0;
  ledger.births.push_back(descendant);
  const Origin origin = locate_one(ledger).origins.at(0);
  EXPECT_EQ(origin.parameter, "body.weight");
  EXPECT_THAT(origin.facts, HasFact(FactKind::further_weights_bad,
                                    Field(&Fact::names, ElementsAre("head.weight"))));
}

TEST(BirthOrigins, OfABadWeightItIsSaidWhetherItsCopiesAreClean) {
  std::vector<Ledger> ledgers = {ledger_of(0, 2), ledger_of(1, 2)};
  Birth weight = birth_of(BirthKind::weight, Phase::forward, "aten::mm");
  weight.sighting.parameter = "body.weight";
  ledgers[0].births = {weight};
  ledgers[1].sightings.clear();
  Origin origin = locate(ledgers, 2).origins.at(0);
  EXPECT_THAT(origin.facts, HasFact(FactKind::copies_not_scanned, OnRanks({1})));
  EXPECT_EQ(origin.action, Action::check_checkpoint);

  ledgers[1].coverage.push_back({Phase::params_before, {0, 1}});
  origin = locate(ledgers, 2).origins.at(0);
  EXPECT_THAT(origin.facts,
              HasFact(FactKind::copies_clean, OnRanks({0}), Field(&Fact::peers, ElementsAre(1))));
  EXPECT_EQ(origin.action, Action::restore_copy);
  EXPECT_EQ(origin.owner, Owner::cluster_operator);
}

TEST(BirthOrigins, OfABadWeightItIsSaidHowLargeTheCleanCopiesAre) {
  std::vector<Ledger> ledgers = {ledger_of(0, 3), ledger_of(1, 3), ledger_of(2, 3)};
  Birth weight = birth_of(BirthKind::weight, Phase::forward, "aten::mm");
  weight.sighting.parameter = "body.weight";  // id 0
  weight.sighting.stats.zeros = 1;            // one finite element
  weight.sighting.stats.absmax = 0.25;
  ledgers[0].births = {weight};
  for (const int peer : {1, 2}) ledgers[peer].sightings.clear();
  ledgers[1].coverage.push_back({Phase::params_before, {0, 1}, {0.5F, 8}});
  ledgers[2].coverage.push_back({Phase::params_before, {1}, {9}});  // another weight
  EXPECT_THAT(
      locate(ledgers, 3).origins.at(0).facts,
      HasFact(FactKind::copies_magnitude, OnRanks({0}), Field(&Fact::peers, ElementsAre(1)),
              Field(&Fact::value, Optional(0.5)), Field(&Fact::last_value, Optional(0.25))));
}

TEST(BirthOrigins, OfABadWeightItIsSaidWhatTheCleanCopiesHoldAtItsFirstBadElement) {
  std::vector<Ledger> ledgers = {ledger_of(0, 3), ledger_of(1, 3), ledger_of(2, 3)};
  Birth weight = birth_of(BirthKind::weight, Phase::forward, "aten::mm");  // element 4 is bad
  weight.sighting.parameter = "body.weight";
  ledgers[0].births = {weight};
  ledgers[0].weight_values = {{"body.weight", 4, std::nan("")}};
  for (const int peer : {1, 2}) {
    ledgers[peer].sightings.clear();
    ledgers[peer].coverage.push_back({Phase::params_before, {0, 1}});
  }
  ledgers[1].weight_values = {{"body.weight", 4, 0.5}};
  ledgers[2].weight_values = {{"body.weight", 3, 9},
                              {"body.bias", 4, 9}};  // values of other elements
  EXPECT_THAT(locate(ledgers, 3).origins.at(0).facts,
              HasFact(FactKind::copies_value, OnRanks({0}), Field(&Fact::peers, ElementsAre(1)),
                      Field(&Fact::values, ElementsAre(Pair("1", 0.5)))));
}

TEST(BirthOrigins, WeightsOfOneNameWhoseOtherElementsDifferAreNoCopies) {
  std::vector<Ledger> ledgers = {ledger_of(0, 2), ledger_of(1, 2)};
  Birth weight = birth_of(BirthKind::weight, Phase::forward, "aten::mm");
  weight.sighting.parameter = "body.weight";
  ledgers[0].births = {weight};
  ledgers[1].sightings.clear();
  ledgers[1].coverage.push_back({Phase::params_before, {0, 1}});
  ledgers[0].weight_values = {{"body.weight", 4, std::nan("")}, {"body.weight", 0, 1.0}};
  ledgers[1].weight_values = {{"body.weight", 4, 0.5}, {"body.weight", 0, 1.0}};
  EXPECT_THAT(locate(ledgers, 2).origins.at(0).facts,
              Contains(Field(&Fact::kind, FactKind::copies_clean)));
  ledgers[1].weight_values[1].value = 2.0;
  const Verdict verdict = locate(ledgers, 2);
  EXPECT_THAT(verdict.origins.at(0).facts,
              Not(Contains(Field(&Fact::kind, FactKind::copies_clean))));
  EXPECT_THAT(verdict.origins.at(0).facts,
              Contains(Field(&Fact::kind, FactKind::no_copy_elsewhere)));
}

TEST(BirthOrigins, OfAFirstPassThatWasTracedWhatItsCallGivesAgainWasNotGone) {
  Ledger ledger = ledger_of(0, 1);
  ledger.rerun = Rerun{.reproduced = false, .control_reproduced = false, .has_first_births = true};
  ledger.births = {birth_of(BirthKind::nan, Phase::forward, "aten::log")};
  ledger.births[0].operands = {operand_at_first_bad("self", -1.0)};
  EXPECT_EQ(locate_one(ledger).origins.at(0).cause, Cause::not_reproduced);
  ledger.births[0].replay = ReplayConclusion::deterministic_undefined;
  ledger.births[0].replay_lines = {"Executed 3 times as recorded: bad every time."};
  const Verdict verdict = locate_one(ledger);
  EXPECT_EQ(verdict.origins.at(0).cause, Cause::operator_undefined);
  EXPECT_EQ(verdict.decision.kind, DecisionKind::restart_as_is);
  ledger.rerun->not_restored = {"the weights"};  // the re-run was of another state
  EXPECT_EQ(locate_one(ledger).decision.kind, DecisionKind::do_not_restart);
  ledger.births = {birth_of(BirthKind::literal, Phase::forward, "aten::mul.Tensor")};
  EXPECT_EQ(locate_one(ledger).origins.at(0).cause, Cause::bad_scalar);
}

TEST(BirthOrigins, ABadWeightThatNothingReadIsNoOrigin) {
  Ledger ledger = ledger_of(0, 1);
  ledger.rerun = Rerun{.reproduced = true};
  ledger.births = {birth_of(BirthKind::nan, Phase::forward, "aten::log")};
  Sighting weight = ledger.sightings.front();
  weight.phase = Phase::params_before;
  weight.role = "weight";
  ledger.sightings.insert(ledger.sightings.begin(), weight);
  ledger.coverage.push_back({Phase::params_before, {0, 1}});
  const Verdict verdict = locate_one(ledger);
  ASSERT_EQ(verdict.origins.size(), 1u);
  EXPECT_EQ(verdict.origins[0].op, "aten::log");
  EXPECT_FALSE(verdict.job.are_weights_finite.has_value());
  ledger.births[0].kind = BirthKind::opaque;  // it may have read the weight
  EXPECT_EQ(locate_one(ledger).origins.size(), 2u);
}

TEST(BirthOrigins, DataOfAStepThatBeganUnrecordedIsNotProven) {
  Ledger ledger = ledger_of(0, 1);
  ledger.births = {birth_of(BirthKind::data, Phase::forward, "aten::mm")};
  EXPECT_EQ(locate_one(ledger).origins.at(0).cause_confidence, Confidence::high);
  ledger.began_unrecorded = true;
  const Verdict verdict = locate_one(ledger);
  EXPECT_EQ(verdict.origins.at(0).detail, Detail::unrecorded);
  EXPECT_EQ(verdict.origins.at(0).cause_confidence, Confidence::low);
  EXPECT_EQ(verdict.decision.kind, DecisionKind::do_not_restart);
}

/// Two tensor-parallel ranks with log(0) on rank 0 in microbatch 1, and a third rank that shares no
/// group with it.
std::vector<Ledger> ledgers_with_results() {
  std::vector<Ledger> ledgers;
  for (int rank = 0; rank < 3; ++rank) {
    Ledger ledger = ledger_of(rank, 3);
    ledger.coordinates.dp = {};
    ledger.coordinates.tp = {rank, 3};
    for (const std::int64_t sequence : {6, 7, 8}) {
      ledger.collective_results.push_back(
          {.microbatch = 1,
           .module = "body",
           .op = "c10d::allreduce_",
           .crossing = {.group = "tp",
                        .members = rank == 2 ? RankList({2, 3}) : RankList({0, 1}),
                        .sequence = sequence},
           .fingerprint = static_cast<std::uint64_t>(rank == 2 ? 99 : sequence),
           .absmax = 4,
           .sum_of_squares = 100});
    }
    ledgers.push_back(std::move(ledger));
  }
  Birth log = birth_of(BirthKind::inf, Phase::loss, "aten::log");
  log.sighting.microbatch = 1;
  log.replay = ReplayConclusion::deterministic_undefined;
  log.operands = {operand_at_first_bad("self", 0.0)};
  ledgers[0].births = {log};
  return ledgers;
}

TEST(BirthOrigins, AZeroOnARankThatGotWhatItsPeersGotIsItsOwn) {
  const Origin origin = locate(ledgers_with_results(), 3).origins.at(0);
  EXPECT_THAT(origin.facts,
              HasFact(FactKind::members_got_the_same, OnRanks({0}),
                      Field(&Fact::peers, ElementsAre(1)), Field(&Fact::count, Optional(3))));
  EXPECT_EQ(origin.action, Action::find_source_of_zero);
  EXPECT_EQ(origin.owner, Owner::model_author);
}

TEST(BirthOrigins, ACollectiveThatGaveARankAnotherSumIsSuspectedBeforeTheOperatorThatItReached) {
  auto ledgers = ledgers_with_results();
  ledgers[0].collective_results[1].fingerprint = 1234;
  ledgers[0].collective_results[1].zeros = 1;
  ledgers[0].collective_results[2].fingerprint = 5678;  // a consequence
  const Origin origin = locate(ledgers, 3).origins.at(0);
  EXPECT_THAT(origin.facts,
              HasFact(FactKind::members_got_other_values, OnRanks({0}),
                      Field(&Fact::peers, ElementsAre(1)), Field(&Fact::op, "c10d::allreduce_"),
                      Field(&Fact::count, Optional(1)), Field(&Fact::of, Optional(0))));
  EXPECT_EQ(origin.action, Action::check_collective_code);
  EXPECT_EQ(origin.owner, Owner::framework);
  EXPECT_EQ(origin.cause, Cause::collective_result);
  EXPECT_THAT(origin.alternatives, ElementsAre(Suspect::collective));
}

TEST(BirthOrigins, ResultsThatRoundingSetsApartAreReportedAndAccuseNobody) {
  auto ledgers = ledgers_with_results();
  ledgers[0].collective_results[1].fingerprint = 1234;
  ledgers[0].collective_results[1].absmax = 4.001;
  const Origin origin = locate(ledgers, 3).origins.at(0);
  EXPECT_THAT(origin.facts, HasFact(FactKind::members_got_other_bits, OnRanks({0}),
                                    Field(&Fact::peers, ElementsAre(1))));
  EXPECT_EQ(origin.action, Action::compare_peers);
}

TEST(BirthOrigins, ResultsOfAnotherMicrobatchOrOfOneRankAloneSayNothing) {
  auto ledgers = ledgers_with_results();
  for (auto& result : ledgers[1].collective_results) result.microbatch = 0;
  const Origin origin = locate(ledgers, 3).origins.at(0);
  EXPECT_THAT(origin.facts, Not(HasFact(FactKind::members_got_the_same)));
  EXPECT_EQ(origin.action, Action::compare_peers);
}

TEST(BirthOrigins, BesideAnOverflowStandsHowItsLargestWeightGrew) {
  Ledger ledger = ledger_of(0, 1);
  Birth overflow = birth_of(BirthKind::inf, Phase::forward, "aten::mm");
  overflow.replay = ReplayConclusion::deterministic_overflow;
  overflow.weights = {{.parameter = "body.bias", .absmax = 2, .before = {{5, 6}, {1, 2}}},
                      {.parameter = "body.weight",
                       .absmax = 3e24,
                       .before = {{5, 6}, {0.5F, 88}},
                       .gradient_before = {{6}, {4}}}};
  ledger.births = {overflow};
  const Facts facts = locate_one(ledger).origins.at(0).facts;
  EXPECT_THAT(facts, HasFact(FactKind::weight_maxima, Field(&Fact::parameter, "body.weight"),
                             Field(&Fact::values, ElementsAre(Pair("5", 0.5), Pair("6", 88.0))),
                             Field(&Fact::value, Optional(3e24))));
  EXPECT_THAT(
      facts, HasFact(FactKind::gradient_maxima, Field(&Fact::values, ElementsAre(Pair("6", 4.0)))));
}

// ---- bad weights and the preceding update ----

Ledger ledger_with_bad_weight() {
  Ledger ledger = ledger_of(0, 1);
  Sighting weight;
  weight.iteration = ledger.iteration;
  weight.phase = Phase::params_before;
  weight.role = "weight";
  weight.parameter_id = 0;
  weight.parameter = ledger.backward_order.at(0).name;
  for (const auto& parameter : ledger.backward_order) {
    if (parameter.id == 0) weight.parameter = parameter.name;
  }
  weight.shape = {4};
  weight.dtype = "float32";
  weight.stats = {.numel = 4, .nan = 1, .first_bad = 2};
  ledger.sightings = {weight};
  ledger.coverage = {{Phase::params_before, {0, 1}}};
  return ledger;
}

TEST(BirthOrigins, ABadWeightIsTheOptimizersWhereItsMomentsAreBadToo) {
  Ledger ledger = ledger_with_bad_weight();
  ledger.optimizer_states = {{0, "exp_avg", {.numel = 4, .nan = 1, .first_bad = 2}},
                             {0, "exp_avg_sq", {.numel = 4, .first_bad = -1}}};
  const Origin origin = locate_one(ledger).origins.at(0);
  EXPECT_EQ(origin.cause, Cause::bad_weight);
  EXPECT_THAT(origin.facts, HasFact(FactKind::optimizer_state_bad, OnRanks({0}),
                                    Field(&Fact::names, ElementsAre("exp_avg"))));
  EXPECT_THAT(origin.alternatives, ElementsAre(Suspect::last_update, Suspect::checkpoint));
  EXPECT_EQ(origin.action, Action::reset_optimizer_state);
}

TEST(BirthOrigins, AWholeWeightThatEveryCopyLostAfterAFiniteStepIsOfItsUpdate) {
  std::vector<Ledger> ledgers = {ledger_with_bad_weight(), ledger_with_bad_weight()};
  for (int rank = 0; rank < 2; ++rank) {
    Ledger& ledger = ledgers[static_cast<std::size_t>(rank)];
    ledger.coordinates = ledger_of(rank, 2).coordinates;
    ledger.sightings[0].stats = {.numel = 4, .nan = 4, .first_bad = 0};
    ledger.history = HistorySummary{
        .iterations = {ledger.iteration - 1}, .absmax = {1}, .norm = {2}, .parameter = "w"};
  }
  const auto origin = [&] { return locate(ledgers, 2).origins.at(0); };
  EXPECT_THAT(origin().facts, HasFact(FactKind::update_undefined));
  EXPECT_THAT(origin().alternatives, ElementsAre(Suspect::writer));
  EXPECT_EQ(origin().action, Action::check_update);
  const Verdict verdict = locate(ledgers, 2);
  EXPECT_EQ(verdict.job.restart, Restart::before_step);
  EXPECT_EQ(verdict.job.restart_before, ledgers[0].iteration - 1);

  // A row that no earlier step read may have been in the checkpoint.
  for (Ledger& ledger : ledgers) ledger.sightings[0].stats.nan = 1;
  EXPECT_THAT(origin().facts, Not(HasFact(FactKind::update_undefined)));
  // As may all of it, if no step of this process came before.
  for (Ledger& ledger : ledgers) ledger.sightings[0].stats.nan = 4;
  ledgers[1].history.reset();
  EXPECT_THAT(origin().facts, Not(HasFact(FactKind::update_undefined)));
}

TEST(BirthOrigins, AWeightThatTheUpdateLeftFiniteWasDamagedLaterByCodeOrMemory) {
  Ledger ledger = ledger_with_bad_weight();
  ledger.weights_finite_after = ledger.iteration - 1;
  Origin origin = locate_one(ledger).origins.at(0);
  EXPECT_THAT(origin.facts, HasFact(FactKind::finite_after_update));
  EXPECT_THAT(origin.alternatives, ElementsAre(Suspect::memory, Suspect::writer));
  EXPECT_EQ(origin.action, Action::restore_copy);
  EXPECT_EQ(origin.owner, Owner::unknown);

  ledger.weights_finite_after = ledger.iteration - 2;  // the step in between was not scanned
  origin = locate_one(ledger).origins.at(0);
  EXPECT_THAT(origin.facts, Not(HasFact(FactKind::finite_after_update)));
  EXPECT_EQ(origin.action, Action::check_checkpoint);
}

TEST(BirthOrigins, TheOptimizersFiniteCopyProvesDamageForNaNOnly) {
  Ledger ledger = ledger_with_bad_weight();
  ledger.optimizer_states = {{0, "main_param", {.numel = 4, .first_bad = -1}}};
  EXPECT_EQ(locate_one(ledger).origins.at(0).action, Action::restore_copy);
  // The cast to half precision makes Inf from finite values.
  ledger.sightings[0].stats = {.numel = 4, .pos_inf = 1, .first_bad = 2};
  EXPECT_EQ(locate_one(ledger).origins.at(0).action, Action::check_checkpoint);
}

TEST(BirthOrigins, AShardOfTheOptimizersStateSaysNothingOfElementsBesideIt) {
  Ledger ledger = ledger_with_bad_weight();
  for (auto& parameter : ledger.backward_order) parameter.shard = {{0, 2}};
  ledger.optimizer_states = {{0, "exp_avg", {.numel = 2, .nan = 1, .first_bad = 1}}};
  EXPECT_THAT(locate_one(ledger).origins.at(0).facts, Not(HasFact(FactKind::optimizer_state_bad)));
}

}  // namespace
}  // namespace nanlocator
