#include "locate/birth_origins.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "locate/origin_text.hpp"

namespace nanlocator {
namespace {

/// Inputs of an operator that the evidence lists; the rest is in the ledger.
constexpr std::size_t kMostInputs = 4;
/// Further bad weights that the evidence names.
constexpr std::size_t kMostNames = 4;

/// A birth that made the step bad, with what it became on the way.
struct Root {
  const RankEvidence* rank = nullptr;
  const Birth* birth = nullptr;
  std::vector<const Birth*> descendants;  // in execution order
};

/// What makes births on several ranks the same.
using Identity = std::tuple<BirthKind, Phase, std::string, std::string, std::string, std::string>;

Identity identity_of(const Birth& birth) {
  const Sighting& place = birth.sighting;
  return {birth.kind, place.phase, place.module, place.op, place.role, place.parameter};
}

const Birth* parent_of(const Ledger& ledger, const Birth& birth) {
  if (!birth.parent || *birth.parent < 0 || *birth.parent >= std::ssize(ledger.births)) {
    return nullptr;
  }
  return &ledger.births[static_cast<std::size_t>(*birth.parent)];
}

/// The first of `birth`'s ancestors that is a fault of its own: an intended infinity is none, and
/// what made NaN of it is.
const Birth& root_of(const Ledger& ledger, const Birth& birth) {
  const Birth* root = &birth;
  // A ledger may come from a file: a circle of parents must not hang the reader.
  for (std::size_t steps = 0; steps < ledger.births.size(); ++steps) {
    const Birth* parent = parent_of(ledger, *root);
    if (parent == nullptr || parent->kind == BirthKind::literal) break;
    root = parent;
  }
  return *root;
}

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
  return roots;
}

bool has_reached_a_loss(const Birth& birth) {
  return std::ranges::any_of(
      birth.reached, [](const Reached& reached) { return reached.kind == ReachedKind::loss; });
}

/// Whether the elements that the first bad one was computed from are known.
bool has_values(const Birth& birth) {
  return std::ranges::any_of(
      birth.operands, [](const Operand& operand) { return operand.at_first_bad.has_value(); });
}

bool has_value(const Birth& birth, double value) {
  return std::ranges::any_of(
      birth.operands, [&](const Operand& operand) { return operand.at_first_bad == value; });
}

bool is_empty(const Operand& operand) {
  return std::ranges::find(operand.shape, 0) != operand.shape.end();
}

/// Mean over no labels: the loss divides zero by zero, or torch's own loss counts none.
bool is_empty_loss(const Birth& birth) {
  const std::string& op = birth.sighting.op;
  // aten/src/ATen/native/LossNLL.cpp: the mean of finite inputs is NaN only where the total weight
  // of the labels is zero (all of them ignore_index).
  if (op.starts_with("aten::nll_loss")) return true;
  if (birth.sighting.phase != Phase::loss) return false;
  const bool is_quotient =
      op.starts_with("aten::div") && has_values(birth) &&
      std::ranges::all_of(birth.operands, [](const Operand& operand) {
        return operand.at_first_bad.value_or(operand.number.value_or(0)) == 0;
      });
  return is_quotient || (op.starts_with("aten::mean") && !birth.operands.empty() &&
                         is_empty(birth.operands.front()));
}

Cause cause_of_optimizer_birth(const Birth& birth) {
  // What was bad before the update began is what the optimizer keeps: its moments.
  const bool was_there = birth.kind == BirthKind::data || birth.kind == BirthKind::buffer;
  return was_there ? Cause::optimizer_state : Cause::optimizer_update;
}

/// Computed in backward by a forward that runs again, and reached no loss: the first execution,
/// whose result the loss was made from, was finite.
bool is_of_recomputation_only(const Birth& birth) {
  return birth.sighting.phase == Phase::forward && !birth.node.empty() &&
         !has_reached_a_loss(birth);
}

Cause cause_of_computation(const Birth& birth) {
  if (is_of_recomputation_only(birth)) return Cause::recompute_mismatch;
  if (birth.kind != BirthKind::inf && is_empty_loss(birth)) return Cause::empty_loss_mask;
  switch (birth.replay) {
    case ReplayConclusion::deterministic_overflow:
      return Cause::operator_overflow;
    case ReplayConclusion::deterministic_undefined:
    case ReplayConclusion::deterministic_custom:
      return Cause::operator_undefined;
    case ReplayConclusion::deterministic_kernel:
      return Cause::operator_bug;
    case ReplayConclusion::varies:
      return Cause::not_reproduced;
    case ReplayConclusion::not_replayed:
      break;
  }
  // Not replayed: only the operator's kind is left. Infinity of finite inputs without a zero among
  // them is an overflow; of NaN nothing is known but that no input had it.
  if (birth.sighting.op.empty()) return Cause::unknown;
  if (birth.kind == BirthKind::inf && has_values(birth) && !has_value(birth, 0)) {
    return Cause::operator_overflow;
  }
  return Cause::unknown;
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
    case BirthKind::opaque:
      return Cause::unknown;
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
    case BirthKind::collective:
      return Cause::collective_result;
  }
  return Cause::unknown;
}

