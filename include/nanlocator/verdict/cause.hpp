// The vocabulary of an origin's cause. cause_table.hpp has what belongs to each cause.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "nanlocator/files/names.hpp"

namespace nanlocator::inline verdict_room {

enum class Cause {
  bad_weight,
  bad_buffer,
  bad_input,
  empty_loss_mask,
  operator_overflow,
  operator_undefined,
  operator_bug,
  kernel_bug,
  uninitialised_memory,
  compiled_region,
  memory_corruption,
  not_reproduced,
  race,
  collective_result,
  collective_sum,
  pipeline_transfer,
  recompute_mismatch,
  optimizer_update,
  optimizer_state,
  left_gradients,  // of an earlier step, to which this one added
  divergence,
  user_hook,
  bad_scalar,
  loss_scale,
  unknown,
};
[[nodiscard]] constexpr auto names_of(Cause) {
  return std::to_array<std::string_view>({"bad_weight",
                                          "bad_buffer",
                                          "bad_input",
                                          "empty_loss_mask",
                                          "operator_overflow",
                                          "operator_undefined",
                                          "operator_bug",
                                          "kernel_bug",
                                          "uninitialised_memory",
                                          "compiled_region",
                                          "memory_corruption",
                                          "not_reproduced",
                                          "race",
                                          "collective_result",
                                          "collective_sum",
                                          "pipeline_transfer",
                                          "recompute_mismatch",
                                          "optimizer_update",
                                          "optimizer_state",
                                          "left_gradients",
                                          "divergence",
                                          "user_hook",
                                          "bad_scalar",
                                          "loss_scale",
                                          "unknown"});
}

/// The violated rule of an operator's mathematics, or the exceeded limit.
enum class Detail {
  none,  // unknown
  sqrt_of_negative,
  log_of_zero,
  log_of_negative,
  division_by_zero,
  zero_over_zero,
  power_of_zero,       // 0 to a negative power
  power_of_negative,   // a negative number to a fractional power
  outside_domain,      // acos, asin, acosh, atanh
  derivative_at_pole,  // sqrt at 0, a norm at 0: defined in forward, its slope is not
  masked_row,          // a softmax over -Inf only
  mean_of_nothing,
  too_few_elements,  // a deviation of no more elements than its correction
  from_infinity,     // 0 times Inf, Inf minus Inf, Inf over Inf
  exceeds_range,     // the true result does not fit the dtype
  made_earlier,      // by an operator that the re-run did not repeat; what it was given is unknown
  rewritten,         // a batch whose memory was written again while the step ran
  unrecorded,        // data, or what the program computed before its step was recorded
  custom_code,       // an operator or autograd Function from outside PyTorch
};
[[nodiscard]] constexpr auto names_of(Detail) {
  return std::to_array<std::string_view>(
      {"none", "sqrt_of_negative", "log_of_zero", "log_of_negative", "division_by_zero",
       "zero_over_zero", "power_of_zero", "power_of_negative", "outside_domain",
       "derivative_at_pole", "masked_row", "mean_of_nothing", "too_few_elements", "from_infinity",
       "exceeds_range", "made_earlier", "rewritten", "unrecorded", "custom_code"});
}

/// The party that can act.
enum class Owner {
  unknown,
  model_author,
  data,
  cluster_operator,
  framework,  // PyTorch, Megatron-Core
  vendor,     // the author of the kernel or of the custom operator
  nobody,     // no action is needed
};
[[nodiscard]] constexpr auto names_of(Owner) {
  return std::to_array<std::string_view>(
      {"unknown", "model_author", "data", "cluster_operator", "framework", "vendor", "nobody"});
}

/// Open suspects, in addition to the cause or instead of it.
enum class Suspect {
  link,
  memory,       // of the candidates' devices
  gather,       // of weights that ranks keep in shards, at each use
  early_reuse,  // code that frees or overwrites a buffer before a transfer has ended
  collective,   // the collective's own code
  kernel,       // a kernel that is not deterministic, or writes out of bounds
  race,
  checkpoint,
  initialisation,  // the code that makes the weight, or loads others and leaves it out
  last_update,     // the optimizer's update in the step before
  upstream,        // an earlier computation that was not seen
  writer,          // code outside the step
  mathematics,     // the operator's result may be undefined for these inputs
  hook,
};
[[nodiscard]] constexpr auto names_of(Suspect) {
  return std::to_array<std::string_view>(
      {"link", "memory", "gather", "early_reuse", "collective", "kernel", "race", "checkpoint",
       "initialisation", "last_update", "upstream", "writer", "mathematics", "hook"});
}

/// The next step.
enum class Action {
  none,
  stated,  // from a sentence of a verdict of version 1
  wait,
  // weights, buffers, data
  restore_copy,
  check_owner_of_shard,
  reset_optimizer_state,
  clear_gradients,
  check_checkpoint,
  check_buffer,
  inspect_samples,
  guard_empty_loss,
  // operators
  widen_or_scale,
  scale_inputs,
  compare_peers,
  correct_expression,
  find_source_of_zero,
  choose_before,  // the program's choice of values, in front of the operator, too
  find_weight_writer,
  guard_slope,
  guard_masked_row,
  keep_infinity_out,
  guard_deviation,
  correct_custom_code,
  inspect_undefined,
  report_kernel,
  write_memory,
  report_compiler,
  inspect_bundle,
  inspect_operator,
  check_hook,
  correct_scalar,
  compare_executions,
  // machines
  test_memory,
  find_writer,
  test_device,
  find_race,
  wait_for_transfer,
  wait_for_thread,
  wait_for_stream,
  // transfers and collectives
  compare_members,
  test_links,
  compare_sums,
  scale_addends,
  check_copy,
  check_collective_code,
  find_overwrite,
  test_transfer,
  ask_silent_ranks,
  // the optimizer and the norm
  check_update,
  lower_learning_rate,
  inspect_norm,
  // missing observations
  trace_operators,
  inspect_batch,
  check_clip,
  inspect_backward,
  inspect_gradient,
  inspect_unordered,
  inspect_loss,
  check_after_backward,
};
[[nodiscard]] constexpr auto names_of(Action) {
  return std::to_array<std::string_view>({"none",
                                          "stated",
                                          "wait",
                                          "restore_copy",
                                          "check_owner_of_shard",
                                          "reset_optimizer_state",
                                          "clear_gradients",
                                          "check_checkpoint",
                                          "check_buffer",
                                          "inspect_samples",
                                          "guard_empty_loss",
                                          "widen_or_scale",
                                          "scale_inputs",
                                          "compare_peers",
                                          "correct_expression",
                                          "find_source_of_zero",
                                          "choose_before",
                                          "find_weight_writer",
                                          "guard_slope",
                                          "guard_masked_row",
                                          "keep_infinity_out",
                                          "guard_deviation",
                                          "correct_custom_code",
                                          "inspect_undefined",
                                          "report_kernel",
                                          "write_memory",
                                          "report_compiler",
                                          "inspect_bundle",
                                          "inspect_operator",
                                          "check_hook",
                                          "correct_scalar",
                                          "compare_executions",
                                          "test_memory",
                                          "find_writer",
                                          "test_device",
                                          "find_race",
                                          "wait_for_transfer",
                                          "wait_for_thread",
                                          "wait_for_stream",
                                          "compare_members",
                                          "test_links",
                                          "compare_sums",
                                          "scale_addends",
                                          "check_copy",
                                          "check_collective_code",
                                          "find_overwrite",
                                          "test_transfer",
                                          "ask_silent_ranks",
                                          "check_update",
                                          "lower_learning_rate",
                                          "inspect_norm",
                                          "trace_operators",
                                          "inspect_batch",
                                          "check_clip",
                                          "inspect_backward",
                                          "inspect_gradient",
                                          "inspect_unordered",
                                          "inspect_loss",
                                          "check_after_backward"});
}

/// The observation that would refute the cause, or the place if the cause is unknown.
enum class Refutation {
  finite_checkpoint,
  finite_buffer,
  finite_after_write,
  finite_samples,
  valid_label,
  finite_call,
  finite_in_float64,
  bad_in_float64,
  kernel_contract,
  bad_with_written_memory,
  bad_when_eager,
  unseen_writer,
  bad_in_further_rerun,
  bad_when_serialised,
  bad_in_either_order,
  bad_part,
  sum_in_range,
  sender_changed,
  bad_first_forward,
  bad_state_before,
  finite_state_before,
  no_growth,
  bad_before_hook,
  finite_scalar,
  overflow_at_smallest_scale,
  unwatched_receipt,
  earlier_in_step,
  earlier_phase,
};
[[nodiscard]] constexpr auto names_of(Refutation) {
  return std::to_array<std::string_view>({"finite_checkpoint",
                                          "finite_buffer",
                                          "finite_after_write",
                                          "finite_samples",
                                          "valid_label",
                                          "finite_call",
                                          "finite_in_float64",
                                          "bad_in_float64",
                                          "kernel_contract",
                                          "bad_with_written_memory",
                                          "bad_when_eager",
                                          "unseen_writer",
                                          "bad_in_further_rerun",
                                          "bad_when_serialised",
                                          "bad_in_either_order",
                                          "bad_part",
                                          "sum_in_range",
                                          "sender_changed",
                                          "bad_first_forward",
                                          "bad_state_before",
                                          "finite_state_before",
                                          "no_growth",
                                          "bad_before_hook",
                                          "finite_scalar",
                                          "overflow_at_smallest_scale",
                                          "unwatched_receipt",
                                          "earlier_in_step",
                                          "earlier_phase"});
}

}  // namespace nanlocator::inline verdict_room
