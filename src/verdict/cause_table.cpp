#include "nanlocator/verdict/cause_table.hpp"

#include <algorithm>
#include <array>
#include <cstddef>

#include "record/overwriting.hpp"
#include "verdict/unordered_facts.hpp"

namespace nanlocator::inline verdict_room {
namespace {

bool always(const Origin&) {
  return true;
}

template <FactKind... kinds>
bool has(const Origin& origin) {
  return (has_fact(origin.facts, kinds) || ...);
}

template <Concurrent other>
bool is_beside(const Origin& origin) {
  return find_unordered(origin.facts, other) != nullptr;
}

template <Detail... details>
bool is(const Origin& origin) {
  return ((origin.detail == details) || ...);
}

/// Tensor-parallel ranks compute parts of one result: only their peers' values can explain a zero
/// on one of them.
bool is_zero_among_peers(const Origin& origin) {
  return !has<FactKind::members_got_the_same>(origin) &&
         is<Detail::log_of_zero, Detail::division_by_zero, Detail::zero_over_zero>(origin) &&
         origin.coordinates && origin.coordinates->tp.size > 1;
}

/// In the program's own optimizer; one of torch's is told by its epsilon and learning rate.
bool is_zero_in_own_update(const Origin& origin) {
  return is<Detail::log_of_zero, Detail::division_by_zero, Detail::zero_over_zero>(origin) &&
         !has<FactKind::called_in_framework>(origin);
}

/// Only fp16 has a smaller range than fp32: an overflow in bf16 would also occur in fp32.
bool has_full_range(const Origin& origin) {
  return origin.tensor && (origin.tensor->dtype == "bfloat16" || origin.tensor->dtype == "float32");
}

/// A call that was executed again with finite inputs and failed again is no accident. If only the
/// re-run saw it fail, all gradients have the same bits as in the first pass.
bool is_bad_again(const Origin& origin) {
  return has<FactKind::transfer_bad_again, FactKind::members_got_other_values>(origin) ||
         (has<FactKind::came_from_collective>(origin) && has<FactKind::rerun_identical>(origin));
}

bool computes_wrong_values(const Origin& origin) {
  const Fact* const fact = find_fact(origin.facts, FactKind::kernel_replayed);
  return fact != nullptr && fact->conclusion == name_of(KernelConclusion::wrong_values);
}

/// True if the kernel's call, alone and with the same arguments, gives a different result each
/// time.
bool varies_alone(const Origin& origin) {
  const Fact* const fact = find_fact(origin.facts, FactKind::kernel_replayed);
  return fact != nullptr && fact->conclusion == name_of(KernelConclusion::varies);
}

template <Phase... phases>
bool in(const Origin& origin) {
  return ((origin.phase == phases) || ...);
}

/// The author of the Function wrote the arithmetic, so bad results from finite inputs are corrected
/// there.
bool is_in_custom_function(const Origin& origin) {
  return !origin.custom_function.empty();
}

/// True if the preceding update left the weight finite. The cast of the optimizer's own copy to the
/// model's dtype may make Inf, but no NaN.
bool was_damaged_later(const Origin& origin) {
  return has<FactKind::copies_clean, FactKind::finite_after_update>(origin) ||
         (has<FactKind::optimizer_copy_finite>(origin) && origin.tensor && origin.tensor->nan > 0);
}

bool is_made_earlier(const Origin& origin) {
  return origin.detail == Detail::made_earlier;
}

}  // namespace

bool was_changed_in_place(const Origin& origin) {
  return origin.cause == Cause::bad_weight && is_made_earlier(origin) &&
         origin.op.starts_with("aten::") && !is_overwriting(origin.op);
}

namespace {

/// True if the fault recurred with the same data: no accident of a machine.
bool is_repeated(const Origin& origin) {
  return has<FactKind::rerun_identical, FactKind::rerun_differs>(origin) &&
         !has<FactKind::gone_in_rerun>(origin);
}

/// True if a weight grew from one step to the next more than any update makes it grow.
bool has_jumped(const Origin& origin) {
  constexpr double kMostGrowth = 1e4;
  const Fact* const maxima = find_fact(origin.facts, FactKind::weight_maxima);
  if (maxima != nullptr && maxima->value && !maxima->values.empty()) {
    return *maxima->value > kMostGrowth * maxima->values.back().second;
  }
  // Of the weights before, only what updates by steady gradients may have added is known.
  constexpr double kBeyondAny = 1e10, kMostOfUpdate = 10;
  const Fact* const weight = find_fact(origin.facts, FactKind::large_weight);
  const Fact* const rate = find_fact(origin.facts, FactKind::learning_rate);
  const Fact* const gradients = find_fact(origin.facts, FactKind::did_not_climb);
  if (weight == nullptr || rate == nullptr || gradients == nullptr) return false;
  const double update =
      rate->value.value_or(1) * std::max(kMostOfUpdate, gradients->value.value_or(0));
  return weight->value.value_or(0) >
         std::max(kBeyondAny, kMostGrowth * update * static_cast<double>(origin.iteration));
}

/// True if an optimizer's sum of squares is negative, which its own update cannot cause.
bool has_negative_moment(const Origin& origin) {
  return origin.cause == Cause::optimizer_update && origin.detail == Detail::sqrt_of_negative;
}

/// True if the outcome depends on whether transfers are waited for, or on the order of threads.
bool is_of_timing(const Origin& origin) {
  return std::ranges::any_of(origin.facts, [](const Fact& fact) {
    return (fact.kind == FactKind::variant_finite &&
            fact.variant == name_of(RerunVariant::serialised)) ||
           fact.variant == name_of(RerunVariant::reordered);
  });
}

/// True if the line that used a transfer's memory is known.
bool is_in_program(const Origin& origin) {
  return std::ranges::any_of(origin.facts, [](const Fact& fact) {
    return fact.transfer_code.has_value() && fact.code.has_value();
  });
}

bool has_bundle(const Origin& origin) {
  return !origin.bundle.empty();
}

const std::array<CauseRow, kNames<Cause>.size()>& table() {
  using enum Action;
  using enum Suspect;
  using F = FactKind;
  static const std::array<CauseRow, kNames<Cause>.size()> rows = {{
      {Cause::bad_weight,
       Owner::model_author,
       Refutation::finite_checkpoint,
       Confidence::high,
       false,
       {checkpoint, last_update, memory},
       {{check_buffer, is_made_earlier},
        {restore_copy, has<F::written_by_program>},
        {restore_copy, was_damaged_later},
        {check_update, has<F::update_undefined>},
        {reset_optimizer_state, has<F::optimizer_state_bad>},
        {check_owner_of_shard, has<F::owner_is_left>},
        {check_checkpoint, always}}},
      {Cause::bad_buffer,
       Owner::model_author,
       Refutation::finite_buffer,
       Confidence::high,
       false,
       {},
       {{check_buffer, always}}},
      {Cause::bad_input,
       Owner::data,
       Refutation::finite_samples,
       Confidence::high,
       false,
       {},
       {{inspect_samples, always}}},
      {Cause::empty_loss_mask,
       Owner::model_author,
       Refutation::valid_label,
       Confidence::high,
       false,
       {},
       {{guard_empty_loss, always}}},
      {Cause::operator_overflow,
       Owner::model_author,
       Refutation::finite_call,
       Confidence::medium,
       false,
       {upstream},
       {{choose_before, has<F::discarded>},
        {find_weight_writer, has_jumped},
        {scale_inputs, has_full_range},
        {widen_or_scale, always}}},
      {Cause::operator_undefined,
       Owner::model_author,
       Refutation::finite_in_float64,
       Confidence::high,
       false,
       {},
       {{compare_peers, is_zero_among_peers},
        {choose_before, has<F::discarded>},
        {keep_infinity_out, is<Detail::from_infinity>},
        {correct_custom_code, is_in_custom_function},
        {correct_expression, is<Detail::sqrt_of_negative, Detail::log_of_negative,
                                Detail::power_of_negative, Detail::outside_domain>},
        {find_source_of_zero,
         is<Detail::log_of_zero, Detail::division_by_zero, Detail::zero_over_zero,
            Detail::power_of_zero, Detail::mean_of_nothing>},
        {guard_slope, is<Detail::derivative_at_pole>},
        {guard_masked_row, is<Detail::masked_row>},
        {guard_deviation, is<Detail::too_few_elements>},
        {inspect_undefined, always}}},
      {Cause::operator_bug,
       Owner::vendor,
       Refutation::bad_in_float64,
       Confidence::high,
       false,
       {},
       {{correct_custom_code, is<Detail::custom_code>}, {report_kernel, always}}},
      {Cause::kernel_bug,
       Owner::vendor,
       Refutation::kernel_contract,
       Confidence::high,
       false,
       {},
       {{report_kernel, always}}},
      {Cause::uninitialised_memory,
       Owner::model_author,
       Refutation::bad_with_written_memory,
       Confidence::high,
       false,
       {},
       {{write_memory, always}}},
      {Cause::compiled_region,
       Owner::vendor,
       Refutation::bad_when_eager,
       Confidence::high,
       false,
       {},
       {{report_compiler, always}}},
      {Cause::memory_corruption,
       Owner::cluster_operator,
       Refutation::unseen_writer,
       Confidence::medium,
       true,
       {memory, kernel},
       {{find_writer, is_repeated}, {test_memory, always}}},
      {Cause::not_reproduced,
       Owner::cluster_operator,
       Refutation::bad_in_further_rerun,
       Confidence::low,
       true,
       {memory, race, kernel},
       {{wait_for_transfer, is_beside<Concurrent::transfer>},
        {wait_for_stream, is_beside<Concurrent::stream>},
        {find_race, has<F::control_bad, F::ran_beside>},
        {test_device, always}}},
      {Cause::race,
       Owner::framework,
       Refutation::bad_when_serialised,
       Confidence::medium,
       false,
       {memory, kernel},
       {{wait_for_thread, is_beside<Concurrent::thread>},
        {wait_for_transfer, is_beside<Concurrent::transfer>},
        {wait_for_stream, is_beside<Concurrent::stream>},
        {find_race, always}}},
      {Cause::collective_result,
       Owner::cluster_operator,
       Refutation::bad_part,
       Confidence::medium,
       true,
       {link, memory, collective},
       {{check_collective_code, is_bad_again},
        {compare_members, has<F::came_from_collective>},
        {test_links, has<F::own_copy_bad, F::collective_changed, F::happened_once>},
        {compare_sums, always}}},
      {Cause::collective_sum,
       Owner::model_author,
       Refutation::sum_in_range,
       Confidence::medium,
       false,
       {link, memory},
       {{scale_addends, has<F::sum_may_exceed_range>}, {compare_sums, always}}},
      {Cause::pipeline_transfer,
       Owner::cluster_operator,
       Refutation::sender_changed,
       Confidence::low,
       true,
       {early_reuse, link, memory},
       {{find_overwrite, is_bad_again}, {test_transfer, always}}},
      {Cause::recompute_mismatch,
       Owner::model_author,
       Refutation::bad_first_forward,
       Confidence::high,
       false,
       {},
       {{compare_executions, always}}},
      {Cause::optimizer_update,
       Owner::model_author,
       Refutation::bad_state_before,
       Confidence::medium,
       false,
       {},
       {{find_source_of_zero, is_zero_in_own_update}, {check_update, always}}},
      {Cause::optimizer_state,
       Owner::model_author,
       Refutation::finite_state_before,
       Confidence::high,
       false,
       {last_update, checkpoint},
       {{reset_optimizer_state, always}}},
      {Cause::left_gradients,
       Owner::model_author,
       Refutation::finite_state_before,
       Confidence::high,
       false,
       {},
       {{clear_gradients, always}}},
      {Cause::divergence,
       Owner::model_author,
       Refutation::no_growth,
       Confidence::medium,
       false,
       {},
       {{lower_learning_rate, always}}},
      {Cause::user_hook,
       Owner::model_author,
       Refutation::bad_before_hook,
       Confidence::high,
       false,
       {},
       {{check_hook, always}}},
      {Cause::bad_scalar,
       Owner::model_author,
       Refutation::finite_scalar,
       Confidence::high,
       false,
       {},
       {{correct_scalar, always}}},
      {Cause::loss_scale,
       Owner::nobody,
       Refutation::overflow_at_smallest_scale,
       Confidence::high,
       false,
       {},
       {{wait, always}}},
      {Cause::unknown,
       Owner::unknown,
       Refutation::earlier_phase,
       Confidence::low,
       false,
       {},
       {{trace_operators, has<F::missing_operator>},
        {ask_silent_ranks, has<F::received_from_unknown>},
        {ask_silent_ranks, has<F::gathered_from_unknown>},
        {inspect_batch, has<F::all_gradients_bad>},
        {check_clip, has<F::all_gradients_bad_loss_finite>},
        {inspect_backward, has<F::gradients_bad_to_the_end>},
        {inspect_unordered, has<F::gradient_without_order>},
        {inspect_gradient, has<F::gradient_bad>},
        {check_copy, has<F::clean_copy_after_reduction, F::clean_before_reduction>},
        {check_after_backward, has<F::clean_after_reduction>},
        {inspect_norm, has<F::norm_bad>},
        {inspect_loss, has<F::loss_bad_gradients_finite>},
        {check_update, in<Phase::params_after>},
        {inspect_bundle, has_bundle},
        {inspect_operator, always}}},
  }};
  return rows;
}

Refutation refutation_of_unknown(const Origin& origin) {
  switch (origin.phase) {
    case Phase::forward:
    case Phase::loss:
    case Phase::backward:
      return Refutation::unwatched_receipt;
    case Phase::grad_local:
      return Refutation::earlier_in_step;
    default:
      return Refutation::earlier_phase;
  }
}

Owner owner_of(const Origin& origin, const CauseRow& row) {
  switch (origin.action) {
    case Action::check_collective_code:
    case Action::find_overwrite:
      return Owner::framework;  // a failure that repeats with the same values is not the machine's
    case Action::correct_custom_code:
      return origin.code ? Owner::model_author : Owner::vendor;
    case Action::restore_copy:  // one bad copy of several was not made by code
      if (has<FactKind::written_by_program>(origin)) return Owner::model_author;
      return has<FactKind::copies_clean>(origin) ? Owner::cluster_operator : Owner::unknown;
    case Action::find_writer:
      return Owner::model_author;
    case Action::find_weight_writer:
    case Action::find_race:
      return Owner::unknown;
    case Action::wait_for_thread:
    case Action::wait_for_transfer:
    case Action::wait_for_stream:
      return is_in_program(origin) ? Owner::model_author : Owner::framework;
    case Action::compare_peers:
      return Owner::unknown;  // the author's if the peers have it too, else the machine's
    default:
      return row.owner;
  }
}

/// One element of many, in memory that whole operators write: a hit of the memory is as likely as
/// code.
bool is_single_element(const Origin& origin) {
  constexpr std::int64_t kMany = 32;
  if (!origin.tensor) return false;
  std::int64_t elements = 1;
  for (const std::int64_t size : origin.tensor->shape) elements *= size;
  return elements >= kMany &&
         origin.tensor->nan + origin.tensor->pos_inf + origin.tensor->neg_inf == 1;
}

/// Of what the program or an operator is known to have written last.
bool may_be_hit(const Origin& origin) {
  const bool is_kept = origin.cause == Cause::bad_buffer || origin.cause == Cause::bad_weight;
  const bool has_writer = origin.cause == Cause::bad_buffer || is_made_earlier(origin) ||
                          has<FactKind::written_by_program>(origin);
  return is_kept && has_writer && is_single_element(origin);
}

/// The suspects of the cause that the facts leave open, and those that facts add.
std::vector<Suspect> alternatives_of(const Origin& origin, const CauseRow& row) {
  std::vector<Suspect> left = row.suspects;
  const auto drop = [&](auto... suspects) { (std::erase(left, suspects), ...); };
  if (was_changed_in_place(origin)) return {Suspect::last_update};
  if (may_be_hit(origin) && is_made_earlier(origin)) return {Suspect::memory};
  if (origin.cause == Cause::bad_weight && is_made_earlier(origin)) return {};
  if (const Fact* const start = find_fact(origin.facts, FactKind::bad_at_start)) {
    std::vector<Suspect> open = {Suspect::checkpoint, Suspect::initialisation};
    if (!start->peers.empty()) open.push_back(Suspect::memory);
    return open;
  }
  if (has<FactKind::loaded_last>(origin)) return {Suspect::checkpoint, Suspect::memory};
  if (has<FactKind::written_by_program>(origin)) {
    return {Suspect::writer, Suspect::last_update, Suspect::memory};
  }
  if (origin.cause == Cause::bad_weight && was_damaged_later(origin)) {
    if (has<FactKind::copies_clean>(origin)) {
      return {Suspect::link, Suspect::memory, Suspect::kernel};
    }
    return {Suspect::memory, Suspect::writer};
  }
  if (const Fact* const made = find_fact(origin.facts, FactKind::update_undefined);
      made != nullptr && origin.cause == Cause::bad_weight) {
    return made->op.empty() ? std::vector{Suspect::writer} : std::vector<Suspect>{};
  }
  if (origin.cause == Cause::bad_weight && has<FactKind::optimizer_state_bad>(origin)) {
    return {Suspect::last_update, Suspect::checkpoint};
  }
  if (origin.cause == Cause::bad_weight && has<FactKind::every_copy_bad>(origin)) {
    return {Suspect::checkpoint, Suspect::last_update};
  }
  if (origin.cause == Cause::bad_weight && has<FactKind::owner_is_left>(origin)) {
    return {Suspect::memory, Suspect::last_update, Suspect::checkpoint};
  }
  if (origin.cause == Cause::memory_corruption && is_repeated(origin)) {
    return {Suspect::kernel, Suspect::writer};
  }
  if (origin.cause == Cause::operator_overflow && has_jumped(origin)) {
    return {Suspect::memory, Suspect::writer};
  }
  // Nothing that damages memory makes several elements Inf and none NaN.
  const bool is_many_inf = origin.tensor && origin.tensor->nan == 0 &&
                           origin.tensor->pos_inf + origin.tensor->neg_inf > 1;
  if (origin.cause == Cause::collective_sum && is_many_inf) return {};
  if (has_negative_moment(origin)) return {Suspect::memory, Suspect::checkpoint, Suspect::writer};
  if (origin.cause == Cause::bad_buffer && origin.detail != Detail::made_earlier) {
    std::vector<Suspect> suspects = {Suspect::checkpoint, Suspect::writer};
    if (may_be_hit(origin)) suspects.insert(suspects.begin(), Suspect::memory);
    return suspects;
  }
  if (origin.detail == Detail::rewritten) left.push_back(Suspect::race);
  if (origin.cause == Cause::not_reproduced && has<FactKind::weights_gathered_unseen>(origin)) {
    left.push_back(Suspect::gather);
  }
  if (origin.cause == Cause::not_reproduced && has<FactKind::reduction_not_repeated>(origin)) {
    left.insert(left.end(), {Suspect::link, Suspect::collective});
  }
  if (origin.cause == Cause::race && is_of_timing(origin)) left.clear();
  if (is_bad_again(origin)) drop(Suspect::link, Suspect::memory);
  if (varies_alone(origin)) {
    left.insert(left.end(), {Suspect::race, Suspect::kernel, Suspect::memory});
  }
  if (has<FactKind::control_bad>(origin)) drop(Suspect::memory);
  if (origin.cause == Cause::collective_result && has<FactKind::happened_once>(origin)) {
    left.push_back(Suspect::early_reuse);
  }
  if (has<FactKind::not_seen_on_arrival>(origin) ||
      (origin.cause == Cause::not_reproduced && has<FactKind::clean_after_reduction>(origin))) {
    left.push_back(Suspect::writer);
  }
  if (origin.cause == Cause::operator_overflow && has<FactKind::did_not_climb>(origin)) {
    left.push_back(Suspect::upstream);
  }
  if (origin.detail == Detail::custom_code) left.push_back(Suspect::mathematics);
  if (origin.cause == Cause::unknown && in<Phase::grad_local>(origin) &&
      has<FactKind::gradient_bad>(origin)) {
    left = {Suspect::kernel, Suspect::memory, Suspect::hook};
  }
  std::ranges::sort(left);
  const auto twice = std::ranges::unique(left);
  left.erase(twice.begin(), twice.end());
  return left;
}

Confidence cause_confidence_of(const Origin& origin, const CauseRow& row) {
  if (origin.cause == Cause::operator_undefined && origin.detail == Detail::none) {
    return Confidence::medium;
  }
  if (origin.detail == Detail::custom_code) return Confidence::medium;
  if (was_changed_in_place(origin) || may_be_hit(origin)) return Confidence::low;
  if (origin.detail == Detail::made_earlier) return Confidence::medium;
  if (origin.detail == Detail::rewritten || origin.detail == Detail::unrecorded) {
    return Confidence::low;
  }
  if (has<FactKind::update_undefined>(origin)) return Confidence::medium;
  if (origin.cause == Cause::race && is_of_timing(origin) &&
      (is_beside<Concurrent::transfer>(origin) || is_beside<Concurrent::thread>(origin) ||
       is_beside<Concurrent::stream>(origin))) {
    return Confidence::high;
  }
  if (origin.action == Action::compare_peers) return Confidence::medium;
  // The first pass may have left it behind.
  const bool is_of_before = origin.cause == Cause::bad_buffer || origin.cause == Cause::bad_input;
  if (is_of_before && has<FactKind::not_restored>(origin)) return Confidence::low;
  if (origin.cause == Cause::operator_overflow && has_jumped(origin)) return Confidence::medium;
  // The replay also executed the call in float64.
  if (origin.cause == Cause::operator_overflow &&
      has<FactKind::replayed, FactKind::kernel_reference>(origin)) {
    return Confidence::high;
  }
  return row.confidence;
}

}  // namespace

const CauseRow& row_of(Cause cause) {
  return table()[static_cast<std::size_t>(cause)];
}

/// Whether one copy of the weight was changed alone, by something that no rank's code does: not if
/// the update or the program itself made it bad, nor if whole weights are bad.
static bool was_one_copy_damaged(const Origin& origin) {
  if (has<FactKind::update_undefined, FactKind::written_by_program>(origin)) return false;
  if (is_made_earlier(origin)) return false;
  if (!origin.tensor || !has<FactKind::further_weights_bad>(origin)) return true;
  std::int64_t elements = 1;
  for (const std::int64_t size : origin.tensor->shape) elements *= size;
  return origin.tensor->nan + origin.tensor->pos_inf + origin.tensor->neg_inf < elements;
}

void complete(Origin& origin) {
  if (origin.cause == Cause::bad_weight && !was_one_copy_damaged(origin)) {
    std::erase_if(origin.facts,
                  [](const Fact& fact) { return fact.kind == FactKind::copies_clean; });
  }
  const CauseRow& row = row_of(origin.cause);
  const auto rule =
      std::ranges::find_if(row.actions, [&](const ActionRule& each) { return each.fits(origin); });
  origin.action = rule == row.actions.end() ? Action::none : rule->action;
  origin.owner = owner_of(origin, row);
  origin.refutation = origin.cause == Cause::unknown             ? refutation_of_unknown(origin)
                      : is_made_earlier(origin)                  ? Refutation::finite_after_write
                      : computes_wrong_values(origin)            ? Refutation::bad_in_float64
                      : origin.action == Action::wait_for_thread ? Refutation::bad_in_either_order
                                                                 : row.refutation;
  origin.cause_confidence = cause_confidence_of(origin, row);
  origin.alternatives = alternatives_of(origin, row);
  if (origin.cause == Cause::bad_weight && origin.iteration <= 1) {  // no update came before
    std::erase(origin.alternatives, Suspect::last_update);
  }
}

}  // namespace nanlocator::inline verdict_room