/// fp16 gradients that do not fit because a scaler has multiplied them.
bool is_of_loss_scale(const Root& root) {
  const Birth& birth = *root.birth;
  return root.rank->ledger().loss_scale && birth.sighting.phase == Phase::backward &&
         birth.sighting.dtype == "float16" && cause_of(birth) == Cause::operator_overflow;
}

/// A model that makes its loss itself divides inside a module; that no label was counted, the loss
/// tells.
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

/// "aten::log of module encoder.norm".
std::string who_of(const Birth& birth) {
  const Sighting& place = birth.sighting;
  std::string text = place.op;
  if (text.empty() && place.module.empty()) return "an unknown operator";
  if (text.empty()) return "module " + place.module;
  if (!place.module.empty()) text += " of module " + place.module;
  return text;
}

std::string sentence_of(const Birth& birth) {
  const std::string bad = describe_bad(birth.sighting.stats);
  const std::string place = birth.sighting.role;
  const std::string parameter = birth.sighting.parameter;
  switch (birth.kind) {
    case BirthKind::nan:
      return who_of(birth) + " made " + bad + " in its " + place + ", though its inputs are finite";
    case BirthKind::nan_from_inf:
      return who_of(birth) + " made " + bad + " in its " + place +
             " of inputs that hold Inf and no NaN";
    case BirthKind::inf:
      return who_of(birth) + " made " + bad + " in its " + place + ", though its inputs are finite";
    case BirthKind::literal:
      return who_of(birth) + " wrote " + bad + ": a number that was not finite was handed to it";
    case BirthKind::weight:
      return "the parameter " + parameter + " held " + bad + " before the pass began";
    case BirthKind::buffer:
      return "the buffer " + parameter + " held " + bad + " before the pass began";
    case BirthKind::data:
      return (parameter.empty() ? std::string("a tensor") : parameter) +
             " from outside the model held " + bad + " before the pass began; " + who_of(birth) +
             " read it first";
    case BirthKind::memory:
      return (parameter.empty() ? "a tensor that " + who_of(birth) + " read"
                                : "the gradient of " + parameter) +
             " held " + bad +
             ", though it was finite when it was last written and no operator wrote to it since";
    case BirthKind::opaque:
      return bad + " came from a computation that PyTorch's dispatcher does not see; " +
             who_of(birth) + " read it first";
    case BirthKind::user_hook:
      return "a hook of the user made " + bad + " with " + birth.sighting.op;
    case BirthKind::collective:
      return bad + " came out of a collective; " + who_of(birth) + " read it first";
  }
  return bad;
}

/// What the birth and its descendants reached.
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

std::string reached_text(const Root& root) {
  // The watch follows modules, not values: it knows the last one that met the bad one.
  const auto& own = root.birth->reached;
  if (!own.empty() && own.front().kind == ReachedKind::module) {
    return "it was last seen in module " + own.front().name;
  }
  const auto reached = reached_by(root);
  const auto count = [&](ReachedKind kind) {
    return std::ranges::count(reached, kind, &Reached::kind);
  };
  std::vector<std::string> parts;
  if (count(ReachedKind::loss) > 0) parts.emplace_back("the loss");
  if (const auto parameters = count(ReachedKind::parameter); parameters > 0) {
    const std::string& first =
        std::ranges::find(reached, ReachedKind::parameter, &Reached::kind)->name;
    parts.push_back("the gradients of " + (parameters == 1 ? first
                                                           : std::to_string(parameters) +
                                                                 " parameters, first of " + first));
  }
  if (count(ReachedKind::other_ranks) > 0) parts.emplace_back("other ranks");
  std::string text = "it reached ";
  for (std::size_t i = 0; i < parts.size(); ++i) {
    text += (i == 0 ? "" : i + 1 < parts.size() ? ", " : " and ") + parts[i];
  }
  return text;
}

