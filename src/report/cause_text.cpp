#include "report/cause_text.hpp"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <string_view>

#include "files/text.hpp"
#include "nanlocator/report/sentences.hpp"
#include "nanlocator/scan/dtype.hpp"
#include "nanlocator/verdict/cause_table.hpp"
#include "record/operator_name.hpp"
#include "report/orders.hpp"
#include "report/places.hpp"
#include "report/words.hpp"
#include "verdict/unordered_facts.hpp"

namespace nanlocator::inline report_room {
namespace {

std::string title_of(Detail detail) {
  switch (detail) {
    case Detail::none:
      return "";
    case Detail::sqrt_of_negative:
      return "square root of a negative number";
    case Detail::log_of_zero:
      return "logarithm of zero";
    case Detail::log_of_negative:
      return "logarithm of a negative number";
    case Detail::division_by_zero:
      return "division by zero";
    case Detail::zero_over_zero:
      return "zero divided by zero";
    case Detail::power_of_zero:
      return "zero to a negative power";
    case Detail::power_of_negative:
      return "negative number to a fractional power";
    case Detail::outside_domain:
      return "argument outside the function's domain";
    case Detail::derivative_at_pole:
      return "infinite slope: the forward value is finite, its derivative is not";
    case Detail::masked_row:
      return "softmax over a fully masked row";
    case Detail::mean_of_nothing:
      return "mean over no elements";
    case Detail::too_few_elements:
      return "standard deviation of too few elements";
    case Detail::from_infinity:
      return "NaN of an Inf among the inputs";
    case Detail::made_earlier:
      return "made in a part of the program that is not executed again";
    case Detail::rewritten:
      return "data whose memory was written again while the step ran";
    case Detail::unrecorded:
      return "data, or what the program computed before the model's first call";
    case Detail::exceeds_range:
      return "overflow";
    case Detail::custom_code:
      return "custom operator makes NaN or Inf from finite inputs";
  }
  return "";
}

std::string title_of(Cause cause) {
  switch (cause) {
    case Cause::bad_weight:
      return "weight that was bad before the step";
    case Cause::bad_buffer:
      return "buffer that was bad before the step";
    case Cause::bad_input:
      return "bad data";
    case Cause::empty_loss_mask:
      return "mean over nothing in the loss: no valid label, or an empty batch";
    case Cause::operator_overflow:
      return "overflow";
    case Cause::operator_undefined:
      return "result not defined for these inputs";
    case Cause::operator_bug:
      return "kernel that computes wrong values";
    case Cause::kernel_bug:
      return "kernel with a bug";
    case Cause::uninitialised_memory:
      return "memory that was read before anything was written to it";
    case Cause::compiled_region:
      return "compiled code that computes other values than its operators";
    case Cause::memory_corruption:
      return "memory that changed though no operator wrote to it";
    case Cause::not_reproduced:
      return "not known: it did not recur in the re-run";
    case Cause::race:
      return "race: memory that something else uses at that time, and nobody waits for it";
    case Cause::collective_result:
      return "collective that returns wrong values";
    case Cause::collective_sum:
      return "sum over ranks that overflows";
    case Cause::pipeline_transfer:
      return "sent finite, received bad";
    case Cause::recompute_mismatch:
      return "recomputed forward that differs from the first";
    case Cause::optimizer_update:
      return "optimizer update that makes the weight bad";
    case Cause::optimizer_state:
      return "bad optimizer state";
    case Cause::left_gradients:
      return "gradients that an earlier step left behind";
    case Cause::divergence:
      return "divergence: gradients that climbed over steps until they overflowed";
    case Cause::user_hook:
      return "the user's own hook";
    case Cause::bad_scalar:
      return "NaN or Inf that the program passes as a number";
    case Cause::loss_scale:
      return "routine overflow of the loss scale";
    case Cause::unknown:
      return "not visible at this level";
  }
  return "";
}

std::string name_of_owner(Owner owner) {
  switch (owner) {
    case Owner::unknown:
      return "open until the cause is known";
    case Owner::model_author:
      return "model author";
    case Owner::data:
      return "whoever prepares the data";
    case Owner::cluster_operator:
      return "cluster operator";
    case Owner::framework:
      return "framework (its communication and buffer code)";
    case Owner::vendor:
      return "author of the kernel or operator";
    case Owner::nobody:
      return "nobody: nothing is to be done";
  }
  return "";
}

std::string suspect_text(Suspect suspect, const Origin& origin) {
  const std::string on = origin.candidates.empty() ? "" : " of " + ranks_text(origin.candidates);
  switch (suspect) {
    case Suspect::link:
      return "a link";
    case Suspect::memory:
      return "the memory" + (origin.candidates.size() > 4 ? "" : on);
    case Suspect::gather:
      return "a gather of its weights";
    case Suspect::early_reuse:
      return "code that overwrites a buffer before the transfer has ended";
    case Suspect::collective:
      return "the collective's own code";
    case Suspect::kernel:
      return has_fact(origin.facts, FactKind::rerun_identical)
                 ? "an out-of-bounds kernel"
                 : "an out-of-bounds or non-deterministic kernel";
    case Suspect::race:
      return "a race";
    case Suspect::checkpoint:
      return "the checkpoint";
    case Suspect::initialisation:
      return "the code that initialises it";
    case Suspect::last_update:
      return "the update of the step before";
    case Suspect::writer:
      if (origin.cause == Cause::memory_corruption) {
        return "code that writes to it without PyTorch's operators";
      }
      return origin.phase == Phase::grad_reduced || origin.phase == Phase::grad_norm
                 ? "code that writes to it after the reduction"
                 : "code that writes to it between steps";
    case Suspect::upstream:
      return "what made the inputs so large";
    case Suspect::mathematics:
      return "inputs for which its result is not defined";
    case Suspect::hook:
      return "a hook";
  }
  return "";
}

std::string collective_again_text(const Origin& origin) {
  if (const Fact* const differs = find_fact(origin.facts, FactKind::members_got_other_values)) {
    return "compare what " + differs->op + " of group " + differs->group + " gives " +
           ranks_text(differs->ranks) + " and " + ranks_text(differs->peers) +
           " for the same values: in the re-run, too, it gave them different ones";
  }
  return "execute the collective on the same values alone: it failed again on finite inputs";
}

/// A negative argument of a root or a logarithm that no rounding explains.
bool is_far_below_zero(const Origin& origin) {
  constexpr double kRounded = -0.01;
  const bool is_of_sign =
      origin.detail == Detail::sqrt_of_negative || origin.detail == Detail::log_of_negative;
  const Fact* const fact = find_fact(origin.facts, FactKind::values_at_first_bad);
  return is_of_sign && fact != nullptr && !fact->values.empty() &&
         fact->values.front().second < kRounded;
}

/// "log" of "aten::special_log_.out", "scale" of "my_library::scale.out".
std::string name_in_code(const std::string& op) {
  if (op.starts_with("aten::")) return std::string(function_of(op));
  std::string name = op.substr(op.rfind(':') + 1);
  name.resize(std::min(name.find('.'), name.size()));
  while (name.ends_with('_')) name.pop_back();
  return name;
}

/// A square root whose derivative is infinite, so that its argument is 0.
bool is_root_of_zero(const Origin& origin) {
  return origin.detail == Detail::derivative_at_pole && function_of(origin.forward_op) == "sqrt";
}

}  // namespace

bool is_conversion(const Origin& origin) {
  return origin.op.starts_with("aten::_to_copy") || origin.op.starts_with("aten::copy_");
}

std::string first_bad_call_of(const Origin& origin) {
  const Fact* const fact = find_fact(origin.facts, FactKind::values_at_first_bad);
  if (fact == nullptr) return "";
  std::vector<std::string> parts;
  for (const auto& [name, value] : fact->values) parts.push_back(short_number(value));
  if (!parts.empty() && is_root_of_zero(origin)) return "torch.sqrt(0)";
  const bool is_division = function_of(origin.op) == "div";
  if (is_division && parts.size() == 2) return parts[0] + " / " + parts[1];
  return parts.empty() ? "" : function_name_of(origin.op) + "(" + joined(parts, ", ") + ")";
}

std::vector<std::string> argument_names_of(const Origin& origin) {
  constexpr std::size_t kLongestName = 60;
  const Fact* const fact = find_fact(origin.facts, FactKind::values_at_first_bad);
  const bool is_of_line = origin.code && origin.code->expression &&
                          origin.custom_function.empty() && origin.direction != Direction::backward;
  if (fact == nullptr || !is_of_line) return {};
  const Expression& call = *origin.code->expression;
  if (name_in_code(origin.op) != name_in_code(call.call)) return {};
  if (fact->values.empty() || fact->values.size() > call.arguments.size()) return {};
  // The first argument may have no value: what an operator in place has overwritten.
  const Fact* const first = find_fact(origin.facts, FactKind::input);
  const bool begins_later =
      first != nullptr && first->operand && first->operand->name != fact->values.front().first;
  if (begins_later) return {};
  std::vector<std::string> names(call.arguments.begin(),
                                 call.arguments.begin() + std::ssize(fact->values));
  const bool are_short = std::ranges::all_of(
      names, [](const std::string& name) { return !name.empty() && name.size() <= kLongestName; });
  return are_short ? names : std::vector<std::string>{};
}

namespace {

/// "rank 3 = a17:GPU3"; of several only the ranks.
std::string suspects_of(const Origin& origin) {
  const bool is_known =
      origin.coordinates && !origin.coordinates->host.empty() && origin.coordinates->world_size > 1;
  return is_known ? rank_place_of(*origin.coordinates) : ranks_text(origin.candidates);
}

std::string dtype_of(const Origin& origin) {
  return origin.tensor ? origin.tensor->dtype : "the dtype";
}

std::string module_of(const Origin& origin) {
  return origin.module.empty() ? "the operator" : "module " + origin.module;
}

/// The forward's operator, because the code to change for a fault in backward is in forward.
std::string forward_operation_of(const Origin& origin) {
  if (origin.forward_op.empty() || !origin.custom_function.empty()) return operation_of(origin);
  return function_name_of(origin.forward_op);
}

std::string where_in_bundle(const Origin& origin) {
  return origin.bundle.empty() ? "" : " (the inputs are in the bundle)";
}

std::string with_operands(const Origin& origin) {
  if (origin.detail == Detail::masked_row) return "";  // one element says nothing of its row
  const std::string call = argument_names_of(origin).empty() ? first_bad_call_of(origin) : "";
  return call.empty() ? "" : " (here " + call + ")";  // the source line's names say it, too
}

/// " (|self| <= 5.8e+20, |mat2| <= 6.1e+20)": the floating-point inputs.
std::string magnitudes_of(const Origin& origin) {
  std::vector<std::string> parts;
  for (const Fact& fact : origin.facts) {
    const bool is_known = fact.kind == FactKind::input && fact.operand && fact.operand->stats &&
                          fact.operand->stats->has_finite();
    if (is_known && fact.operand->dtype.find("float") != std::string::npos) {
      parts.push_back(fact.operand->name + " up to " + short_number(fact.operand->stats->absmax));
    }
  }
  return parts.empty() ? "" : " (" + joined(parts, ", ") + ")";
}

/// The zero operand, by its name in the source line or else by the operation's.
std::string zero_of(const Origin& origin) {
  const auto names = argument_names_of(origin);
  const bool is_divisor =
      origin.detail == Detail::division_by_zero || origin.detail == Detail::zero_over_zero;
  if (is_divisor && names.size() == 2) return names[1] + " zero";
  if (origin.detail == Detail::log_of_zero && !names.empty()) return names[0] + " zero";
  switch (origin.detail) {
    case Detail::division_by_zero:
    case Detail::zero_over_zero:
      return "the divisor zero";
    case Detail::log_of_zero:
      return function_of(origin.op) == "_linalg_slogdet" ? "the determinant zero"
                                                         : "the argument zero";
    case Detail::power_of_zero:
      return "the base zero";
    default:
      return "it zero";
  }
}

std::vector<int> ranks_of_fact(const Origin& origin, FactKind kind, bool peers = false) {
  const Fact* const fact = find_fact(origin.facts, kind);
  if (fact == nullptr) return {};
  return peers ? fact->peers : fact->ranks;
}

std::string ranks_or(const std::vector<int>& ranks, const char* otherwise) {
  return ranks.empty() ? otherwise : ranks_text(ranks);
}

/// " (the weight x: 3e+24 now, 0.11 in step 11)": the maxima, to compare with the step before.
std::string maxima_before_of(const Origin& origin) {
  for (const FactKind kind : {FactKind::weight_maxima, FactKind::gradient_maxima}) {
    const Fact* const fact = find_fact(origin.facts, kind);
    if (fact == nullptr || fact->values.empty()) continue;
    const auto& [step, value] = fact->values.back();
    const bool is_weight = kind == FactKind::weight_maxima;
    std::string text = " (the largest " + std::string(is_weight ? "weight" : "gradient") + " of " +
                       fact->parameter + " was " + short_number(value) + " in step " + step;
    if (fact->value) text += " and is " + short_number(*fact->value) + " now";
    return text + ")";
  }
  return "";
}

/// Of the inputs now, and of the largest before.
std::string sizes_of(const Origin& origin) {
  const std::string now = magnitudes_of(origin), before = maxima_before_of(origin);
  if (now.empty() || before.empty()) return now + before;
  return now.substr(0, now.size() - 1) + "; " + before.substr(2);
}

/// A module that is no part of a watched model has its class's name.
bool is_class_name(const std::string& module) {
  return std::isupper(static_cast<unsigned char>(module.front())) != 0 &&
         module.find('.') == module.npos;
}

/// A number at which the function has a value and a slope.
const char* safe_argument_of(const Origin& origin) {
  const std::string_view name =
      function_of(origin.forward_op.empty() ? origin.op : origin.forward_op);
  if (name == "acos" || name == "asin" || name == "atanh" || name == "erfinv") return "0";
  if (name == "logit" || name == "ndtri") return "0.5";
  return name == "acosh" ? "2" : "1";
}

/// " (60 now)"; "" if it is not known.
std::string learning_rate_of(const Origin& origin) {
  const Fact* const rate = find_fact(origin.facts, FactKind::learning_rate);
  return rate == nullptr ? "" : " (" + short_number(rate->value.value_or(0)) + " now)";
}

/// Where the weights have grown, first of all.
std::vector<std::string> with_learning_rate(const Origin& origin, std::vector<std::string> steps) {
  const std::string rate = learning_rate_of(origin);
  if (!rate.empty() && may_be_of_large_weights(origin)) {
    steps.insert(steps.begin(), "if the learning rate" + rate +
                                    " is larger than intended, lower it or lengthen its warm-up; "
                                    "else:");
  }
  return steps;
}

std::vector<std::string> widen_steps(const Origin& origin) {
  const std::string large = " so large" + sizes_of(origin);
  if (is_conversion(origin)) {
    const auto largest = largest_finite(dtype_of(origin));
    const Fact* const input = find_fact(origin.facts, FactKind::input);
    const bool is_number = origin.tensor && origin.tensor->shape.empty();
    if (largest && is_number && input != nullptr && input->operand && input->operand->stats) {
      return {short_number(input->operand->stats->absmax) + " is too large for " +
              dtype_of(origin) + ", whose largest number is " + number_text(*largest, 6) +
              ": make it smaller, or compute this part in fp32"};
    }
    return {"find what makes the values that are converted to " + dtype_of(origin) +
                (largest ? ", whose largest number is " + short_number(*largest) + "," : "") +
                large,
            "if values this large are intended, leave them in fp32"};
  }
  std::vector<std::string> steps = {"find what makes the inputs of " + operation_of(origin) +
                                    large};
  std::string widen = "if values this large are intended, run " + module_of(origin) + " in fp32";
  if (origin.tensor && origin.tensor->dtype == "float16" && !origin.module.empty()) {
    widen += "; under autocast: nanlocator.transformers.no_autocast(" +
             (is_class_name(origin.module) ? "the " + origin.module
                                           : "model.get_submodule(\"" + origin.module + "\")") +
             ")";
  }
  steps.push_back(std::move(widen));
  return steps;
}

std::string begin_of_climb(const Origin& origin) {
  const Fact* const climb = find_fact(origin.facts, FactKind::climbed);
  return climb != nullptr && climb->step ? counted(*climb->step) : "the start of the climb";
}

std::string hook_of(const Origin& origin) {
  return origin.code ? "the hook at " + code_text(*origin.code)
                     : "the hook that is registered on this tensor";
}

std::string microbatch_text(const Origin& origin) {
  return origin.microbatch ? " of microbatch " + std::to_string(*origin.microbatch) : "";
}

std::string level_up_text(const Origin& origin) {
  const std::string ranks = suspects_of(origin);
  return "trace the operators of " + ranks + " in " + std::string(name_of(origin.phase)) +
         microbatch_text(origin) +
         (origin.module.empty() ? "" : ", before the output of " + origin.module) +
         ": re-run the step with level operators";
}

std::vector<std::string> stated_steps(const Origin& origin) {
  const Fact* const fact = find_fact(origin.facts, FactKind::stated_action);
  if (fact == nullptr || fact->text.empty()) return {};
  return {fact->text};
}

std::vector<std::string> restore_steps(const Origin& origin) {
  const std::string ranks = suspects_of(origin);
  if (has_fact(origin.facts, FactKind::copies_clean)) {
    const auto damaged = ranks_of_fact(origin, FactKind::copies_clean);
    return {"test the memory and the links of " + ranks_or(damaged, ranks.c_str()) +
            " before using it again: no code writes to one copy of several, except a kernel "
            "that writes out of bounds"};
  }
  if (has_fact(origin.facts, FactKind::written_by_program)) {
    return {"print what the program writes to " + origin.parameter +
                " between steps (p.data, p.copy_), and correct it",
            "go on from a checkpoint in which it is finite"};
  }
  const bool has_copy = has_fact(origin.facts, FactKind::optimizer_copy_finite);
  return {"look for code that writes to the parameter between steps",
          "if there is none, test the memory of " + ranks,
          "restore the parameter from a checkpoint" +
              std::string(has_copy ? ", or from the optimizer's own copy as it was before this "
                                     "step's update"
                                   : "")};
}

/// "aten::add_ wrote it and c10d::allreduce_ read it".
std::string writer_of(const Origin& origin) {
  const Fact* const fact = find_fact(origin.facts, FactKind::finite_when_written);
  if (fact == nullptr) return "its last write and the first read of it";
  return "the write of " + fact->writer + " and the read of " + fact->op;
}

/// "1e-8 is 0 in float16": a number on the line of the program that its dtype rounds away; "" for
/// none.
std::string rounded_away_of(const Origin& origin) {
  if (!origin.tensor || !origin.code) return "";
  const std::string& dtype = origin.tensor->dtype;
  const bool is_half = dtype == "float16";
  if (!is_half && dtype != "bfloat16") return "";
  const double none = is_half ? 0x1p-25 : 0;            // half of the smallest number
  const double below_one = is_half ? 0x1p-12 : 0x1p-9;  // half of a step
  const std::string_view text = origin.code->text;
  constexpr std::string_view kOfNumber = "0123456789.", kDigits = "0123456789";
  for (std::size_t e = text.find("e-"); e != text.npos; e = text.find("e-", e + 1)) {
    const std::size_t before = text.substr(0, e).find_last_not_of(kOfNumber);
    const std::size_t begin = before == text.npos ? 0 : before + 1;
    const std::size_t end = std::min(text.find_first_not_of(kDigits, e + 2), text.size());
    const std::string number(text.substr(begin, end - begin));
    const double value = std::strtod(number.c_str(), nullptr);
    if (begin == e || !(value > 0)) continue;
    if (value <= none) return number + " is 0 in " + dtype;
    std::string_view left = text.substr(0, begin);
    while (left.ends_with(' ')) left.remove_suffix(1);
    const bool is_difference = left.ends_with("1 -") || left.ends_with("1-");
    if (is_difference && value < below_one) return "1 - " + number + " is 1 in " + dtype;
  }
  return "";
}

/// Of a division whose result is too large for its dtype.
std::optional<double> tiny_divisor_of(const Origin& origin) {
  constexpr double kTiny = 1e-6;
  const Fact* const fact = find_fact(origin.facts, FactKind::values_at_first_bad);
  const bool is_division =
      function_of(origin.op) == "div" && fact != nullptr && fact->values.size() == 2;
  if (!is_division) return std::nullopt;
  const double divisor = fact->values.back().second;
  return std::abs(divisor) < kTiny ? std::optional(divisor) : std::nullopt;
}

std::string weight_of(const Origin& origin) {
  for (const FactKind kind : {FactKind::weight_maxima, FactKind::large_weight}) {
    const Fact* const fact = find_fact(origin.facts, kind);
    if (fact != nullptr && !fact->parameter.empty()) return fact->parameter;
  }
  return "the weight";
}

std::vector<std::string> ordering_steps(const Origin& origin, Concurrent other) {
  const Fact* const fact = find_unordered(origin.facts, other);
  const auto place = [](const std::optional<CodeLine>& code, const std::string& op) {
    return code ? code_place(*code) : op;
  };
  const std::string own = fact == nullptr ? "" : place(fact->code, fact->op);
  const std::string others = fact == nullptr ? "" : place(fact->transfer_code, fact->transfer);
  switch (other) {
    case Concurrent::transfer:
      if (fact == nullptr) return {"wait for each transfer before its memory is used"};
      return {"wait for " + fact->transfer +
              (fact->transfer_code ? ", begun at " + others + "," : "") + " before " + own +
              (fact->kind == FactKind::wrote_during_transfer ? " writes to its memory"
                                                             : " reads what it brings")};
    case Concurrent::thread:
      if (fact == nullptr) return {"wait for the thread before its memory is used"};
      return {"let the step and the thread take turns: an event, a queue or a join between " +
                  others + " (in the thread) and " + own,
              "or give the thread memory that the step does not use"};
    case Concurrent::stream:
      if (fact == nullptr) return {"let the streams wait for each other"};
      return {"let the stream of " + own + " wait for that of " + others +
                  " (wait_stream, or an event), and record_stream memory that both use",
              "run with TORCH_CUDA_SANITIZER=1 to see both accesses with their stacks"};
  }
  return {};
}

/// Whether all labels equal ignore_index.
const char* ignored_of(const Origin& origin) {
  const bool are_ignored = std::ranges::any_of(origin.facts, [](const Fact& fact) {
    return fact.operand && fact.operand->ignored && fact.operand->stats &&
           *fact.operand->ignored == fact.operand->stats->numel;
  });
  return are_ignored ? ": all of them equal ignore_index"
                     : " (all masked or ignored?), or why what is averaged is empty";
}

}  // namespace

std::string operation_of(const Origin& origin) {
  if (!origin.custom_function.empty()) {
    return origin.custom_function;
  }
  if (origin.op.empty())
    return origin.module.empty() ? "this operation" : "module " + origin.module;
  return function_name_of(origin.op);
}

/// The title by the conclusion of the kernel's replay; "" without one.
std::string title_of_kernel(const Origin& origin) {
  const Fact* const fact = find_fact(origin.facts, FactKind::kernel_replayed);
  const auto conclusion =
      fact == nullptr ? std::nullopt : value_named<KernelConclusion>(fact->conclusion);
  switch (conclusion.value_or(KernelConclusion::not_replayed)) {
    case KernelConclusion::leaves_unwritten:
      return "kernel that leaves part of its output unwritten";
    case KernelConclusion::reads_unwritten:
      return "kernel that reads memory that it has not written";
    case KernelConclusion::reads_outside:
      return "kernel that reads outside of its arguments";
    case KernelConclusion::writes_outside:
      return "kernel that writes outside of its arguments";
    case KernelConclusion::wrong_values:
      return "kernel that computes wrong values";
    default:
      return "";
  }
}

std::string title_of(const Origin& origin) {
  if (origin.cause == Cause::kernel_bug) {
    if (auto title = title_of_kernel(origin); !title.empty()) return title;
  }
  const bool has_own_title =
      origin.cause == Cause::operator_undefined ||
      (origin.cause == Cause::operator_bug && origin.detail == Detail::custom_code) ||
      (origin.cause == Cause::unknown && origin.detail != Detail::none) ||
      origin.detail == Detail::made_earlier || origin.detail == Detail::rewritten ||
      origin.detail == Detail::unrecorded;
  std::string title = has_own_title ? title_of(origin.detail) : "";
  if (has_fact(origin.facts, FactKind::not_seen_on_arrival)) {
    title = "bad after a reduction of finite values";
  } else if (origin.cause == Cause::collective_result &&
             has_fact(origin.facts, FactKind::happened_once)) {
    title = "collective that returned wrong values, once";
  }
  if (title.empty() && origin.cause == Cause::bad_buffer && origin.parameter.empty()) {
    title = "tensor of a module that was bad before the step";
  }
  if (title.empty()) title = title_of(origin.cause);
  const bool is_made_there =
      origin.cause == Cause::operator_undefined || origin.cause == Cause::operator_overflow ||
      origin.cause == Cause::operator_bug;  // for a bad weight, the operator only read it
  return origin.custom_function.empty() || !is_made_there
             ? title
             : title + ", in the code of " + origin.custom_function;
}

std::string suspects_text(const Origin& origin) {
  std::vector<std::string> open;
  for (const Suspect suspect : origin.alternatives) open.push_back(suspect_text(suspect, origin));
  return joined(open, " or ");
}

std::string certainty_of(const Origin& origin) {
  const bool is_open = origin.cause_confidence == Confidence::low;
  const std::string place = "place " + std::string(name_of(origin.place_confidence));
  const std::string cause = is_open ? "open" : std::string(name_of(origin.cause_confidence));
  std::vector<std::string> open;
  for (const Suspect suspect : origin.alternatives) open.push_back(suspect_text(suspect, origin));
  if (open.empty() || is_open) {
    return place + ", cause " + cause + (open.empty() ? "" : ": " + joined(open, " or "));
  }
  // The mechanism is known, its root cause is not.
  return place + ", mechanism " + cause + "; root cause open: " + joined(open, " or ");
}

std::string owner_of(const Origin& origin) {
  if (origin.action == Action::compare_peers) {
    return "model author first; cluster operator if the tensor-parallel peers, given the same "
           "tensor, have no zero there";
  }
  if (origin.action == Action::test_transfer || origin.action == Action::test_links) {
    return "cluster operator if the network check fails or it happens here again; else the author "
           "of the communication code";
  }
  if (origin.action == Action::test_device) {
    return "cluster operator if the device counts errors or it happens here again; else the author "
           "of the kernels";
  }
  if (origin.action == Action::guard_empty_loss) {
    return "model author, or whoever prepares the data";
  }
  if (has_fact(origin.facts, FactKind::bad_at_start)) return name_of_owner(origin.owner);
  if (origin.action == Action::check_checkpoint) {
    return "model author if the checkpoint holds it or an update makes it; else cluster operator";
  }
  const bool is_weights =
      origin.action == Action::restore_copy || origin.action == Action::find_weight_writer;
  if (is_weights && origin.owner == Owner::unknown) {
    return "model author if code writes to the weight between steps; else cluster operator";
  }
  return name_of_owner(origin.owner);
}

std::string refutation_of(const Origin& origin) {
  switch (origin.refutation) {
    case Refutation::finite_checkpoint:
      return "the same parameter finite in the checkpoint and after the update of the step before";
    case Refutation::finite_buffer:
      return "the buffer finite at the end of the step before: then something wrote it in between";
    case Refutation::finite_after_write:
      return "it finite right after that line: then something else wrote it since";
    case Refutation::finite_samples:
      return "the same samples finite when they are read again: then they were damaged on the way";
    case Refutation::valid_label:
      return "the same batch with a finite loss in a re-run, or a valid label in it";
    case Refutation::finite_call:
      return "the call executed from its bundle stays finite, or is not finite in float64 either";
    case Refutation::finite_in_float64:
      return "the call executed from its bundle in float64 comes out finite";
    case Refutation::bad_in_float64:
      return "the call on the same inputs not finite in another implementation, or in float64";
    case Refutation::kernel_contract:
      return "its documentation leaving this memory to the caller: elements that it need not "
             "write, or reads and writes beside its arguments";
    case Refutation::bad_with_written_memory:
      return "the fault again with that memory set to zero where it is allocated";
    case Refutation::bad_when_eager:
      return "the fault again without torch.compile";
    case Refutation::unseen_writer:
      return "a kernel off the dispatcher that writes to this memory, or the same bad element in a "
             "re-run of the step";
    case Refutation::bad_in_further_rerun:
      return "the same element bad in a further re-run with the same data, weights and random "
             "numbers: then it is not the machine";
    case Refutation::bad_when_serialised:
      return "the fault again with every transfer between ranks and every operator on a GPU waited "
             "for "
             "at once";
    case Refutation::bad_in_either_order:
      return "the same outcome whichever of the two lines runs first";
    case Refutation::bad_part:
      return "a member's part that was not finite when the collective read it: it was written "
             "between the scan and the transfer";
    case Refutation::sum_in_range:
      return "the sum of the members' parts finite in float64 and within the range of the dtype: "
             "then the collective is at fault";
    case Refutation::sender_changed:
      return "the sender's buffer changed between the scan and the transfer (freed or written too "
             "early): then the program is at fault, not the link";
    case Refutation::bad_first_forward:
      return "the first forward not finite at the same place";
    case Refutation::bad_state_before:
      return "a state of the optimizer (a second moment, a master weight) bad before the step";
    case Refutation::finite_state_before:
      return "the same state finite at the end of the step before: then something wrote it since";
    case Refutation::no_growth:
      return "the maxima of the steps before not growing when the run is repeated from the last "
             "checkpoint";
    case Refutation::bad_before_hook:
      return "the gradient bad before the hook ran";
    case Refutation::finite_scalar:
      return "a finite number printed at that line in this step";
    case Refutation::overflow_at_smallest_scale:
      return "the same overflow again at the smallest loss scale";
    case Refutation::unwatched_receipt:
      return std::string("something bad that ") +
             (origin.candidates.size() == 1 ? "this rank" : "these ranks") +
             " received before it, by a way that is not watched (docs/causes.md lists them)";
    case Refutation::earlier_in_step:
      return "a bad activation or loss of an earlier place in the same step, which gradients alone "
             "do not show: level boundaries or a re-run would";
    case Refutation::earlier_phase:
      return "a bad value in an earlier phase of the step that was not scanned";
  }
  return "";
}

std::string with_checked_updates(const std::string& checkpoint) {
  return "run from " + checkpoint +
         " with NANLOCATOR_CHECK_PARAMS=1 and NANLOCATOR_LEVEL=operators, which find the step and "
         "the line "
         "of the update that makes it bad";
}

std::string bad_samples_of(const Origin& origin) {
  const Fact* const samples = find_fact(origin.facts, FactKind::samples);
  return samples == nullptr ? "" : samples->text;
}

std::vector<std::string> steps_text(const Origin& origin) {
  const std::string ranks = suspects_of(origin);
  const std::string operation = forward_operation_of(origin);
  switch (origin.action) {
    case Action::none:
      return {};
    case Action::stated:
      return stated_steps(origin);
    case Action::wait:
      return {
          "none: the scaler leaves the step out and lowers its scale; look again where that "
          "happens step after step"};
    case Action::restore_copy:
      return restore_steps(origin);
    case Action::check_owner_of_shard:
      return {"check the optimizer's state on " + ranks,
              "check its part of the parameter in the checkpoint that was loaded, or how it was "
              "initialised",
              "if both are finite, test the memory of " + ranks};
    case Action::reset_optimizer_state:
      return {"look at the optimizer's state (moments) of the parameters in the checkpoint",
              "if it is bad there, too, load an older one, or reset the state of these parameters"};
    case Action::clear_gradients: {
      const Fact* const left = find_fact(origin.facts, FactKind::gradients_left);
      return {
          "call optimizer.zero_grad() before the next backward, also where the error of a bad "
          "step is caught",
          "what made them is in the verdict of step " +
              counted(left == nullptr ? 0 : left->step.value_or(0))};
    }
    case Action::check_checkpoint:
      return {"check " +
                  (origin.parameter.empty() ? std::string("the parameter") : origin.parameter) +
                  " in the checkpoint that was loaded",
              has_fact(origin.facts, FactKind::bad_at_start)
                  ? "if it is finite there, or missing, or none was loaded: look for code that "
                    "leaves it as torch.empty made it, or loads into it with strict=False"
              : has_fact(origin.facts, FactKind::loaded_last)
                  ? "if it is finite there, print the parameter after the load"
                  : "if it is finite there, " + with_checked_updates("it")};
    case Action::check_buffer:
      if (origin.detail == Detail::made_earlier) {
        return {"print what this line is given, and correct it or that"};
      }
      if (!origin.parameter.empty()) {
        return {"check " + origin.parameter + " in the checkpoint that was loaded",
                "if it is finite there, look at what computes it"};
      }
      return {
          "look at what computes this tensor: it was made before the step and kept (a cache, a "
          "closure, a global)"};
    case Action::inspect_samples: {
      if (origin.detail == Detail::rewritten) {
        return {
            "look for what fills this memory (a loader's thread, a host copy): the step must "
            "wait until it is filled, and it must wait until the step has read it",
            "if both wait, inspect the samples of this batch"};
      }
      if (origin.detail == Detail::unrecorded) {
        return {
            "print this tensor where the program makes it: in its first step, only what follows "
            "the "
            "first call of the model is recorded",
            "for the operator that made it: call nanlocator.watch(model, optimizer) before the "
            "loop"};
      }
      const std::string samples = bad_samples_of(origin);
      return {
          "inspect " + (samples.empty() ? "the samples of this batch" : samples) +
              (origin.bundle.empty() ? "" : "; the tensor is in the bundle"),
          "if that is finite where it is stored, inspect the code that prepares it where nothing "
          "is recorded: a Dataset, a transform, numpy, another thread"};
    }
    case Action::guard_empty_loss:
      return {"find why no label of this batch counts" + std::string(ignored_of(origin)),
              "where that may happen, the model author: sum the losses, divide by max(count, 1)"};
    case Action::find_weight_writer:
      return {"find what wrote to " + weight_of(origin) + " since the step before" +
                  maxima_before_of(origin) + ": no update makes such a jump",
              "if no code does, test the memory of " + ranks,
              "go on from a checkpoint in which it is as it was"};
    case Action::widen_or_scale:
      return with_learning_rate(origin, widen_steps(origin));
    case Action::scale_inputs:
      if (const Fact* const weight = find_fact(origin.facts, FactKind::large_weight)) {
        return {"find what made " + weight->parameter + " so large (" +
                    short_number(weight->value.value_or(0)) + "): the learning rate" +
                    learning_rate_of(origin) + ", or code that writes weights",
                "then the inputs of " + operation + magnitudes_of(origin)};
      }
      if (const auto divisor = tiny_divisor_of(origin)) {
        return {"find what makes the divisor of " + operation + " so small (" +
                    short_number(*divisor) + ")",
                "if it may be, divide logarithms (x.log() - y.log()) or add an epsilon to it"};
      }
      return with_learning_rate(
          origin,
          {"find what makes the inputs of " + operation + " so large" + sizes_of(origin),
           operation == "torch.exp"
               ? "if values this large may occur, clamp them below 88.7, where torch.exp leaves "
                 "the range of " +
                     dtype_of(origin)
               : "if values this large are intended, scale them down: the largest " +
                     dtype_of(origin) + " is 3.4e38"});
    case Action::compare_peers:
      return {"compare the input of " + operation + with_operands(origin) +
                  " with that of the tensor-parallel peers: a zero on one rank alone comes from "
                  "what produced or reduced it",
              "do not add an epsilon before that: it would hide the fault"};
    case Action::correct_expression:
      if (is_far_below_zero(origin)) {  // no rounding
        return {"correct what makes the argument of " + operation + ": it is outside the domain" +
                with_operands(origin) + "; an epsilon will not help"};
      }
      return {
          "correct what makes the argument of " + operation + ": it is outside the domain" +
              with_operands(origin) + "; an epsilon will not help",
          origin.detail == Detail::outside_domain
              ? "where it may legitimately reach the edge of the domain, clamp it to a little "
                "inside: "
                "at the edge the result or its slope is infinite"
              : "clamp it to a small positive number only where rounding may bring it to zero or "
                "just below: at exactly zero the slope is infinite"};
    case Action::find_source_of_zero:
      if (origin.detail == Detail::mean_of_nothing) {
        return {
            "find what left no element for " + operation,
            "where that is legal (an image without objects, a mask that selects nothing), leave "
            "this term out, or divide the sum by max(count, 1)"};
      }
      if (const std::string rounded = rounded_away_of(origin); !rounded.empty()) {
        return {rounded + ", so it keeps no zero away from " + operation + with_operands(origin),
                "write a larger one, or compute this line in float32"};
      }
      return {"find what made " + zero_of(origin) + with_operands(origin),
              "if a zero may occur there, replace it before " + operation +
                  (origin.cause == Cause::optimizer_update
                       ? ""
                       : " (torch.where after it still gives NaN in backward)") +
                  "; if it may not, do not clamp it: that would hide the fault"};
    case Action::choose_before: {
      const auto names = argument_names_of(origin);
      const std::string argument = names.empty() ? "x" : names.front();
      const std::string replaced =
          "before " + operation + (origin.phase == Phase::backward ? "" : with_operands(origin)) +
          ": torch.where(keep, " + argument + ", " + safe_argument_of(origin) + ") instead of " +
          argument + ", where keep is false for ";
      const std::string unhelpful =
          "torch.where or a mask after it does not help: its derivative multiplies by zero, and "
          "zero times NaN or Inf is NaN";
      const bool may_be_used = origin.tensor && origin.tensor->nan == 0;  // 1 / Inf is 0
      if (!may_be_used) {
        return {"replace such values " + replaced + "what the loss leaves out", unhelpful};
      }
      return {"if the loss leaves such values out (torch.where, a mask), replace such values " +
                  replaced + "those; " + unhelpful,
              "if it uses them (dividing by Inf gives 0), find what made " + argument +
                  " so, or bound it before " + operation};
    }
    case Action::guard_slope:  // the operands are those of the backward operator
      return {"the slope of " + operation + " is infinite at " +
                  (is_root_of_zero(origin) ? "0" : "this input") + where_in_bundle(origin) +
                  (first_bad_call_of(origin).empty() || is_root_of_zero(origin)
                       ? ""
                       : "; its derivative computed " + first_bad_call_of(origin)),
              "if the input is legitimate, keep it away from there in forward (clamp it, or add an "
              "epsilon inside); if not, find what made it"};
    case Action::guard_masked_row:
      return {"check the mask of this batch: the softmax of a fully masked row is undefined",
              "leave such rows out, or unmask one position"};
    case Action::keep_infinity_out:
      return {"0 times Inf, Inf minus Inf and Inf over Inf are NaN" + with_operands(origin) +
                  ": keep the Inf out of " + operation,
              "where a mask writes it, write torch.finfo(dtype).min in its place, or select the "
              "masked elements out before " +
                  operation};
    case Action::guard_deviation:
      return {"a standard deviation of one element is 0 over 0: skip " + operation +
                  ", and what divides by it, where fewer than two elements remain",
              "if there should have been more elements, look at the batch"};
    case Action::correct_custom_code:
      return {"correct " + operation + ": it makes NaN or Inf from finite inputs" +
                  with_operands(origin),
              "its author can run the bundle alone: the replay command with --export-python FILE"};
    case Action::inspect_undefined:
      if (has_fact(origin.facts, FactKind::made_from_inf)) {
        return {"find where the Inf among the inputs of " + operation + " is from" +
                with_operands(origin) + where_in_bundle(origin)};
      }
      return {"look at the inputs of " + operation + with_operands(origin) +
              where_in_bundle(origin) + ": they are finite, and its result is not"};
    case Action::report_kernel:
      return {
          "send the kernel's authors the bundle as a script: the replay command with "
          "--export-python FILE"};
    case Action::write_memory:
      return {"write every element of that memory before it is read, or allocate it with zeros",
              "if it is a kernel's output, tell its authors which elements stay unwritten"};
    case Action::report_compiler:
      return {"run this part without torch.compile until it is corrected",
              "send the compiler's authors the module and its inputs"};
    case Action::inspect_bundle:
      return {"look at the inputs in the bundle"};
    case Action::inspect_operator:
      if (has_fact(origin.facts, FactKind::came_from_collective)) {
        return {"print what each rank puts into the collective at this line"};
      }
      return {"look at " + operation};
    case Action::check_hook:
      return {"correct " + hook_of(origin)};
    case Action::correct_scalar:
      if (origin.tensor && origin.tensor->nan == 0) {
        return {"where Inf is meant, as a mask: keep what it masks out of the loss",
                "else find what makes the number that " + operation + " is passed"};
      }
      return {"find what makes the number that " + operation +
              " is passed (a weight of the loss, a metric, a division of numpy's)"};
    case Action::compare_executions:
      return {"find what differs between the two executions of " + module_of(origin) +
              ": random numbers, autocast, or state that the first one moved"};
    case Action::test_memory:
      return {"test the memory of " + ranks + " when the device is free",
              "look for a kernel that writes out of bounds"};
    case Action::find_writer:
      return {
          "find what writes to this memory without PyTorch's operators: a kernel, ctypes or "
          "numpy, another thread; it repeats with the same data, as no broken memory does",
          "it was written between " + writer_of(origin)};
    case Action::test_device:
      return {"cluster on-call, beside the restart: read the error counters of the device of " +
                  ranks + " (ECC, NVRM in dmesg); with new errors, replace it",
              "if the fault comes again on another device, look for a race or a kernel that is not "
              "deterministic"};
    case Action::wait_for_transfer:
      return ordering_steps(origin, Concurrent::transfer);
    case Action::wait_for_thread:
      return ordering_steps(origin, Concurrent::thread);
    case Action::wait_for_stream:
      return ordering_steps(origin, Concurrent::stream);
    case Action::find_race:
      if (find_fact(origin.facts, FactKind::control_bad) == nullptr) {
        return {
            "look for a race before the machine: run with CUDA_LAUNCH_BLOCKING=1, then without "
            "overlapped communication or further threads; if it comes only with them, a race",
            "take the device of " + ranks + " out if it fails again without them"};
      }
      return {"look for a race: the fault needs the timing of an untraced run",
              "run with CUDA_LAUNCH_BLOCKING=1, then without overlapped communication; gone in "
              "both: a race"};
    case Action::compare_members:
      return {"look at the ledgers of the other members of the collective"};
    case Action::test_links:
      return {"read the error counters of the device and the links of " + ranks +
                  " (ECC, NVRM in dmesg)",
              "if the network check fails, take that machine out of service; if it passes and this "
              "is found "
              "on " +
                  ranks + " again, suspect the machine first; if on other ranks, the code"};
    case Action::compare_sums:
      return {
          "look at how large the gradient was before the reduction on each member (nanlocator "
          "history)",
          "if their sum exceeds the range of its dtype, it overflowed: scale the gradients; if "
          "not, the collective is at fault"};
    case Action::scale_addends:
      return {
          "scale each member's part before the sum (gradients: divide by the number of ranks "
          "before the reduction, not after it), or sum in float32",
          "if a part this large is not intended (nanlocator history has them), find what made "
          "it"};
    case Action::check_copy:
      return {"check what touches gradients after the reduction on " + ranks};
    case Action::check_collective_code:
      return {collective_again_text(origin),
              "look at its code, its buffers and its dtype before the links"};
    case Action::find_overwrite:
      return {
          "find what reuses the message's buffer before the transfer has ended (it failed "
          "again on finite inputs): freed outputs, a buffer that is written while it is sent"};
    case Action::test_transfer: {
      const std::string sender =
          ranks_or(ranks_of_fact(origin, FactKind::message_changed, true), "the sender");
      return {
          "read the error counters of the link from " + sender + " to " + ranks +
              ", and of the device of " + ranks + " (ECC, NVRM in dmesg)",
          "if these and the network check are clean, or it is found on other ranks, look in the "
          "code for a buffer that is freed or written while " +
              sender + " still sends it, or read on " + ranks + " before it has arrived"};
    }
    case Action::ask_silent_ranks:
      return {"find out what happened to " +
              ranks_or(ranks_of_fact(origin, FactKind::received_from_unknown, true),
                       ranks_or(ranks_of_fact(origin, FactKind::gathered_from_unknown, true),
                                ranks.c_str())
                           .c_str()) +
              " first"};
    case Action::check_update:
      if (origin.detail == Detail::sqrt_of_negative) {
        return {"find what made the optimizer's second moment of this parameter negative" +
                    with_operands(origin) +
                    ": its update adds squares, so the state was bad before this step",
                "check that moment in the checkpoint before you restart from it"};
      }
      if (const Fact* const made = find_fact(origin.facts, FactKind::update_undefined)) {
        if (made->op.empty()) {
          return {
              "look at what the optimizer computes for this parameter: a norm, a bias correction "
              "or an epsilon that is zero",
              "run from before it with NANLOCATOR_CHECK_PARAMS=1 and NANLOCATOR_LEVEL=operators: "
              "it "
              "stops in that update and names its operator and line"};
        }
        if (made->op == "lr") return {"correct what sets the learning rate of this parameter"};
        if (made->dtype != "float16" && made->dtype != "bfloat16") {
          return {"give the optimizer an epsilon above 0 (Adam's default is 1e-8)"};
        }
        return {"give the optimizer an epsilon that " + made->dtype +
                " can hold (Adam's 1e-8 is 0 in float16, 1e-4 is not), or keep its state and the "
                "weights that it updates in float32"};
      }
      return {
          "look at the optimizer's state of this parameter (second moment), its epsilon and "
          "learning rate"};
    case Action::lower_learning_rate:
      return {"look at the data from step " + begin_of_climb(origin) + " on" +
                  (dtype_of(origin) == "float16" ? "; check the loss scale" : ""),
              "lower the learning rate" + learning_rate_of(origin) + " or lengthen its warm-up"};
    case Action::inspect_norm:
      return {
          "look at the history of the gradient norm (nanlocator history)",
          "lower the learning rate" + learning_rate_of(origin) + " or check this layer's scale"};
    case Action::trace_operators:
      return {level_up_text(origin)};
    case Action::inspect_batch:
      return {"look at the batch, the labels and the loss of this step",
              "then at its activations layer by layer"};
    case Action::check_clip:
      return {
          "look for what changes all gradients between backward and the optimizer's step: one "
          "bad gradient makes the norm NaN, and clip_grad_norm_ multiplies all by it. Clip "
          "with the optimizer's clip_grad_norm, which finds the bad one first",
          "if nothing does, look at the first operators of backward, at the loss"};
    case Action::inspect_backward:
      return {
          "look at the operators between the clean parameter and this one on these ranks: "
          "their inputs in this step's backward, and the points where their derivatives are "
          "infinite"};
    case Action::inspect_gradient:
      return {"run this step again from the last checkpoint",
              "if the gradient is clean then, test this device's memory; if it is bad again, look "
              "at the inputs of this weight's gradient"};
    case Action::inspect_unordered:
      return {"look at the operators that compute this gradient, and at their inputs"};
    case Action::inspect_loss:
      return {"look at the labels and the mask of this batch, and at the loss's reduction"};
    case Action::check_after_backward:
      return {"check the loss scale, gradient hooks, and this device's memory"};
  }
  return {};
}

}  // namespace nanlocator::inline report_room
