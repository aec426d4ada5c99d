// The evidence of a verdict as data: kinds of observations and their arguments.
//
// `locate` emits facts and no sentences; only `report` words them (report/sentences.hpp). A fact
// says nothing beyond its arguments, so programs that read verdict.json can decide by `kind` and
// arguments and need not parse English.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "nanlocator/record/birth.hpp"
#include "nanlocator/record/sighting.hpp"
#include "nanlocator/verdict/cause.hpp"

namespace nanlocator::inline verdict_room {

/// One list for the enumerators and their names in JSON. docs/formats.md has each kind's arguments.
#define NANLOCATOR_FACT_KINDS(FACT)                                           \
  /* births (in an operator, in a hook, in a tensor from outside the step) */ \
  FACT(made_from_finite)                                                      \
  FACT(made_from_inf)                                                         \
  FACT(wrote_literal)                                                         \
  FACT(weight_was_bad)                                                        \
  FACT(buffer_was_bad)                                                        \
  FACT(data_was_bad)                                                          \
  FACT(memory_changed)                                                        \
  FACT(came_from_opaque_call)                                                 \
  FACT(made_by_kernel)                                                        \
  FACT(was_given_unwritten_memory)                                            \
  FACT(read_unwritten_memory)                                                 \
  FACT(left_unwritten)                                                        \
  FACT(made_by_hook)                                                          \
  FACT(came_from_collective)                                                  \
  /* transfers between ranks, and losses */                                   \
  FACT(sent_bad)                                                              \
  FACT(gave_bad)                                                              \
  FACT(loss_bad)                                                              \
  FACT(message_changed)                                                       \
  FACT(collective_changed)                                                    \
  FACT(received_from_unknown)                                                 \
  FACT(gathered_from_unknown)                                                 \
  /* parameters and gradients */                                              \
  FACT(parameter_bad_before)                                                  \
  FACT(parameter_bad_after)                                                   \
  FACT(gradient_bad)                                                          \
  FACT(all_gradients_bad)                                                     \
  FACT(all_gradients_bad_loss_finite)                                         \
  FACT(gradients_bad_to_the_end)                                              \
  FACT(gradient_without_order)                                                \
  FACT(clean_before_reduction)                                                \
  FACT(clean_copy_after_reduction)                                            \
  FACT(clean_after_reduction)                                                 \
  FACT(norm_bad)                                                              \
  FACT(loss_bad_gradients_finite)                                             \
  /* spread */                                                                \
  FACT(same_on_ranks)                                                         \
  FACT(same_in_microbatches)                                                  \
  FACT(same_line_elsewhere)                                                   \
  FACT(same_kernel_elsewhere)                                                 \
  FACT(same_collective_elsewhere)                                             \
  FACT(further_weights_bad)                                                   \
  /* the re-run of the step */                                                \
  FACT(rerun_not_completed)                                                   \
  FACT(rerun_identical)                                                       \
  FACT(rerun_differs)                                                         \
  FACT(rerun_clean)                                                           \
  FACT(variant_bad)                                                           \
  FACT(variant_finite)                                                        \
  FACT(control_bad)                                                           \
  FACT(control_clean)                                                         \
  FACT(gone_in_rerun)                                                         \
  FACT(happened_once)                                                         \
  FACT(not_restored)                                                          \
  FACT(reduction_not_repeated)                                                \
  FACT(transfer_bad_again)                                                    \
  FACT(transfer_not_run_again)                                                \
  FACT(wrote_during_transfer)                                                 \
  FACT(read_during_transfer)                                                  \
  FACT(wrote_beside_thread)                                                   \
  FACT(read_beside_thread)                                                    \
  FACT(wrote_beside_stream)                                                   \
  FACT(read_beside_stream)                                                    \
  FACT(ran_beside)                                                            \
  /* maxima of the steps before */                                            \
  FACT(climbed)                                                               \
  FACT(did_not_climb)                                                         \
  /* details of a birth */                                                    \
  FACT(values_at_first_bad)                                                   \
  FACT(input)                                                                 \
  FACT(derivative_of)                                                         \
  FACT(computed_again)                                                        \
  FACT(replayed)                                                              \
  FACT(kernel_executed)                                                       \
  FACT(kernel_not_executed)                                                   \
  FACT(kernel_replayed)                                                       \
  FACT(kernel_reference)                                                      \
  FACT(no_kernel_reference)                                                   \
  FACT(became)                                                                \
  FACT(reached)                                                               \
  FACT(discarded)                                                             \
  FACT(last_seen_in)                                                          \
  FACT(samples)                                                               \
  FACT(module_inferred)                                                       \
  FACT(called_in_framework)                                                   \
  FACT(literal_of)                                                            \
  FACT(weights_magnitude)                                                     \
  FACT(large_weight)                                                          \
  FACT(learning_rate)                                                         \
  FACT(weight_maxima)                                                         \
  FACT(gradient_maxima)                                                       \
  FACT(finite_when_written)                                                   \
  FACT(allocated_not_written)                                                 \
  FACT(received_by)                                                           \
  FACT(made_off_dispatcher)                                                   \
  FACT(made_before_pass)                                                      \
  FACT(written_again)                                                         \
  FACT(scaled_by_loss_scale)                                                  \
  FACT(other_writers_possible)                                                \
  /* other ranks, copies and phases */                                        \
  FACT(copies_clean)                                                          \
  FACT(copies_magnitude)                                                      \
  FACT(copies_value)                                                          \
  FACT(members_got_the_same)                                                  \
  FACT(members_got_other_values)                                              \
  FACT(members_got_other_bits)                                                \
  FACT(every_copy_bad)                                                        \
  FACT(no_copy_elsewhere)                                                     \
  FACT(copies_not_scanned)                                                    \
  FACT(optimizer_state_bad)                                                   \
  FACT(gradients_left)                                                        \
  FACT(written_by_program)                                                    \
  FACT(bad_at_start)                                                          \
  FACT(loaded_last)                                                           \
  FACT(update_undefined)                                                      \
  FACT(optimizer_copy_finite)                                                 \
  FACT(optimizer_state_finite)                                                \
  FACT(finite_after_update)                                                   \
  FACT(peers_finite)                                                          \
  FACT(gathered_from_owner)                                                   \
  FACT(owner_is_left)                                                         \
  FACT(received_finite_before)                                                \
  FACT(received_unseen_before)                                                \
  FACT(weights_gathered_unseen)                                               \
  FACT(lockstep_ranks)                                                        \
  FACT(mates_gave_finite)                                                     \
  FACT(mates_unknown)                                                         \
  FACT(weights_finite)                                                        \
  FACT(own_copy_bad)                                                          \
  FACT(every_member_bad)                                                      \
  FACT(only_owner_keeps_sum)                                                  \
  FACT(nobody_else_holds_it)                                                  \
  FACT(not_seen_on_arrival)                                                   \
  FACT(sum_near_overflow)                                                     \
  FACT(sum_may_exceed_range)                                                  \
  FACT(near_overflow)                                                         \
  FACT(other_replicas)                                                        \
  FACT(neighbours_clean)                                                      \
  FACT(first_bad_gradient)                                                    \
  FACT(before_collective)                                                     \
  FACT(stayed_on_rank)                                                        \
  FACT(sharded_first_here)                                                    \
  FACT(no_rank_earlier)                                                       \
  FACT(nothing_received)                                                      \
  FACT(at_stage_boundary)                                                     \
  FACT(exchanged_within_layer)                                                \
  FACT(same_on_tensor_parallel_copies)                                        \
  FACT(embedding_copy_clean)                                                  \
  FACT(may_have_arrived)                                                      \
  FACT(left_out_of_norm)                                                      \
  FACT(many_isolated)                                                         \
  FACT(between_reduction_and_norm)                                            \
  FACT(update_is_left)                                                        \
  FACT(norm_overflows)                                                        \
  FACT(norm_fits)                                                             \
  FACT(only_unseen_replicas_left)                                             \
  FACT(other_losses_finite)                                                   \
  /* missing data */                                                          \
  FACT(unseen_before)                                                         \
  FACT(order_not_observed)                                                    \
  FACT(no_whole_answer)                                                       \
  FACT(silent_here)                                                           \
  FACT(ledger_cut_off)                                                        \
  FACT(gradients_not_seen)                                                    \
  FACT(missing_operator)                                                      \
  FACT(missing_activations)                                                   \
  FACT(missing_gradient_inputs)                                               \
  FACT(missing_history)                                                       \
  FACT(missing_largest)                                                       \
  /* the whole verdict */                                                     \
  FACT(masked_values)                                                         \
  FACT(all_replicas_bad)                                                      \
  FACT(parameters_without_order)                                              \
  FACT(origins_not_listed)                                                    \
  FACT(isolated_not_listed)                                                   \
  FACT(ledgers_cut_off)                                                       \
  FACT(notes_not_listed)                                                      \
  /* a sentence of a verdict of version 1, which had no facts */              \
  FACT(stated)                                                                \
  FACT(stated_action)

enum class FactKind : std::uint8_t {
#define NANLOCATOR_ENUMERATOR(kind) kind,
  NANLOCATOR_FACT_KINDS(NANLOCATOR_ENUMERATOR)
#undef NANLOCATOR_ENUMERATOR
};
#define NANLOCATOR_NAME(kind) #kind,
[[nodiscard]] constexpr auto names_of(FactKind) {
  return std::to_array<std::string_view>({NANLOCATOR_FACT_KINDS(NANLOCATOR_NAME)});
}
#undef NANLOCATOR_NAME

/// The pass or finding that a fact comes from.
enum class FactSource : std::uint8_t {
  origin,      // the origin itself
  first_pass,  // the first pass, for an origin that was seen in the re-run
  folded,      // another finding that is counted as the same
};
[[nodiscard]] constexpr auto names_of(FactSource) {
  return std::to_array<std::string_view>({"origin", "first_pass", "folded"});
}

/// Numbers of bad elements of a tensor.
struct BadCount {
  std::int64_t nan = 0;
  std::int64_t pos_inf = 0;
  std::int64_t neg_inf = 0;
  std::int64_t numel = 0;
  friend bool operator==(const BadCount&, const BadCount&) = default;
};
[[nodiscard]] BadCount bad_count(const TensorStats& stats) noexcept;

/// An empty member is not an argument of the kind, or is unknown.
struct Fact {
  FactKind kind = FactKind::stated;
  FactSource source = FactSource::origin;
  std::vector<int> ranks{};  // the fact's subject; global, ascending
  std::vector<int> peers{};  // the other side: members, receivers, holders of copies
  std::optional<Phase> phase{};
  std::optional<int> microbatch{};
  std::optional<std::int64_t> step{};  // iteration; with `last_step` the first of a range
  std::optional<std::int64_t> last_step{};
  std::optional<std::int64_t> count{};
  std::optional<std::int64_t> of{};          // the total for `count`
  std::optional<std::int64_t> climbed_on{};  // number of ranks, of `histories` ranks
  std::optional<std::int64_t> histories{};
  std::optional<double> value{};
  std::optional<double> last_value{};
  std::optional<BadCount> bad{};
  bool loss = false;         // the bad value reached the loss
  bool other_ranks = false;  // the bad value was sent to other ranks
  std::string parameter{};
  std::string module{};
  std::string op{};
  std::string writer{};  // the last operator that wrote or allocated the memory
  std::string inside{};  // custom Function or compiled region around it
  std::string node{};    // autograd node
  std::string role{};
  std::string dtype{};
  std::string group{};               // process group
  std::string transfer{};            // operator of the collective or message: "c10d::allreduce_"
  std::string conclusion{};          // name of a replay's ReplayConclusion or KernelConclusion
  std::string variant{};             // name of a re-run's RerunVariant
  std::string text{};                // text from another program or the user
  std::vector<std::string> names{};  // parameters, states
  std::vector<std::pair<std::string, double>> values{};
  std::optional<Operand> operand{};
  std::optional<CodeLine> transfer_code{};  // line that began the transfer
  std::optional<BadExtent> extent{};        // of bad elements in the operand
  std::optional<CodeLine> code{};