/// Where memory that was bad when it was read is from; "" of what an operator computed.
std::string found_text(const Birth& birth) {
  if (birth.reader.empty()) return "";
  std::string text;
  if (birth.last_seen == LastSeen::finite) {
    text = "finite when " + birth.writer + " wrote it";
    text += birth.inside.empty()
                ? "; no operator has written it since"
                : "; " + birth.inside + " may have written it since, off the dispatcher";
  } else if (birth.last_seen == LastSeen::allocated) {
    text = "allocated by " + birth.writer +
           (birth.inside.empty() ? std::string() : " inside " + birth.inside) +
           " and bad before any operator wrote it: computed off the dispatcher, or memory that was "
           "never written";
  } else if (birth.kind == BirthKind::collective) {
    text = "received by " + birth.writer;
  } else if (!birth.inside.empty()) {
    text = "made by " + birth.inside + " off the dispatcher";
  } else {
    text = "no operator of this pass made it";
  }
  return text + ", read by " + birth.reader + " when it was found";
}

/// Only fp16 has less range than fp32: what overflows in bf16 overflows in fp32.
std::string remedy_of_overflow(const std::string& module, const Sighting& place) {
  if (place.dtype == "bfloat16" || place.dtype == "float32") {
    return "scale what goes into " + module + ": it leaves the range of " + place.dtype +
           ", 3.4e38";
  }
  std::string remedy = "run " + module + " in fp32, or scale what goes into it";
  if (place.dtype == "float16" && !place.module.empty()) {
    remedy += "; under autocast: nanlocator.transformers.no_autocast(model.get_submodule(\"" +
              place.module + "\"))";
  }
  return remedy;
}

std::string action_of(Cause cause, const Birth& birth) {
  const std::string module =
      birth.sighting.module.empty() ? "the operator" : "module " + birth.sighting.module;
  switch (cause) {
    case Cause::bad_weight:
      return "check the checkpoint that was loaded, and the optimizer step before this one";
    case Cause::bad_buffer:
      return "look at what computes the buffer " + birth.sighting.parameter;
    case Cause::bad_input:
      return "inspect the samples of this batch; the tensor is in the bundle";
    case Cause::empty_loss_mask:
      return "guard the loss against a batch without valid labels: divide by max(count, 1)";
    case Cause::operator_overflow:
      return remedy_of_overflow(module, birth.sighting);
    case Cause::operator_undefined:
      return "add an epsilon to, or clamp, what goes into " + birth.sighting.op + " in " + module;
    case Cause::operator_bug:
      return "give the kernel's authors the bundle: nanlocator replay --export-python";
    case Cause::memory_corruption:
      return "test this device's memory before using it again; look for a kernel that writes out "
             "of bounds";
    case Cause::not_reproduced:
      return "repeat the step a few times on this device and on another; test the device before "
             "using it again";
    case Cause::collective_result:
      return "look at the ledgers of the other members of the collective";
    case Cause::optimizer_state:
      return "look at the optimizer's state (moments) of the parameters; reset it or load an older "
             "checkpoint";
    case Cause::optimizer_update:
      return "look at the optimizer's epsilon and learning rate for this parameter";
    case Cause::recompute_mismatch:
      return "find what differs between the two executions of " + module +
             ": random numbers, autocast, or state that the first one moved";
    case Cause::loss_scale:
      return "none: the scaler leaves the step out and lowers its scale; look again where that "
             "happens step after step";
    case Cause::user_hook:
      return birth.stack.empty() ? "look at the hooks that are registered on this tensor"
                                 : "look at the hook at " + birth.stack.front();
    default:
      return birth.bundle.empty() ? "look at " + who_of(birth) : "look at the inputs in the bundle";
  }
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
  // What reached gradients and no loss is told with the first of them.
  if (origin.parameter.empty() && !birth.reached.empty() &&
      birth.reached.front().kind == ReachedKind::parameter) {
    origin.parameter = birth.reached.front().name;
  }
  origin.tensor = tensor_of(place);
  origin.bundle = birth.bundle;
  origin.cause = is_of_loss_scale(root) ? Cause::loss_scale : cause_of(birth);
  if (is_of_empty_loss(root)) origin.cause = Cause::empty_loss_mask;
  const bool accuses_machine =
      origin.cause == Cause::not_reproduced || origin.cause == Cause::memory_corruption;
  // How large the gradient is without the loss scale, an infinity does not tell.
  const bool is_sure = !birth.is_module_inferred && birth.kind != BirthKind::opaque &&
                       !accuses_machine && origin.cause != Cause::loss_scale;
  origin.confidence = is_sure ? Confidence::high : Confidence::medium;
  auto& evidence = origin.evidence;
  evidence.push_back(sentence_of(birth));
  if (origin.cause == Cause::loss_scale) {
    evidence.push_back("all gradients of this step are multiplied by " +
                       short_number(*root.rank->ledger().loss_scale) +
                       ", a loss scale that falls after an overflow");
  }
  if (origin.cause == Cause::memory_corruption) {
    evidence.emplace_back(
        "not excluded: a kernel off the dispatcher, or another process, that wrote there");
  }
  if (has_values(birth)) {
    std::string text;
    for (const Operand& operand : birth.operands) {
      if (!operand.at_first_bad) continue;
      text += (text.empty() ? "" : ", ") + operand.name + " = " +
              short_number(*operand.at_first_bad);
    }
    evidence.push_back("at the first bad element: " + text);
  }
  if (origin.cause == Cause::recompute_mismatch) {
    evidence.push_back("it was computed again in backward (" + birth.node +
                       "); the first execution, from which the loss was made, was finite");
  } else if (!birth.forward_op.empty() || !birth.node.empty()) {
    evidence.push_back("in backward node " + birth.node +
                       (birth.forward_op.empty() ? "" : ", the derivative of " + birth.forward_op));
  }
  for (const std::string& line : birth.replay_lines) evidence.push_back(line);
  if (!root.descendants.empty()) {
    const Birth& next = *root.descendants.front();
    evidence.push_back("it became " + describe_bad(next.sighting.stats) + " in " + who_of(next) +
                       " (" + std::string(name_of(next.sighting.phase)) + ")");
  }
  evidence.push_back(reached_text(root));
  if (birth.is_module_inferred) {
    evidence.push_back("no module was entered: " + place.module +
                       " is the one whose parameter was used last");
  }
  if (!birth.literal_op.empty()) {
    evidence.push_back("the Inf is a literal, of " + birth.literal_op);
  }
  if (auto found = found_text(birth); !found.empty()) evidence.push_back(std::move(found));
  for (std::size_t i = 0; i < std::min(kMostInputs, birth.operands.size()); ++i) {
    evidence.push_back("input " + describe_operand(birth.operands[i]));
  }
  if (!birth.stack.empty()) evidence.push_back("called at " + birth.stack.front());
  origin.action = action_of(origin.cause, birth);
  return origin;
}

