#include "report/error_code.hpp"

#include "nanlocator/verdict/cause_table.hpp"

namespace nanlocator::inline report_room {
namespace {

std::string error_code_of(Detail detail) {
  switch (detail) {
    case Detail::sqrt_of_negative:
      return "sqrt_negative";
    case Detail::log_of_zero:
      return "log_zero";
    case Detail::log_of_negative:
      return "log_negative";
    case Detail::division_by_zero:
      return "div_zero";
    case Detail::zero_over_zero:
      return "zero_over_zero";
    case Detail::power_of_zero:
      return "pow_zero";
    case Detail::power_of_negative:
      return "pow_negative";
    case Detail::outside_domain:
      return "domain";
    case Detail::derivative_at_pole:
      return "infinite_slope";
    case Detail::masked_row:
      return "masked_row";
    case Detail::mean_of_nothing:
      return "empty_mean";
    case Detail::too_few_elements:
      return "one_sample";
    case Detail::from_infinity:
      return "inf_operand";
    case Detail::custom_code:
      return "custom_op";
    case Detail::exceeds_range:
      return "overflow";
    case Detail::rewritten:
      return "rewritten_data";
    case Detail::unrecorded:
      return "unrecorded_data";
    case Detail::made_earlier:
      return "made_earlier";
    case Detail::none:
      return "undefined";
  }
  return "undefined";
}

std::string code_of_unknown(const Origin& origin) {
  if (origin.action == Action::check_clip) return "all_gradients";
  if (origin.action == Action::ask_silent_ranks) return "silent_ranks";
  if (has_fact(origin.facts, FactKind::norm_overflows)) return "norm_overflow";
  if (has_fact(origin.facts, FactKind::came_from_collective)) return "received";
  return origin.detail == Detail::none ? "needs_trace" : error_code_of(origin.detail);
}

}  // namespace

std::string error_code_of(const Origin& origin) {
  switch (origin.cause) {
    case Cause::bad_weight:
      if (has_fact(origin.facts, FactKind::update_undefined)) return "bad_update";
      if (was_changed_in_place(origin)) return "changed_weight";
      if (origin.detail == Detail::made_earlier) return "written_weight";
      return has_fact(origin.facts, FactKind::copies_clean) ? "weight_copy" : "bad_weight";
    case Cause::bad_buffer:
      if (origin.detail == Detail::made_earlier) return "made_earlier";
      return origin.parameter.empty() ? "kept_tensor" : "bad_buffer";
    case Cause::bad_input:
      if (origin.detail == Detail::unrecorded) return "unrecorded_data";
      return origin.detail == Detail::rewritten ? "rewritten_data" : "bad_data";
    case Cause::empty_loss_mask:
      return "no_labels";
    case Cause::operator_overflow:
      return origin.action == Action::find_weight_writer ? "weight_jump" : "overflow";
    case Cause::operator_undefined:
      return error_code_of(origin.detail);
    case Cause::operator_bug:
      return origin.detail == Detail::custom_code ? "custom_op" : "wrong_kernel";
    case Cause::kernel_bug:
      return "kernel_bug";
    case Cause::uninitialised_memory:
      return "unwritten";
    case Cause::compiled_region:
      return "compiled";
    case Cause::memory_corruption:
      return "overwritten";
    case Cause::not_reproduced:
      return "not_reproduced";
    case Cause::race:
      return "race";
    case Cause::collective_result:
      if (has_fact(origin.facts, FactKind::not_seen_on_arrival)) return "reduced_wrong";
      return has_fact(origin.facts, FactKind::members_got_other_values) ? "collective_differs"
                                                                        : "collective_wrong";
    case Cause::collective_sum:
      return "sum_overflow";
    case Cause::pipeline_transfer:
      return "transfer_wrong";
    case Cause::recompute_mismatch:
      return "recompute";
    case Cause::optimizer_update:
      return "bad_update";
    case Cause::optimizer_state:
      return "bad_moments";
    case Cause::left_gradients:
      return "left_gradients";
    case Cause::divergence:
      return "diverged";
    case Cause::user_hook:
      return "hook";
    case Cause::bad_scalar:
      return "bad_number";
    case Cause::loss_scale:
      return "loss_scale";
    case Cause::unknown:
      return code_of_unknown(origin);
  }
  return "needs_trace";
}

}  // namespace nanlocator::inline report_room
