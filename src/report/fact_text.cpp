#include "report/fact_text.hpp"

#include <algorithm>
#include <cmath>
#include <functional>

#include "nanlocator/record/collective_kind.hpp"
#include "report/words.hpp"
#include "verdict/unordered_facts.hpp"

namespace nanlocator::inline report_room {
namespace {

/// "aten::log of module encoder.norm".
std::string who_of(const Fact& fact) {
  if (fact.op.empty() && fact.module.empty()) return "an unknown operator";
  if (fact.op.empty()) return "module " + fact.module;
  return fact.op + (fact.module.empty() ? "" : " of module " + fact.module);
}

/// "; aten::mm of module body only read it first"; "" if the reader is unknown.
std::string reader_of(const Fact& fact) {
  if (fact.op.empty() && fact.module.empty()) return "";
  return "; " + who_of(fact) + " was the first to read it";
}

std::string bad_of(const Fact& fact) {
  return fact.bad ? bad_text(*fact.bad) : "NaN or Inf";
}

std::string share_of(const Fact& fact) {
  return fact.bad ? share_text(*fact.bad) : "NaN or Inf";
}

/// "6 of 54 elements of its output[0] (everything at indices 2 to 3 of dimension 0)".
std::string elements_of(const Fact& fact) {
  const Operand output = fact.operand.value_or(Operand{});
  std::int64_t numel = 1;
  for (const std::int64_t size : output.shape) numel *= size;
  const std::string extent = extent_text(output.shape, fact.count.value_or(0), fact.extent);
  return counted(fact.count.value_or(0)) + " of " + counted(numel, "element") + " of its " +
         output.name + (extent.empty() ? "" : " (" + extent + ")");
}

std::string kernel_text(const Fact& fact) {
  switch (value_named<KernelConclusion>(fact.conclusion).value_or(KernelConclusion::bad_again)) {
    case KernelConclusion::not_replayed:
      return "it was not executed again";
    case KernelConclusion::not_bad_again:
      return "all of its " + fact.operand.value_or(Operand{}).name +
             " was finite then: its arguments alone do not make it bad";
    case KernelConclusion::varies:
      return "its bad elements come and go, or move, from execution to execution on the same "
             "arguments: it is not deterministic, as a race is not";
    case KernelConclusion::leaves_unwritten:
      return "it leaves " + elements_of(fact) +
             " unwritten: two patterns that were put there before the call are there after it";
    case KernelConclusion::reads_unwritten:
      return elements_of(fact) +
             " are bad where the memory that it allocates itself holds NaN first, and finite where "
             "that holds a constant: it reads what it has not written";
    case KernelConclusion::reads_outside:
      return elements_of(fact) +
             " are bad with NaN beside the elements of its arguments, and finite with a constant "
             "there: it reads outside of its arguments";
    case KernelConclusion::writes_outside:
      return "it writes before the beginning or beyond the end of its argument " + fact.role;
    case KernelConclusion::wrong_values:
      return elements_of(fact) +
             " are bad every time, where its reference is finite in float64, in float32 and in the "
             "output's dtype";
    case KernelConclusion::overflows:
      return elements_of(fact) +
             " are bad every time, where its reference exceeds the range of the output's dtype, or "
             "of float32 on the way: these inputs overflow";
    case KernelConclusion::undefined:
      return elements_of(fact) +
             " are bad every time, where its reference in float64 is NaN or "
             "Inf, too: these inputs have no finite result";
    case KernelConclusion::given_bad:
      return elements_of(fact) + " are bad every time; its argument " + fact.role +
             " held NaN or Inf before the call";
    case KernelConclusion::bad_again:
      return elements_of(fact) + " are bad every time, of finite arguments";
  }
  return "";
}

std::string at_line(const Fact& fact) {
  return fact.code ? " at " + code_text(*fact.code) : "";
}

std::string variant_text(const Fact& fact) {
  switch (value_named<RerunVariant>(fact.variant).value_or(RerunVariant::compiled)) {
    case RerunVariant::eager:
      return "re-run without torch.compile, operator by operator";
    case RerunVariant::compiled:
      return "re-run with torch.compile, as the step was";
    case RerunVariant::constant_memory:
      return "re-run with uninitialised memory filled with 1";
    case RerunVariant::nan_memory:
      return "re-run with uninitialised memory filled with NaN";
    case RerunVariant::serialised:
      return "re-run with every transfer between ranks and every operator on a GPU waited for at "
             "once";
    case RerunVariant::reordered:
      return "re-run with the other thread's use of the memory and the step's in the other order";
    case RerunVariant::sanitised:
      return "re-run under PyTorch's stream sanitizer";
  }
  return "";
}

std::string times_text(const Fact& fact) {
  return fact.count.value_or(1) < 2 ? "" : ", " + counted(*fact.count, "time");
}

std::string unordered_text(const Fact& fact, Concurrent other) {
  const bool is_write = fact.kind == unordered_kind(other, true);
  const std::string beside = fact.transfer_code ? " at " + code_text(*fact.transfer_code) : "";
  const std::string user = fact.transfer + beside;
  const std::string uses = is_write ? " uses" : " writes";
  const std::string on_ranks = ", on " + ranks_text(fact.ranks) + ": ";
  std::string text =
      who_of(fact) + at_line(fact) + (is_write ? " wrote to" : " read") + " memory that ";
  switch (other) {
    case Concurrent::transfer:
      return text + fact.transfer + (beside.empty() ? "" : ", begun" + beside + ",") +
             " was still " + (is_write ? "using" : "writing") + on_ranks +
             "nobody had waited for it";
    case Concurrent::thread:
      return text + "another thread (" + user + ")" + uses + on_ranks +
             "neither waits for the other";
    case Concurrent::stream:
      return text + user + uses + " on another stream" + on_ranks +
             "PyTorch's stream sanitizer saw neither wait for the other";
  }
  return text;
}

/// "transfers between ranks used the memory of what was bad, and another thread used the same
/// memory".
std::string beside_text(const Fact& fact) {
  std::vector<std::string> texts;
  for (const std::string& name : fact.names) {
    switch (value_named<Concurrent>(name).value_or(Concurrent::transfer)) {
      case Concurrent::transfer:
        texts.emplace_back("transfers between ranks used the memory of what was bad");
        break;
      case Concurrent::thread:
        texts.emplace_back("another thread used the same memory");
        break;
      case Concurrent::stream:
        texts.emplace_back("several streams of the device were in use");
        break;
    }
  }
  return joined(texts, ", and ");
}

/// The contents of transfers in the phase; an all-gather may carry weights.
std::string contents_of(const Fact& fact) {
  if (collective_kind_of(fact.op) == CollectiveKind::all_gather) return "values";
  switch (fact.phase.value_or(Phase::params_after)) {
    case Phase::forward:
      return "activations";
    case Phase::backward:
      return "gradients";
    case Phase::grad_reduced:
      return "parameter gradients";
    default:
      return "values";
  }
}

std::string microbatch_of(const Fact& fact) {
  return fact.microbatch ? " of microbatch " + std::to_string(*fact.microbatch) : "";
}

std::string phase_of(const Fact& fact) {
  return fact.phase ? std::string(name_of(*fact.phase)) : "the step";
}

/// "the all_reduce of module decoder.layers.1.mlp.linear_fc2 (group tp, ranks 2-3)".
std::string group_text(const Fact& fact) {
  return fact.group.empty() ? "" : " (group " + fact.group + ", " + ranks_text(fact.peers) + ")";
}

std::string collective_of(const Fact& fact) {
  std::string text = fact.op.empty() ? "a collective" : "the " + fact.op;
  if (!fact.module.empty()) text += " of module " + fact.module;
  return text + group_text(fact);
}

std::string value_of(const std::optional<double>& value) {
  return value ? short_number(*value) : "an unknown number";
}

std::int64_t count_of(const Fact& fact) {
  return fact.count.value_or(0);
}

std::string sent_text(const Fact& fact) {
  const std::string what = " " + contents_of(fact) + microbatch_of(fact);
  if (fact.peers.empty()) {
    return ranks_text(fact.ranks) + " each sent bad" + what + " on, the first " + share_of(fact) +
           ", in " + phase_of(fact);
  }
  return ranks_text(fact.ranks) + " sent " + share_of(fact) + what + " to " +
         ranks_text(fact.peers) + ", in " + phase_of(fact);
}

std::string loss_text(const Fact& fact) {
  std::string text =
      "the loss" + microbatch_of(fact) + " holds " + bad_of(fact) + " on " + ranks_text(fact.ranks);
  if (!fact.count) return text;
  return text + (*fact.count == 0 ? "; it counts no valid label: zero divided by zero"
                                  : "; it counts " + counted(*fact.count, "valid label"));
}

std::string reached_text(const Fact& fact) {
  // Bad values before the update are in gradients, after it in weights.
  const bool is_weight = fact.phase == Phase::params_after;
  std::vector<std::string> parts;
  if (fact.loss) parts.push_back(fact.role.empty() ? "the loss" : "the model's " + fact.role);
  if (fact.count == 1) {
    parts.push_back((is_weight ? "the parameter " : "the gradient of ") + fact.parameter);
  } else if (fact.count) {
    parts.push_back((is_weight ? "" : "the gradients of ") + counted(*fact.count, "parameter") +
                    ", first " + (is_weight ? "" : "of ") + fact.parameter);
  }
  if (fact.other_ranks) parts.emplace_back("other ranks");
  return "it reached " + joined(parts);
}

std::string climbed_text(const Fact& fact) {
  std::string text = "the largest gradient of " + ranks_text(fact.ranks) + " climbed from " +
                     value_of(fact.value) + " at step " + counted(fact.step.value_or(0)) + " to " +
                     value_of(fact.last_value) + " at step " + counted(fact.last_step.value_or(0));
  if (!fact.parameter.empty()) text += " (" + fact.parameter + ")";
  text += ", and did not fall in " + counted(count_of(fact)) + " of these " +
          counted(fact.of.value_or(0), "step");
  if (fact.histories.value_or(0) > 1) {
    text += "; it climbed on " + counted(fact.climbed_on.value_or(0)) + " of " +
            counted(*fact.histories) + " ranks that kept a history";
  }
  return text;
}

std::string values_text(const Fact& fact) {
  std::vector<std::string> parts;
  for (const auto& [name, value] : fact.values) parts.push_back(name + " = " + short_number(value));
  return joined(parts, ", ");
}

/// "3.1, 88 and 2.1e+04 in steps 9 to 11".
std::string maxima_text(const Fact& fact) {
  std::vector<std::string> numbers;
  for (const auto& [step, value] : fact.values) numbers.push_back(short_number(value));
  if (fact.values.empty()) return "not known";
  const auto& [first, last] = std::pair(fact.values.front().first, fact.values.back().first);
  if (numbers.size() == 2) {
    return numbers[0] + " in step " + first + " and " + numbers[1] + " in step " + last;
  }
  return joined(numbers) +
         (first == last ? " in step " + first : " in steps " + first + " to " + last);
}

std::string copies_magnitude_text(const Fact& fact) {
  const std::string own =
      fact.last_value ? ", in the finite elements of this one " + value_of(fact.last_value) : "";
  return "the largest magnitude in the " + std::string(fact.peers.size() == 1 ? "copy" : "copies") +
         " on " + ranks_text(fact.peers) + " is " + value_of(fact.value) + own;
}

/// "; the copy on rank 1 is finite"; "" if there is none.
std::string finite_copies_text(const Fact& fact) {
  if (fact.peers.empty()) return "";
  return "; the " + std::string(fact.peers.size() == 1 ? "copy on " : "copies on ") +
         ranks_text(fact.peers) + (fact.peers.size() == 1 ? " is finite" : " are finite");
}

/// "hold 0.012", "hold 0.012 (rank 1) and 0.013 (rank 3)".
std::string copies_value_text(const Fact& fact) {
  const bool is_one = fact.peers.size() == 1;
  std::vector<std::string> values;
  for (const auto& [rank, value] : fact.values) values.push_back(short_number(value));
  const bool are_equal = std::ranges::adjacent_find(values, std::not_equal_to()) == values.end();
  if (are_equal && !values.empty()) {
    values.resize(1);
  } else {
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] += " (rank " + fact.values[i].first + ")";
  }
  return "at its first bad element the " + std::string(is_one ? "copy" : "copies") + " on " +
         ranks_text(fact.peers) + (is_one ? " holds " : " hold ") + joined(values);
}

std::string other_results_text(const Fact& fact) {
  const bool is_apart = fact.kind == FactKind::members_got_other_values;
  return "executed again, " + fact.op + (fact.module.empty() ? "" : " of module " + fact.module) +
         " (group " + fact.group + microbatch_of(fact) + ", in " + phase_of(fact) + ") gave " +
         ranks_text(fact.ranks) + " other " + (is_apart ? "values" : "bits") + " than " +
         ranks_text(fact.peers) + ", where every member gets the same (" + ranks_text(fact.ranks) +
         ": largest magnitude " + value_of(fact.value) + ", " + counted(count_of(fact)) +
         " zero; " + ranks_text(fact.peers) + ": " + value_of(fact.last_value) + ", " +
         counted(fact.of.value_or(0)) + " zero)";
}

std::string read_text(const Fact& fact) {
  return fact.op.empty() ? "" : "; " + fact.op + " read it first";
}

std::string further_weights_text(const Fact& fact) {
  const bool is_cut = count_of(fact) > static_cast<std::int64_t>(fact.names.size());
  const bool is_after = fact.phase == Phase::params_after;
  return counted(count_of(fact), "further parameter") + (count_of(fact) == 1 ? " was" : " were") +
         (is_after ? " bad after the update, too: " : " bad before the pass, too: ") +
         joined(fact.names, ", ") + (is_cut ? ", ..." : "");
}

std::string neighbours_text(const Fact& fact) {
  return fact.parameter + ", which backward reaches later, is clean" +
         (fact.names.empty() ? "" : ", and so is " + fact.names.front() + " before it") +
         ": the gradients of the activations were finite here";
}

std::string clean_before_text(const Fact& fact) {
  return fact.names.empty() ? "" : "; " + fact.names.front() + ", just before it, is clean";
}

/// For an origin that spoiled several gradients; the fact names the first.
std::string more_gradients_text(const Fact& fact) {
  const std::int64_t more = count_of(fact) - 1;
  return more < 1 ? "" : ", as " + counted(more, "further gradient") + " there";
}

std::string origins_not_listed_text(const Fact& fact) {
  return (fact.phase ? "up to " : "") + counted(count_of(fact), "further origin") +
         (fact.phase ? " in " + phase_of(fact) : "") + (count_of(fact) == 1 ? " is" : " are") +
         " not listed";
}

/// `peers`: the ranks whose shards of weights are gathered without being scanned.
std::string received_finite_text(const Fact& fact) {
  const bool has_unseen = !fact.peers.empty();
  return std::string(has_unseen ? "everything but gathered weights that " : "everything that ") +
         ranks_text(fact.ranks) + (fact.loss ? " sent and received" : " had received") +
         " before it in this microbatch was finite" +
         (fact.group.empty() ? "" : " (what was gathered: where it was sent)") +
         ": it was born there, between the last " +
         (fact.loss ? "of these transfers and the loss" : "transfer and this one") +
         (has_unseen ? ", or came with those weights" : "");
}

std::string plain_text(const Fact& fact) {
  using enum FactKind;
  switch (fact.kind) {
    case made_from_finite:
      return who_of(fact) + " made " + share_of(fact) + " in its " + fact.role +
             " from finite inputs";
    case made_from_inf:
      return who_of(fact) + " made " + share_of(fact) + " in its " + fact.role +
             " from inputs that hold Inf and no NaN";
    case wrote_literal:
      return who_of(fact) + " was passed " + (fact.bad && fact.bad->nan > 0 ? "NaN" : "Inf") +
             " as a number";
    case weight_was_bad:
      return "the parameter " + fact.parameter + " held " + share_of(fact) +
             " before the pass began" + reader_of(fact);
    case buffer_was_bad:
      if (fact.parameter.empty()) {
        return "a tensor that module " + fact.module + " keeps held " + share_of(fact) +
               " before the pass began; it was not passed to the model" + reader_of(fact);
      }
      return "the buffer " + fact.parameter + " held " + share_of(fact) + " before the pass began" +
             reader_of(fact);
    case data_was_bad:
      return (fact.parameter.empty() ? "a tensor" : fact.parameter) +
             " from outside the model held " + share_of(fact) + " before the pass began" +
             reader_of(fact);
    case memory_changed:
      return (fact.parameter.empty() ? "a tensor that " + who_of(fact) + " wrote"
                                     : "the gradient of " + fact.parameter) +
             " held " + share_of(fact) +
             ", though it was finite when it was last written and no operator wrote to it since";
    case came_from_opaque_call:
      return share_of(fact) + " came from a computation that PyTorch's dispatcher does not see; " +
             who_of(fact) + " read it first";
    case made_by_kernel:
      return fact.op + " made " + share_of(fact) + " in its " + fact.role +
             "; PyTorch's dispatcher does not see it, and what it was given was scanned before";
    case was_given_unwritten_memory:
      return "it was given memory that nobody had written, and that held NaN or Inf already";
    case read_unwritten_memory:
      return fact.op +
             " read memory that nobody had written: NaN that a re-run had put there "
             "reached it; " +
             fact.writer + " allocated the memory" + at_line(fact);
    case left_unwritten:
      return fact.op + " left " + share_of(fact) + " of its " + fact.role +
             " unwritten: NaN that a re-run had put there is still there; " + fact.writer +
             " allocated the memory" + at_line(fact);
    case made_by_hook:
      return "a hook of the user made " + share_of(fact) + " with " + fact.op;
    case came_from_collective:
      return share_of(fact) + " came out of a collective" + group_text(fact) + "; " + who_of(fact) +
             " read it first";
    case sent_bad:
      return sent_text(fact);
    case gave_bad:
      return ranks_text(fact.ranks) + " put " + share_of(fact) + " " + contents_of(fact) +
             microbatch_of(fact) + " into " + collective_of(fact) + ", in " + phase_of(fact);
    case loss_bad:
      return loss_text(fact);
    case message_changed:
      return ranks_text(fact.peers) + " sent finite " + contents_of(fact) + microbatch_of(fact) +
             " to " + ranks_text(fact.ranks) + ", which received " + share_of(fact);
    case collective_changed:
      return ranks_text(fact.peers) + " put finite " + contents_of(fact) + microbatch_of(fact) +
             " into " + collective_of(fact) + ", and " + ranks_text(fact.ranks) + " got " +
             share_of(fact) + " out of it";
    case received_from_unknown:
      return ranks_text(fact.ranks) + " received " + share_of(fact) + " " + contents_of(fact) +
             microbatch_of(fact) + (fact.op.empty() ? "" : " from the " + fact.op) + "; " +
             (fact.peers.empty() ? "who put them in is not known"
                                 : "what " + ranks_text(fact.peers) + " put in is not known");
    case gathered_from_unknown:
      return "what " + ranks_text(fact.ranks) + " had gathered from " + ranks_text(fact.peers) +
             " before is not known";
    case parameter_bad_before:
      return "the parameter held " + share_of(fact) + " on " + ranks_text(fact.ranks) +
             " before this step's forward";
    case parameter_bad_after:
      return share_of(fact) + " in the parameter after the optimizer step on " +
             ranks_text(fact.ranks) + ", though every gradient that was seen is finite";
    case gradient_bad:
      return share_of(fact) + " in the gradient of " + fact.parameter + " on " +
             ranks_text(fact.ranks) +
             (fact.phase == Phase::grad_local ? ", before the data-parallel collective"
                                              : ", in " + phase_of(fact));
    case all_gradients_bad:
      return "all " + counted(count_of(fact), "gradient") +
             " on the ranks that backward reaches are bad, from the first one (" + fact.parameter +
             ") on: the loss or its gradient may have been bad already, so a birth in forward "
             "cannot be excluded";
    case all_gradients_bad_loss_finite:
      return "all " + counted(count_of(fact), "gradient") +
             " on the ranks that backward reaches are bad, from the first one (" + fact.parameter +
             ") on, though the loss is finite: they were made so at the start of backward, or "
             "after it by what changes all of them, as a clip by a norm that is NaN does";
    case gradients_bad_to_the_end:
      return counted(count_of(fact), "gradient") +
             " on the replica's ranks are bad, from that of " + fact.parameter +
             " to the end of backward" + clean_before_text(fact);
    case gradient_without_order:
      return share_of(fact) + " on " + ranks_text(fact.ranks) +
             "; the parameter is in no rank's backward order, so what it could have received is "
             "not known";
    case clean_before_reduction:
      return "its gradient was clean before the data-parallel collective on " +
             (fact.peers.size() == 2
                  ? "both ranks"
                  : "all " + counted(static_cast<std::int64_t>(fact.peers.size()), "rank")) +
             " that hold it, and has " + share_of(fact) + " after it on " + ranks_text(fact.ranks);
    case clean_copy_after_reduction:
      return share_of(fact) + " after the data-parallel collective on " + ranks_text(fact.ranks) +
             more_gradients_text(fact) +
             "; other data-parallel ranks hold a clean result of the same elements. What it was "
             "before the collective is not known on every rank; had it been bad there, all "
             "members would have received it (unless gradients are not reduced at all)";
    case clean_after_reduction:
      return "clean after the data-parallel reduction, and " + share_of(fact) + " on " +
             ranks_text(fact.ranks) + " where the optimizer read it" + more_gradients_text(fact);
    case norm_bad:
      return "the framework's gradient norm is " +
             std::string(fact.value && std::isnan(*fact.value) ? "NaN" : "Inf") +
             ", though every gradient that was seen is finite";
    case loss_bad_gradients_finite:
      return "the loss holds " + bad_of(fact) + " on " + ranks_text(fact.ranks) +
             ", though every gradient that was seen is finite";
    case same_on_ranks:
      return "the same on " + ranks_text(fact.ranks) +
             ": a common cause, not a fault of one device";
    case same_in_microbatches:
      return "the same in " + counted(count_of(fact)) +
             " microbatches of this step; this is the first of them";
    case same_line_elsewhere:
      return "the same line gave it in " + counted(count_of(fact), "other place") +
             ", too: " + joined(fact.names, ", ");
    case same_kernel_elsewhere:
      return "the same kernel is the first to make something bad in " +
             counted(count_of(fact), "other place") + ", too: " + joined(fact.names, ", ");
    case same_collective_elsewhere:
      return "the same collective gave something bad in " + counted(count_of(fact), "other place") +
             ", too: " + joined(fact.names, ", ");
    case further_weights_bad:
      return further_weights_text(fact);
    case rerun_not_completed:
      return "the step was re-run, but the re-run did not complete";
    case rerun_identical:
      return (count_of(fact) == 0 ? "the step was re-run and is bad again"
                                  : "the step was re-run and came out bit-identical (" +
                                        counted(count_of(fact), "gradient") + ")") +
             std::string(": it repeats with the same data, weights and random numbers");
    case rerun_differs:
      return "the step was re-run and is bad again, with other bits in " + counted(count_of(fact)) +
             " of " + counted(fact.of.value_or(0), "gradient") +
             ": something in it is not deterministic";
    case rerun_clean:
      return std::string("the step was re-run") +
             (fact.names.empty() ? " with the same data, weights and random numbers, and"
                                 : " and") +
             " came out finite";
    case variant_bad:
      return variant_text(fact) + ": bad again" + times_text(fact) +
             (fact.variant == name_of(RerunVariant::constant_memory)
                  ? ", so uninitialised memory is not the cause"
                  : "");
    case variant_finite:
      return variant_text(fact) + ": finite" + times_text(fact) +
             (fact.variant == name_of(RerunVariant::nan_memory)
                  ? ", so no operator read uninitialised memory"
                  : "");
    case wrote_during_transfer:
    case read_during_transfer:
      return unordered_text(fact, Concurrent::transfer);
    case wrote_beside_thread:
    case read_beside_thread:
      return unordered_text(fact, Concurrent::thread);
    case wrote_beside_stream:
    case read_beside_stream:
      return unordered_text(fact, Concurrent::stream);
    case ran_beside:
      return "while the operators of the step ran, " + beside_text(fact) + ": a race is possible";
    case control_bad:
      return "a second re-run, without tracing, was bad again: it depends on timing, as "
             "a race or uninitialised memory does";
    case control_clean:
      return "a second re-run, without tracing, came out finite as well";
    case gone_in_rerun:
      return "the step was re-run and is bad again, but this was clean in the re-run: it happened "
             "once";
    case happened_once:
      return "it happened once: transient";
    case not_restored:
      return "not restored before the re-run: " + joined(fact.names) +
             "; that something came out otherwise in it is no evidence against a device";
    case reduction_not_repeated:
      return "the program itself had reduced gradients over ranks, which a re-run leaves out: that "
             "it was gone does not clear that reduction";
    case transfer_bad_again:
      return "the transfer ran again in the re-run, from finite values, and came out bad again: "
             "software is likelier than a link or a device";
    case transfer_not_run_again:
      return "what this collective returned in the re-run was not compared: the re-run says "
             "nothing of the hardware";
    case climbed:
      return climbed_text(fact);
    case did_not_climb:
      return "gradients did not grow before: from step " + counted(fact.step.value_or(0)) + " to " +
             counted(fact.last_step.value_or(0)) + " the largest of " + ranks_text(fact.ranks) +
             " was " + value_of(fact.value);
    case values_at_first_bad:
      return "at the first bad element: " + values_text(fact);
    case input:
      return "input " + (fact.operand ? operand_text(*fact.operand) : fact.text);
    case derivative_of:
      return "in backward node " + fact.node +
             (fact.op.empty() ? "" : ", the derivative of " + fact.op);
    case computed_again:
      return "it was computed again in backward (" + fact.node +
             "); the first execution, from which the loss was made, was finite";
    case replayed:
      return fact.text;
    case kernel_executed:
      return "its call was executed again " + counted(count_of(fact), "time") +
             ", alone and on its recorded arguments" +
             (fact.conclusion == "same_bits" ? ", with the same bits each time" : "");
    case kernel_not_executed:
      return "its call was not executed again: " + fact.text;
    case kernel_replayed:
      return kernel_text(fact);
    case kernel_reference:
      return "its reference (" + fact.text + ", in float64) agrees with " +
             counted(count_of(fact)) + " of " + counted(fact.of.value_or(0), "element") +
             (fact.variant == "scaled" ? " of its output for smaller inputs" : " that it computed");
    case no_kernel_reference:
      return (fact.text.empty() ? "no float64 reference is known that agrees with what it computes"
                                : "its float64 reference was not executed (" + fact.text + ")") +
             std::string(fact.conclusion == name_of(KernelConclusion::bad_again)
                             ? ": a bug and inputs that overflow cannot be told apart"
                             : "");
    case became:
      return "it became " + bad_of(fact) + " in " + who_of(fact) + " (" + phase_of(fact) + ")";
    case reached:
      return reached_text(fact);
    case discarded:
      return "the loss is finite: the program left these values out of it, but the derivative "
             "multiplies them by zero, and zero times NaN or Inf is NaN";
    case last_seen_in:
      return "it was last seen in module " + fact.module;
    case module_inferred:
      return "no module was entered: " +
             (fact.module.empty() ? std::string("the model") : fact.module) +
             " is the one whose parameter was used last";
    case called_in_framework:
      return "called in the framework at " +
             (fact.code ? code_text(*fact.code) : "an unknown line");
    case literal_of:
      return function_name_of(fact.op) + " wrote the Inf";
    case weights_magnitude:
      return "largest weights of the module: " + values_text(fact);
    case large_weight:
      return "the largest weight of " + ranks_text(fact.ranks) + ", in " + fact.parameter +
             ", is " + value_of(fact.value);
    case learning_rate:
      return "the learning rate is " + value_of(fact.value);
    case weight_maxima:
      return "the largest weight of " + fact.parameter + " was " + maxima_text(fact) +
             (fact.value ? "; it is " + value_of(fact.value) + " now" : "");
    case gradient_maxima:
      return "the largest gradient of " + fact.parameter + " was " + maxima_text(fact);
    case finite_when_written:
      return "finite when " + fact.writer + " wrote it; " +
             (fact.inside.empty()
                  ? "no operator has written it since"
                  : fact.inside + " may have written it since, off the dispatcher") +
             read_text(fact);
    case allocated_not_written:
      return "allocated by " + fact.writer + (fact.inside.empty() ? "" : " inside " + fact.inside) +
             ", and bad before any operator was seen to write to it" + read_text(fact);
    case received_by:
      return "received by " + fact.writer + read_text(fact);
    case made_off_dispatcher:
      return "made by " + fact.inside + " off the dispatcher" + read_text(fact);
    case made_before_pass:
      if (fact.writer.empty()) return "no operator of this pass wrote it" + read_text(fact);
      return collective_kind_of(fact.writer)
                 ? collective_name_of(fact.writer) +
                       " brought it, and a re-run does not communicate" + read_text(fact)
                 : function_name_of(fact.writer) +
                       " wrote it, before the part that was executed again" + read_text(fact);
    case written_again:
      return "its memory was written again before the step ended, and holds other values now";
    case scaled_by_loss_scale:
      return "all gradients of this step are multiplied by " + value_of(fact.value) +
             ", a loss scale that falls after an overflow";
    case other_writers_possible:
      return "not excluded: a kernel off the dispatcher, or another process, that wrote there";
    case copies_clean:
      return (fact.peers.size() == 1 ? "the copy on " + ranks_text(fact.peers) + " is"
                                     : "the copies on " + ranks_text(fact.peers) + " are") +
             " clean: only that of " + ranks_text(fact.ranks) +
             " was damaged, after the last update or in its parameter all-gather";
    case copies_magnitude:
      return copies_magnitude_text(fact);
    case copies_value:
      return copies_value_text(fact);
    case members_got_the_same:
      return "not a fault of communication: in the re-run " + ranks_text(fact.ranks) + " and " +
             ranks_text(fact.peers) + " got the same bits out of " +
             counted(count_of(fact), "collective") + " of group " + fact.group +
             microbatch_of(fact);
    case members_got_other_values:
    case members_got_other_bits:
      return other_results_text(fact);
    case every_copy_bad:
      return "every scanned copy of it is bad";
    case no_copy_elsewhere:
      return fact.peers.empty()
                 ? "no rank that scanned it holds a copy to compare it with"
                 : "what " + ranks_text(fact.peers) + " " +
                       (fact.peers.size() == 1 ? "holds" : "hold") +
                       " under this name has other values, also where both are finite";
    case copies_not_scanned:
      return "whether the copies on " + ranks_text(fact.ranks) +
             " are clean is not known: the parameters were not scanned before the step";
    case optimizer_state_bad:
      return "the optimizer's " + joined(fact.names) + " of it on " + ranks_text(fact.ranks) +
             (fact.names.size() == 1 ? " holds" : " hold") +
             " NaN or Inf, too: either the update made both bad, or the loaded checkpoint held "
             "both";
    case gradients_left:
      return "the gradients of step " + counted(fact.step.value_or(0)) +
             ", which were NaN or Inf, were still there when this step began, and its backward "
             "added to them";
    case update_undefined:
      if (fact.op.empty()) {
        return "step " + counted(fact.step.value_or(0)) +
               " read it, and its loss and gradients were finite: its update made every element "
               "bad";
      }
      return fact.op == "lr" ? "the optimizer's learning rate was " +
                                   std::string(fact.bad && fact.bad->nan > 0 ? "NaN" : "Inf")
                             : "the optimizer's epsilon is 0 in " + fact.dtype +
                                   ", and the update is 0 / 0 where the second moment is 0";
    case written_by_program:
      return "the program itself had written to it since the update before (p.data, p.copy_)";
    case samples:
      return "the step read " + joined(fact.names);
    case bad_at_start:
      return "it was so when the first step began, and nothing has written to it since" +
             finite_copies_text(fact);
    case loaded_last:
      return "the last that wrote to it was a load of the program's (load_state_dict)" +
             finite_copies_text(fact);
    case optimizer_copy_finite:
      return "the optimizer's own copy of it (" + joined(fact.names) + ") on " +
             ranks_text(fact.ranks) + " is finite";
    case optimizer_state_finite:
      return "the optimizer's " + joined(fact.names) + " of it on " + ranks_text(fact.ranks) +
             (fact.names.size() == 1 ? " is" : " are") +
             " finite, so no earlier gradient made it bad";
    case finite_after_update:
      return "it was finite after the update of step " + std::to_string(fact.step.value_or(0)) +
             ": it was damaged between that and this step's end";
    case peers_finite:
      return fact.op + (fact.module.empty() ? "" : " of module " + fact.module) + " on " +
             ranks_text(fact.peers) + ", the tensor-parallel " +
             (fact.peers.size() == 1 ? "peer" : "peers") +
             ", made nothing bad: its input differs there, or is another part of the tensor";
    case gathered_from_owner:
      return "the optimizer of " + ranks_text(fact.ranks) +
             " updates this part of the parameter: " + ranks_text(fact.peers) +
             (fact.peers.size() == 1 ? " has" : " have") +
             " it from there, by the all-gather of parameters";
    case owner_is_left:
      return "left are the memory of " + ranks_text(fact.ranks) +
             ", its update in the step before, and the checkpoint";
    case received_finite_before:
      return received_finite_text(fact);
    case received_unseen_before:
      return "what " + ranks_text(fact.ranks) + " had received from " + ranks_text(fact.peers) +
             " before it was not all scanned (quantised bytes, a tensor subclass or a captured "
             "stream): " +
             (fact.other_ranks ? "it may have come from there"
                               : "but another rank got the same, and sent nothing bad here");
    case weights_gathered_unseen:
      return "the weights that " + ranks_text(fact.ranks) +
             (fact.ranks.size() == 1 ? " gathers" : " gather") + " from " + ranks_text(fact.peers) +
             " for each use were not scanned where they arrived: a gather that went wrong there "
             "cannot be told from it (level boundaries scans them; with Megatron-FSDP, level "
             "modules)";
    case lockstep_ranks:
      return "these tensor-parallel ranks are bad at the same point of the program: they compute "
             "the same from the same there, or cannot be separated";
    case mates_gave_finite:
      return "what " + ranks_text(fact.ranks) + " put into it was finite";
    case mates_unknown:
      return "what " + ranks_text(fact.ranks) + " put into it is not known";
    case weights_finite:
      return "the parameters of " + ranks_text(fact.ranks) + " were finite before the step";
    case own_copy_bad:
      return "what " + ranks_text(fact.peers) +
             " got out of it is finite: it went wrong on the side of " + ranks_text(fact.ranks);
    case every_member_bad:
      return "every member has it: the members cannot be separated";
    case only_owner_keeps_sum:
      return "only the owner of these elements (" + ranks_text(fact.ranks) +
             ") keeps their sum: it and every rank that sent to it are possible";
    case not_seen_on_arrival:
      return "nobody looked at the sum when it arrived: code that wrote to it later looks the same";
    case nobody_else_holds_it:
      return "no other rank holds it: nothing was received in between, it was written or damaged "
             "on this rank";
    case sum_near_overflow:
      return "no NaN, and its largest finite element " + value_of(fact.value) +
             " is close to the largest " + fact.dtype + ": the sum of " + counted(count_of(fact)) +
             " finite addends may have overflowed";
    case sum_may_exceed_range:
      return "no NaN, and the largest elements that the " + counted(count_of(fact)) +
             " members put in add up to " + value_of(fact.value) + ", beyond the largest " +
             fact.dtype + " (" + value_of(fact.last_value) + "): the sum may have overflowed";
    case near_overflow:
      return "no NaN, and its largest finite element " + value_of(fact.value) +
             " is close to the largest " + fact.dtype + ": an overflow is likely";
    case other_replicas:
      return "before the reduction the same gradient was clean on " + counted(count_of(fact)) +
             " of " + counted(fact.of.value_or(0)) + " other data-parallel ranks";
    case neighbours_clean:
      return neighbours_text(fact);
    case first_bad_gradient:
      return "the first bad gradient of its ranks, in backward order, is that of " +
             fact.parameter + clean_before_text(fact);
    case before_collective:
      return "these gradients were bad when backward had ended, before any reduction over "
             "replicas: "
             "what made them is not visible in gradients";
    case stayed_on_rank:
      return "the other tensor-parallel ranks stayed clean, though their activations' gradients "
             "are summed with this rank's: it did not travel with those; this rank's own gradient "
             "memory or kernels are likely";
    case sharded_first_here:
      return "its sharded gradients are bad on this tensor-parallel rank first; the others are bad "
             "only from the next tensor-parallel all-reduce on";
    case no_rank_earlier:
      return "no tensor-parallel rank is bad earlier than the others by a parameter of its own: "
             "the value may have come from any of them through a tensor-parallel collective";
    case nothing_received:
      return "everything that was sent between the replica's ranks in forward and backward was "
             "finite: no rank has it from another";
    case at_stage_boundary:
      return "it is the first parameter that backward reaches on its pipeline stage and the stage "
             "above is clean: born at the end of that stage's backward, in the transfer, or at "
             "the start of this one's";
    case exchanged_within_layer:
      return "context- or expert-parallel ranks exchange gradients inside a layer: all of theirs "
             "on this stage remain possible";
    case same_on_tensor_parallel_copies:
      return "it is the same on every tensor-parallel rank of the stage, which hold copies of it: "
             "they cannot be separated";
    case embedding_copy_clean:
      return "a bad gradient from the layers would be in the position embeddings of every "
             "tensor-parallel rank, and a copy of those is clean";
    case may_have_arrived:
      return "no sharded parameter comes after it in backward: another tensor-parallel rank's "
             "part of a sum could have put it here";
    case left_out_of_norm:
      return "Megatron leaves this parameter out of the gradient norm on tensor-parallel ranks "
             "above 0: the norm would not have shown it";
    case many_isolated:
      return counted(count_of(fact), "parameter") +
             " of this rank are bad with clean ones between them: neither one damaged element nor "
             "one flow through backward";
    case between_reduction_and_norm:
      return fact.other_ranks
                 ? "between the two lie what the loop does to it, unscaling, the optimizer's copy, "
                   "and "
                   "the reduction of tied embeddings or tensor-parallel duplicates, which this "
                   "parameter takes part in"
                 : "between the two lie what the loop does to it, unscaling, and the optimizer's "
                   "copy";
    case update_is_left:
      return fact.other_ranks ? "left are the update itself, the optimizer's state, and the "
                                "all-gather of updated parameters (distributed optimizer)"
                              : "left are the update itself and the optimizer's state";
    case norm_overflows:
      return "the largest gradient is " + value_of(fact.value) +
             ": the sum of squares overflows fp32 (sqrt of its largest number: 1.8e19)";
    case norm_fits:
      return "the largest gradient is " + value_of(fact.value) +
             ", too small for its square to overflow fp32: a norm that fp16 cannot hold, the "
             "norm's own reduction, or a gradient that was not scanned";
    case only_unseen_replicas_left:
      return "the other replicas' gradients were clean before the collective: only replicas with "
             "a rank that did not say are left";
    case other_losses_finite:
      return "before that collective the loss held " + std::to_string(fact.count.value_or(0)) +
             " NaN or Inf on " + ranks_text(fact.ranks) +
             ", and those of the other replicas were finite";
    case unseen_before:
      return "bad in " + phase_of(fact) + "; " +
             (fact.ranks.empty() ? "the phase before did not cover this parameter on every rank"
                                 : ranks_text(fact.ranks) +
                                       " did not say what their gradients were before the "
                                       "data-parallel collective");
    case order_not_observed:
      return "the order of backward was not observed on these ranks: within a layer it is not "
             "known";
    case no_whole_answer:
      return "no complete answer for " + phase_of(fact) + " from " + ranks_text(fact.ranks) +
             ": what they saw is not part of this";
    case silent_here:
      return ranks_text(fact.ranks) + " did not say what they saw here and cannot be excluded";
    case ledger_cut_off:
      return "the ledger is cut off: something bad that it received may be missing from it";
    case gradients_not_seen:
      return "the gradients of " + ranks_text(fact.ranks) + " were not seen: theirs may be bad";
    case missing_operator:
      return "missing for the cause: the operator, which this level does not see";
    case missing_activations:
      return "missing for the cause: the activations, which this level does not see";
    case missing_gradient_inputs:
      return "what is missing for the cause: the inputs of the operator that computed this "
             "gradient; "
             "without them a bad kernel, a hook and bad memory cannot be told apart";
    case missing_history:
      return "missing for the cause: the history of this maximum over the steps before";
    case missing_largest:
      return "missing for the cause: no rank reported its largest gradient";
    case masked_values:
      return "what " + ranks_text(fact.ranks) +
             " sent was not finite, but reached neither a loss nor a gradient: it was masked, and "
             "counts as meant";
    case all_replicas_bad:
      return "every data-parallel replica was bad from the first gradient of backward on: a common "
             "cause (a weight, the "
             "data of all replicas, the learning rate) is likelier than as many faults";
    case parameters_without_order:
      return counted(count_of(fact), "bad parameter") + (count_of(fact) == 1 ? " is" : " are") +
             " in no rank's backward order (first: " + fact.parameter +
             "); they count as received from the origin of their replica";
    case origins_not_listed:
      return origins_not_listed_text(fact);
    case isolated_not_listed:
      return "more parameters are bad by themselves than the " + counted(count_of(fact)) +
             " that are listed for a rank, on " + ranks_text(fact.ranks);
    case ledgers_cut_off:
      return "the ledgers of " + ranks_text(fact.ranks) +
             " are cut off: what is missing from them counts as unknown";
    case notes_not_listed:
      return "further notes are in the ledgers";
    case stated:
    case stated_action:
      return fact.text;
  }
  return fact.text;
}

}  // namespace