void add_rank(Origin& origin, const RankEvidence& rank) {
  origin.candidates.push_back(rank.rank());
  origin.is_on_every_candidate = true;
  origin.coordinates.reset();
  if (origin.data_parallel_replica != rank.coordinates().dp.rank) {
    origin.data_parallel_replica.reset();
  }
}

/// A step after which every weight is NaN has one fault, not one per weight: the first that was
/// read is told, and how many others there are on the same ranks.
void merge_bad_weights(std::vector<BornOrigin>& born) {
  struct Further {
    std::size_t count = 0;
    std::string names;
  };
  std::map<std::vector<int>, std::size_t> first_by_ranks;
  std::vector<BornOrigin> kept;
  std::map<std::size_t, Further> further;
  for (BornOrigin& each : born) {
    if (each.origin.cause == Cause::bad_weight) {
      const auto [entry, is_new] = first_by_ranks.try_emplace(each.origin.candidates, kept.size());
      if (!is_new) {
        Further& others = further[entry->second];
        if (++others.count <= kMostNames) {
          others.names += (others.names.empty() ? "" : ", ") + each.origin.parameter;
        }
        continue;
      }
    }
    kept.push_back(std::move(each));
  }
  for (const auto& [first, others] : further) {
    auto& evidence = kept[first].origin.evidence;
    evidence.insert(evidence.begin() + 1, std::to_string(others.count) +
                                              (others.count == 1 ? " further parameter was"
                                                                 : " further parameters were") +
                                              " bad before the pass, too: " + others.names +
                                              (others.count > kMostNames ? ", ..." : ""));
  }
  born = std::move(kept);
}

/// The same operator in several microbatches is one fault, told with the first of them.
void describe_microbatches(BornOrigin& born) {
  if (born.microbatches.empty()) return;
  born.origin.microbatch = *born.microbatches.begin();
  if (born.microbatches.size() < 2) return;
  born.origin.evidence.insert(born.origin.evidence.begin() + 1,
                              "the same in " + std::to_string(born.microbatches.size()) +
                                  " microbatches of this step; this is the first of them");
}

}  // namespace

