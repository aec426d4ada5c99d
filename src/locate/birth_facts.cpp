#include "locate/birth_facts.hpp"

#include <algorithm>
#include <array>
#include <cctype>
#include <map>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "locate/detail.hpp"
#include "locate/origin_facts.hpp"
#include "verdict/kernel_facts.hpp"

namespace nanlocator::inline locate_room {
namespace {

/// Inputs of an operator that the evidence lists; the ledger has the rest.
constexpr std::size_t kMostInputs = 4;

const Birth* parent_of(const Ledger& ledger, const Birth& birth) {
  if (!birth.parent || *birth.parent < 0 || *birth.parent >= std::ssize(ledger.births)) {
    return nullptr;
  }
  return &ledger.births[static_cast<std::size_t>(*birth.parent)];
}

/// The earliest ancestor of `birth` that is a fault. An intended infinity is not one; an operator
/// that made NaN from it is.
const Birth& root_of(const Ledger& ledger, const Birth& birth) {
  const Birth* root = &birth;
  // A ledger may come from a file: cyclic parents must not hang the reader.
  for (std::size_t steps = 0; steps < ledger.births.size(); ++steps) {
    const Birth* parent = parent_of(ledger, *root);
    if (parent == nullptr || parent->kind == BirthKind::literal) break;
    root = parent;
  }
  return *root;
}

bool has_reached_a_loss(const Birth& birth) {
  return std::ranges::any_of(
      birth.reached, [](const Reached& reached) { return reached.kind == ReachedKind::loss; });
}

/// True if the elements from which the first bad one was computed are known.
bool has_values(const Birth& birth) {
  return std::ranges::any_of(
      birth.operands, [](const Operand& operand) { return operand.at_first_bad.has_value(); });
}

bool has_value(const Birth& birth, double value) {
  return std::ranges::any_of(birth.operands,
                             [&](const Operand& operand) { return operand.at_first_bad == value; });
}

bool speaks_of(const std::optional<CodeLine>& code, std::span<const std::string_view> words) {
  if (!code) return false;
  std::string text = code->text;
  std::ranges::transform(text, text.begin(), [](unsigned char c) { return std::tolower(c); });
  return std::ranges::any_of(
      words, [&](std::string_view word) { return text.find(word) != std::string::npos; });
}

/// True if the divisor may be a number of labels: an integer, or what a line of the program that
/// speaks of such things divides by.
bool may_be_count(const Birth& birth, const Operand& divisor) {
  constexpr auto kWords =
      std::to_array<std::string_view>({"mask", "valid", "keep", "count", "num", "token", "label",
                                       "ignore", "pad", "weight", "len"});
  return divisor.dtype.find("int") != std::string::npos || !birth.code ||
         speaks_of(birth.code, kWords);
}

/// Within a forward there are other counts: the tokens of an expert. `num_items_in_batch` is that
/// of the losses of transformers (loss/loss_utils.py).
bool is_of_labels(const Birth& birth) {
  constexpr auto kWords = std::to_array<std::string_view>({"label", "ignore_index", "num_items"});
  return speaks_of(birth.code, kWords) || speaks_of(birth.framework_code, kWords);
}

/// True for zero over zero, both of one element, if the divisor was not computed from parameters: a
/// sum by the number of its addends. A divisor that depends on parameters is something else, such
/// as the area of a box.
bool is_mean_of_no_elements(const Birth& birth) {
  const bool is_zero_over_zero =
      birth.sighting.op.starts_with("aten::div") && has_values(birth) &&
      std::ranges::all_of(birth.operands, [](const Operand& operand) {
        return operand.at_first_bad.value_or(operand.number.value_or(0)) == 0;
      });
  if (!is_zero_over_zero || !birth.sighting.shape.empty()) return false;
  const auto divisor = std::ranges::find(birth.operands, "other", &Operand::name);
  return divisor == birth.operands.end() ||
         (divisor->requires_grad != true && may_be_count(birth, *divisor));
}

/// True for a mean over no labels: the loss divides by a count of zero, or torch's own loss counts
/// no label. Not for a mean of what the program has selected: its threshold selects nothing.
bool is_empty_loss(const Birth& birth) {
  const std::string& op = birth.sighting.op;
  // aten/src/ATen/native/LossNLL.cpp: the mean of finite inputs is NaN only if the labels' total
  // weight is zero (all of them ignore_index).
  if (op.starts_with("aten::nll_loss")) return true;
  if (birth.sighting.phase != Phase::loss && !is_of_labels(birth)) return false;
  return is_mean_of_no_elements(birth);
}

/// The class of the autograd Function whose own code produced the value, or the custom operator's
/// dispatcher name, which has a namespace. Compiled regions have none.
std::string custom_code_of(const Birth& birth) {
  if (!birth.custom_function.empty()) return birth.custom_function;
  const bool is_in_custom_operator =
      birth.inside.find("::") != std::string::npos && birth.inside != birth.sighting.op;
  return is_in_custom_operator && !birth.is_custom_operator ? birth.inside : "";
}

Cause cause_of_optimizer_birth(const Birth& birth) {
  // Values that were bad before the update began are the optimizer's state: its moments.
  const bool was_there = birth.kind == BirthKind::data || birth.kind == BirthKind::buffer;
  return was_there ? Cause::optimizer_state : Cause::optimizer_update;
}

/// True if the birth happened only while backward recomputed a forward, and reached no loss: the
/// first execution, from which the loss was computed, was finite.
bool is_of_recomputation_only(const Birth& birth) {
  return birth.sighting.phase == Phase::forward && !birth.node.empty() &&
         !has_reached_a_loss(birth);
}

Cause cause_of_computation(const Birth& birth) {
  if (is_of_recomputation_only(birth)) return Cause::recompute_mismatch;
  if (birth.kind != BirthKind::inf && is_empty_loss(birth)) return Cause::empty_loss_mask;
  switch (birth.replay) {
    case ReplayConclusion::deterministic_overflow:  // large numbers, by which a pole looks the same
      return detail_of(birth) == Detail::outside_domain ? Cause::operator_undefined
                                                        : Cause::operator_overflow;
    case ReplayConclusion::deterministic_undefined:
    case ReplayConclusion::deterministic_custom:
      // Only its author knows the correct result of another library's operator for these inputs.
      return birth.is_custom_operator ? Cause::operator_bug : Cause::operator_undefined;
    case ReplayConclusion::deterministic_kernel:
      return Cause::operator_bug;
    case ReplayConclusion::varies:
      return Cause::not_reproduced;
    case ReplayConclusion::not_replayed:
      break;
  }
  // Without a replay, only the birth's kind is known. Infinity from finite inputs without a zero is
  // an overflow; of NaN it is only known that no input had it.
  if (birth.sighting.op.empty()) return Cause::unknown;
  const bool is_away_from_pole = !has_value(birth, 0) && detail_of(birth) == Detail::none;
  if (birth.kind == BirthKind::inf && has_values(birth) && is_away_from_pole) {
    return Cause::operator_overflow;
  }
  return Cause::unknown;
}

/// The cause that its replay has proven, else `otherwise`.
Cause cause_of_kernel(const Birth& birth, Cause otherwise) {
  if (!birth.kernel_replay) return otherwise;
  switch (birth.kernel_replay->conclusion) {
    case KernelConclusion::wrong_values:
    case KernelConclusion::reads_unwritten:
    case KernelConclusion::reads_outside:
    case KernelConclusion::writes_outside:
      return Cause::kernel_bug;
    case KernelConclusion::leaves_unwritten:
      // Only a reference shows whether these elements should have been written.
      return birth.kernel_replay->is_reference_finite ? Cause::kernel_bug
                                                      : Cause::uninitialised_memory;
    case KernelConclusion::overflows:
      return Cause::operator_overflow;
    case KernelConclusion::undefined:
      return Cause::operator_undefined;
    case KernelConclusion::not_replayed:
    case KernelConclusion::not_bad_again:
    case KernelConclusion::varies:
    case KernelConclusion::given_bad:
    case KernelConclusion::bad_again:
      return otherwise;
  }
  return otherwise;
}

Cause cause_of(const Birth& birth) {
  if (birth.sighting.phase == Phase::params_after && birth.kind != BirthKind::weight) {
    return cause_of_optimizer_birth(birth);
  }
  switch (birth.kind) {
    case BirthKind::nan:
    case BirthKind::nan_from_inf:
    case BirthKind::inf:
      return cause_of_computation(birth);
    case BirthKind::literal:
      return Cause::bad_scalar;
    case BirthKind::opaque:
      return Cause::unknown;
    case BirthKind::kernel:
      return cause_of_kernel(birth, Cause::unknown);
    case BirthKind::unwritten:
      return cause_of_kernel(birth, Cause::uninitialised_memory);
    case BirthKind::weight:
      return Cause::bad_weight;
    case BirthKind::buffer:
      return Cause::bad_buffer;
    case BirthKind::data:
      return Cause::bad_input;
    case BirthKind::memory:
      return Cause::memory_corruption;
    case BirthKind::user_hook:
      return Cause::user_hook;
    case BirthKind::collective:  // a member's fault that did not come again looks the same
      return birth.last_seen == LastSeen::first_pass ? Cause::unknown : Cause::collective_result;
  }
  return Cause::unknown;
}

/// True for fp16 gradients that overflow because a scaler multiplied them.
bool is_of_loss_scale(const Root& root) {
  const Birth& birth = *root.birth;
  return root.rank->ledger().loss_scale && birth.sighting.phase == Phase::backward &&
         birth.sighting.dtype == "float16" && cause_of(birth) == Cause::operator_overflow;
}

/// True if the loss of the same microbatch counted no label. A model that computes its own loss
/// divides inside a module, so the division does not show it.
bool is_of_empty_loss(const Root& root) {
  const Birth& birth = *root.birth;
  const Cause cause = cause_of(birth);
  if (cause != Cause::operator_undefined && cause != Cause::unknown) return false;
  if (!birth.sighting.op.starts_with("aten::div")) return false;
  return std::ranges::any_of(root.rank->ledger().sightings, [&](const Sighting& loss) {
    return loss.phase == Phase::loss && loss.valid_labels == 0 &&
           loss.microbatch == birth.sighting.microbatch;
  });
}

bool has_come_out(const Root& root, VariantOutcome outcome) {
  const auto& rerun = root.rank->ledger().rerun;
  return rerun && std::ranges::count(rerun->variants, outcome) > 0;
}

/// True if no operator was seen to write the bad memory. Compiled code may have written it, because
/// not all of its kernels are seen.
bool is_of_unseen_writer(const Birth& birth) {
  return (birth.kind == BirthKind::data || birth.kind == BirthKind::memory) &&
         birth.sighting.phase != Phase::params_after;
}

/// True if the fault disappears when the region's operators run eagerly, and recurs when compiled.
bool is_of_compiled_region(const Root& root) {
  const BirthKind kind = root.birth->kind;
  const bool is_made = kind == BirthKind::opaque || kind == BirthKind::kernel ||
                       kind == BirthKind::nan || kind == BirthKind::inf ||
                       kind == BirthKind::nan_from_inf;
  return (is_made || is_of_unseen_writer(*root.birth)) &&
         has_come_out(root, {RerunVariant::eager, false}) &&
         has_come_out(root, {RerunVariant::compiled, true}) &&
         !has_come_out(root, {RerunVariant::compiled, false});
}

/// True if the replay shows that memory that seemed unwritten was computed.
bool has_computed_itself(const Birth& birth) {
  if (!birth.kernel_replay) return false;
  const KernelConclusion conclusion = birth.kernel_replay->conclusion;
  return conclusion == KernelConclusion::reads_unwritten ||
         conclusion == KernelConclusion::reads_outside ||
         conclusion == KernelConclusion::wrong_values;
}

Fact fact_of(FactKind kind, const Birth& birth) {
  const Sighting& place = birth.sighting;
  return {.kind = kind,
          .phase = place.phase,
          .bad = bad_count(place.stats),
          .parameter = place.parameter,
          .module = place.module,
          .op = place.op,
          .role = place.role.text()};
}

FactKind kind_of(BirthKind kind) {
  switch (kind) {
    case BirthKind::nan:
    case BirthKind::inf:
      return FactKind::made_from_finite;
    case BirthKind::nan_from_inf:
      return FactKind::made_from_inf;
    case BirthKind::literal:
      return FactKind::wrote_literal;
    case BirthKind::weight:
      return FactKind::weight_was_bad;
    case BirthKind::buffer:
      return FactKind::buffer_was_bad;
    case BirthKind::data:
      return FactKind::data_was_bad;
    case BirthKind::memory:
      return FactKind::memory_changed;
    case BirthKind::opaque:
      return FactKind::came_from_opaque_call;
    case BirthKind::kernel:
      return FactKind::made_by_kernel;
    case BirthKind::unwritten:
      return FactKind::read_unwritten_memory;
    case BirthKind::user_hook:
      return FactKind::made_by_hook;
    case BirthKind::collective:
      return FactKind::came_from_collective;
  }
  return FactKind::made_from_finite;
}

Fact reached_fact(const Root& root) {
  // The watch follows modules, not values: it knows the last module that saw a bad value.
  const auto& own = root.birth->reached;
  if (!own.empty() && own.front().kind == ReachedKind::module) {
    return {.kind = FactKind::last_seen_in, .module = own.front().name};
  }
  Fact fact{.kind = FactKind::reached};
  if (root.birth->sighting.phase == Phase::params_after) fact.phase = Phase::params_after;
  std::int64_t parameters = 0;
  for (const Reached& reached : reached_by(root)) {
    switch (reached.kind) {
      case ReachedKind::loss:
        fact.loss = true;  // or the model's output, if nothing follows it
        if (reached.name.starts_with("output")) fact.role = reached.name;
        break;
      case ReachedKind::other_ranks:
        fact.other_ranks = true;
        break;
      case ReachedKind::parameter:
        if (++parameters == 1) fact.parameter = reached.name;
        break;
      case ReachedKind::module:
        break;
    }
  }
  if (parameters > 0) fact.count = parameters;
  return fact;
}

/// True for a result that the program left out of its loss, by torch.where or an index: it reached
/// gradients alone, by its derivative.
bool is_discarded(const Root& root) {
  const Birth& birth = *root.birth;
  const Phase phase = birth.sighting.phase;
  if (phase == Phase::backward && detail_of(birth) == Detail::outside_domain) {
    return root.rank->scanned(Phase::loss) && root.rank->bad_losses().empty();
  }
  if (phase != Phase::forward && phase != Phase::loss) return false;
  // An operator on gradients reaches them without a derivative.
  const bool is_differentiable = std::ranges::any_of(
      birth.operands, [](const Operand& operand) { return operand.requires_grad == true; });
  if (!is_differentiable || birth.kind == BirthKind::literal) return false;
  if (!root.rank->scanned(Phase::loss) || !root.rank->bad_losses().empty()) return false;
  const auto reached = reached_by(root);
  return !reached.empty() && std::ranges::all_of(reached, [](const Reached& each) {
    return each.kind == ReachedKind::parameter;
  });
}

/// The origin of memory that was bad when read; empty for an operator's result.
std::optional<Fact> history_of_memory(const Birth& birth) {
  if (birth.reader.empty()) return std::nullopt;
  const FactKind kind = birth.last_seen == LastSeen::finite       ? FactKind::finite_when_written
                        : birth.last_seen == LastSeen::allocated  ? FactKind::allocated_not_written
                        : birth.last_seen == LastSeen::first_pass ? FactKind::made_before_pass
                        : birth.last_seen == LastSeen::rewritten  ? FactKind::written_again
                        : birth.kind == BirthKind::collective     ? FactKind::received_by
                        : !birth.inside.empty()                   ? FactKind::made_off_dispatcher
                                                                  : FactKind::made_before_pass;
  return Fact{.kind = kind, .op = birth.reader, .writer = birth.writer, .inside = birth.inside};
}

void add_replay(Facts& facts, const Birth& birth) {
  for (const std::string& line : birth.replay_lines) {
    facts.push_back({.kind = FactKind::replayed,
                     .conclusion = std::string(name_of(birth.replay)),
                     .text = line});
  }
}

Fact maxima_fact(FactKind kind, const Magnitude& weight, const Maxima& maxima) {
  Fact fact{.kind = kind, .parameter = weight.parameter};
  for (std::size_t i = 0; i < maxima.iterations.size(); ++i) {
    fact.values.emplace_back(std::to_string(maxima.iterations[i]), maxima.absmax[i]);
  }
  return fact;
}

/// The rank's largest weight, if it is larger than any training makes weights, and the overflow is
/// not in the module that has it: what follows that module overflows.
std::optional<Fact> large_weight_elsewhere(const Root& root) {
  constexpr double kLargest = 1e8;
  const RankEvidence& rank = *root.rank;
  std::optional<Fact> found;
  for (std::size_t position = 0; position < rank.size(); ++position) {
    const std::string& name = rank.parameter(position).name;
    const auto largest = rank.absmax(Phase::params_before, name);
    if (!largest || !(*largest > kLargest) || (found && !(*largest > *found->value))) continue;
    found = Fact{.kind = FactKind::large_weight,
                 .ranks = {rank.rank()},
                 .value = largest,
                 .parameter = name};
  }
  const auto is_own = [&](const Magnitude& weight) { return weight.parameter == found->parameter; };
  return found && std::ranges::none_of(root.birth->weights, is_own) ? found : std::nullopt;
}

/// Adds how the largest weight grew.
void add_maxima(Facts& facts, const Birth& birth) {
  const Magnitude& largest = *std::ranges::max_element(
      birth.weights, {}, [](const Magnitude& each) { return each.absmax; });
  if (!largest.before.iterations.empty()) {
    facts.push_back(maxima_fact(FactKind::weight_maxima, largest, largest.before));
    facts.back().value = largest.absmax;
  }
  if (!largest.gradient_before.iterations.empty()) {
    facts.push_back(maxima_fact(FactKind::gradient_maxima, largest, largest.gradient_before));
  }
}

}  // namespace

/// In order of birth: of several bad weights, the one read first comes first.
std::vector<Root> roots_of(const RankEvidence& rank) {
  std::vector<Root> roots;
  std::map<const Birth*, std::size_t> known;
  for (const Birth& birth : rank.ledger().births) {
    if (birth.reached.empty()) continue;
    const Birth* root = &root_of(rank.ledger(), birth);
    const auto [entry, is_new] = known.try_emplace(root, roots.size());
    if (is_new) roots.push_back({&rank, root, {}});
    if (&birth != root) roots[entry->second].descendants.push_back(&birth);
  }
  std::ranges::sort(roots, {}, &Root::birth);  // pointers into one ledger's list
  return roots;
}

/// Everything that the birth and its descendants reached.
std::vector<Reached> reached_by(const Root& root) {
  std::vector<Reached> all;
  std::set<std::pair<ReachedKind, std::string_view>> known;
  const auto add = [&](const Birth& birth) {
    for (const Reached& reached : birth.reached) {
      if (known.emplace(reached.kind, reached.name).second) all.push_back(reached);
    }
  };
  add(*root.birth);
  for (const Birth* descendant : root.descendants) add(*descendant);
  return all;
}

Origin origin_of(const Root& root) {
  const Birth& birth = *root.birth;
  const Sighting& place = birth.sighting;
  Origin origin;
  origin.phase = place.phase;
  origin.direction = direction_of(place.phase);
  origin.iteration = root.rank->ledger().iteration;
  origin.microbatch = place.microbatch;
  origin.chunk = place.chunk;
  origin.coordinates = root.rank->coordinates();
  origin.candidates = {root.rank->rank()};
  origin.data_parallel_replica = root.rank->coordinates().dp.rank;
  origin.module = place.module;
  origin.op = place.op;
  origin.parameter = place.parameter;
  // A birth that reached gradients but no loss is listed under the first of them.
  if (origin.parameter.empty() && !birth.reached.empty() &&
      birth.reached.front().kind == ReachedKind::parameter) {
    origin.parameter = birth.reached.front().name;
  }
  origin.tensor = tensor_of(place);
  origin.bundle = birth.bundle;
  origin.forward_op = birth.forward_op;
  origin.custom_function = custom_code_of(birth);
  origin.code = birth.code;
  if (origin.tensor) origin.tensor->extent = birth.extent;
  origin.cause = is_of_loss_scale(root) ? Cause::loss_scale : cause_of(birth);
  if (is_of_empty_loss(root)) origin.cause = Cause::empty_loss_mask;
  if (is_of_compiled_region(root)) origin.cause = Cause::compiled_region;
  const bool has_unseen_writer =
      origin.cause == Cause::compiled_region && is_of_unseen_writer(birth);
  origin.detail = detail_of(birth);
  if (origin.cause == Cause::bad_input && root.rank->ledger().began_unrecorded) {
    origin.detail = Detail::unrecorded;
  }
  const bool accuses_machine =
      origin.cause == Cause::not_reproduced || origin.cause == Cause::memory_corruption;
  // An infinity does not show how large the gradient is without the loss scale.
  const bool may_be_of_memory = birth.last_seen == LastSeen::allocated &&
                                !has_come_out(root, {RerunVariant::constant_memory, true});
  const bool is_seen = birth.kind == BirthKind::kernel
                           ? !may_be_of_memory
                           : birth.kind != BirthKind::opaque && !has_unseen_writer;
  const bool is_sure =
      !birth.is_module_inferred && is_seen && !accuses_machine && origin.cause != Cause::loss_scale;
  origin.place_confidence = is_sure ? Confidence::high : Confidence::medium;
  Facts& facts = origin.facts;
  facts.push_back(
      fact_of(has_unseen_writer ? FactKind::came_from_opaque_call : kind_of(birth.kind), birth));
  if (origin.detail == Detail::made_earlier) facts.back().op = birth.reader;  // not what wrote it
  if (birth.kind == BirthKind::collective) {
    facts.back().group = birth.group;
    facts.back().peers = birth.members.ranks_below(root.rank->coordinates().world_size);
  }
  if (birth.kind == BirthKind::unwritten) {
    facts.back().kind = !birth.reader.empty()        ? FactKind::read_unwritten_memory
                        : has_computed_itself(birth) ? FactKind::made_by_kernel
                                                     : FactKind::left_unwritten;
    facts.back().writer = birth.writer;
    facts.back().code = birth.allocated_at;
  }
  if (birth.kind == BirthKind::kernel && may_be_of_memory) {
    facts.push_back({.kind = FactKind::was_given_unwritten_memory});
  }
  if (origin.cause == Cause::loss_scale) {
    facts.push_back(
        {.kind = FactKind::scaled_by_loss_scale, .value = root.rank->ledger().loss_scale});
  }
  if (origin.cause == Cause::memory_corruption) {
    facts.push_back({.kind = FactKind::other_writers_possible});
  }
  if (has_values(birth)) {
    Fact values{.kind = FactKind::values_at_first_bad};
    for (const Operand& operand : birth.operands) {
      const auto value = operand.at_first_bad ? operand.at_first_bad : operand.number;
      if (value) values.values.emplace_back(operand.name, *value);
    }
    facts.push_back(std::move(values));
  }
  if (origin.cause == Cause::recompute_mismatch) {
    facts.push_back({.kind = FactKind::computed_again, .node = birth.node});
  } else if (!birth.forward_op.empty() || !birth.node.empty()) {
    facts.push_back({.kind = FactKind::derivative_of, .op = birth.forward_op, .node = birth.node});
  }
  add_replay(facts, birth);
  if (birth.kernel_replay) append_kernel_facts(facts, *birth.kernel_replay, place.op);
  if (!root.descendants.empty()) {
    facts.push_back(fact_of(FactKind::became, *root.descendants.front()));
  }
  facts.push_back(reached_fact(root));
  if (is_discarded(root)) facts.push_back({.kind = FactKind::discarded});
  if (birth.is_module_inferred) {
    facts.push_back({.kind = FactKind::module_inferred, .module = place.module});
  }
  if (!birth.literal_op.empty()) {
    facts.push_back({.kind = FactKind::literal_of, .op = birth.literal_op});
  }
  if (auto history = history_of_memory(birth); history && !has_unseen_writer) {
    facts.push_back(*std::move(history));
  }
  const bool may_be_overflow =
      birth.kind == BirthKind::inf || origin.cause == Cause::operator_overflow;
  if (may_be_overflow && !birth.weights.empty()) {
    Fact weights{.kind = FactKind::weights_magnitude};
    for (const Magnitude& weight : birth.weights) {
      weights.values.emplace_back(weight.parameter, weight.absmax);
    }
    facts.push_back(std::move(weights));
    add_maxima(facts, birth);
  }
  if (may_be_overflow) {
    if (auto large = large_weight_elsewhere(root)) facts.push_back(*std::move(large));
  }
  for (std::size_t i = 0; i < std::min(kMostInputs, birth.operands.size()); ++i) {
    facts.push_back({.kind = FactKind::input, .operand = birth.operands[i]});
  }
  if (birth.framework_code) {
    facts.push_back({.kind = FactKind::called_in_framework, .code = birth.framework_code});
  }
  return origin;
}

}  // namespace nanlocator::inline locate_room