std::string fact_text(const Fact& fact) {
  switch (fact.source) {
    case FactSource::origin:
      return plain_text(fact);
    case FactSource::first_pass:
      return "in the first pass " + plain_text(fact);
    case FactSource::folded:
      return "counted as the same: " + plain_text(fact);
  }
  return plain_text(fact);
}

int place_of(const Fact& fact) {
  using enum FactKind;
  if (fact.kind == stated_action) return 6;  // not evidence
  if (fact.source != FactSource::origin) return 4;
  if (fact.kind == members_got_the_same || fact.kind == peers_finite) return 2;
  const bool made_no_difference =
      fact.kind == variant_bad && (fact.variant == name_of(RerunVariant::constant_memory) ||
                                   fact.variant == name_of(RerunVariant::eager));
  if (made_no_difference) return 4;
  if (fact.kind >= copies_clean && fact.kind <= finite_after_update) return 1;
  if (fact.kind >= rerun_not_completed && fact.kind <= rerun_clean) return 1;
  if (fact.kind == unseen_before) return 2;
  if (fact.kind >= kernel_not_executed && fact.kind <= no_kernel_reference) return 2;
  if (fact.kind <= loss_bad_gradients_finite) return 0;
  if (fact.kind <= further_weights_bad) return 2;
  if (fact.kind <= did_not_climb) return 3;
  if (fact.kind >= learning_rate && fact.kind <= gradient_maxima) return 3;
  return fact.kind >= order_not_observed && fact.kind <= missing_largest ? 5 : 4;
}

}  // namespace nanlocator::inline report_room