std::vector<BornOrigin> origins_of_births(const Incident& incident, bool has_crossings) {
  std::vector<Root> roots;
  for (const RankEvidence& rank : incident.ranks()) {
    for (Root& root : roots_of(rank)) roots.push_back(std::move(root));
  }
  const auto is_received = [](const Root& root) {
    return root.birth->kind == BirthKind::collective;
  };
  if (has_crossings || !std::ranges::all_of(roots, is_received)) std::erase_if(roots, is_received);

  std::vector<BornOrigin> born;
  std::map<Identity, std::size_t> known;
  for (const Root& root : roots) {
    const auto [entry, is_new] = known.try_emplace(identity_of(*root.birth), born.size());
    if (is_new) {
      born.push_back({origin_of(root), {}, {}});
    } else if (Origin& origin = born[entry->second].origin;
               origin.candidates.back() != root.rank->rank()) {
      add_rank(origin, *root.rank);
    }
    BornOrigin& each = born[entry->second];
    if (const auto microbatch = root.birth->sighting.microbatch) {
      each.microbatches.insert(*microbatch);
    }
    for (Reached& reached : reached_by(root)) {
      if (reached.kind == ReachedKind::parameter) each.reached.insert(std::move(reached.name));
    }
  }
  merge_bad_weights(born);
  for (BornOrigin& each : born) {
    describe_microbatches(each);
    Origin& origin = each.origin;
    if (origin.candidates.size() < 2) continue;
    origin.evidence.insert(
        origin.evidence.begin() + 1,
        "the same on " + describe_rank_count({origin.candidates.begin(), origin.candidates.end()}) +
            ": a common cause, not a fault of one device");
  }
  return born;
}

RerunOutcome rerun_of(const Incident& incident) {
  RerunOutcome outcome;
  std::set<std::string> not_restored;
  bool is_known_everywhere = true;
  for (const RankEvidence& rank : incident.ranks()) {
    const auto& rerun = rank.ledger().rerun;
    if (!rerun) continue;
    outcome.done = true;
    not_restored.insert(rerun->not_restored.begin(), rerun->not_restored.end());
    if (!rerun->reproduced) {
      is_known_everywhere = false;
    } else {
      outcome.reproduced = outcome.reproduced.value_or(false) || *rerun->reproduced;
    }
  }
  // "Gone" needs every rank's word.
  if (!is_known_everywhere && outcome.reproduced == false) outcome.reproduced.reset();
  outcome.not_restored.assign(not_restored.begin(), not_restored.end());
  return outcome;
}

std::vector<std::string> describe_rerun(const Incident& incident, const RerunOutcome& outcome) {
  if (!outcome.done) return {};
  std::int64_t gradients = 0;
  std::int64_t changed = 0;
  std::optional<bool> control;
  for (const RankEvidence& rank : incident.ranks()) {
    const auto& rerun = rank.ledger().rerun;
    if (!rerun) continue;
    gradients += rerun->gradients;
    changed += rerun->changed;
    if (rerun->control_reproduced) control = control.value_or(false) || *rerun->control_reproduced;
  }
  std::vector<std::string> sentences;
  if (!outcome.reproduced) {
    sentences.push_back("the step was repeated, but the repeat did not come to its end");
  } else if (*outcome.reproduced) {
    sentences.push_back(changed == 0
                            ? "the step was repeated and came out bit-identical (" +
                                  std::to_string(gradients) + " gradients): deterministic"
                            : "the step was repeated and is bad again, with other bits in " +
                                  std::to_string(changed) + " of " + std::to_string(gradients) +
                                  " gradients: something in it is not deterministic");
  } else {
    sentences.push_back(
        "the step was repeated with the same data, weights and random numbers, and "
        "came out finite");
    if (control) {
      sentences.push_back(*control ? "a second repeat, without the trace, is bad again: it depends "
                                     "on timing, as a race or uninitialised memory does"
                                   : "a second repeat, without the trace, is finite, too");
    }
  }
  if (!outcome.not_restored.empty()) {
    std::string text = "not put back before the repeat:";
    for (const std::string& name : outcome.not_restored) text += " " + name + ";";
    text.back() = '.';
    sentences.push_back(text);
  }
  return sentences;
}

}  // namespace nanlocator