  friend bool operator==(const Fact&, const Fact&) = default;
};

/// Each argument with its JSON key. Reading, writing and every test use this table.
template <typename AnyFact, typename Visit>
void visit_arguments(AnyFact& fact, Visit&& visit) {
  visit("ranks", fact.ranks);
  visit("peers", fact.peers);
  visit("phase", fact.phase);
  visit("microbatch", fact.microbatch);
  visit("step", fact.step);
  visit("last_step", fact.last_step);
  visit("count", fact.count);
  visit("of", fact.of);
  visit("climbed_on", fact.climbed_on);
  visit("histories", fact.histories);
  visit("value", fact.value);
  visit("last_value", fact.last_value);
  visit("bad", fact.bad);
  visit("loss", fact.loss);
  visit("other_ranks", fact.other_ranks);
  visit("parameter", fact.parameter);
  visit("module", fact.module);
  visit("operator", fact.op);
  visit("writer", fact.writer);
  visit("inside", fact.inside);
  visit("node", fact.node);
  visit("role", fact.role);
  visit("dtype", fact.dtype);
  visit("group", fact.group);
  visit("transfer", fact.transfer);
  visit("conclusion", fact.conclusion);
  visit("variant", fact.variant);
  visit("text", fact.text);
  visit("names", fact.names);
  visit("values", fact.values);
  visit("operand", fact.operand);
  visit("transfer_code", fact.transfer_code);
  visit("extent", fact.extent);
  visit("code", fact.code);
}

using Facts = std::vector<Fact>;

[[nodiscard]] const Fact* find_fact(const Facts& facts, FactKind kind) noexcept;
[[nodiscard]] bool has_fact(const Facts& facts, FactKind kind) noexcept;

}  // namespace nanlocator::inline verdict_room
