#include <algorithm>
#include <map>
#include <set>

#include "nanlocator/operators/gradient_work.hpp"
#include "operators/operator_trace_impl.hpp"

namespace nanlocator::inline operators_room {
BirthIds OperatorTrace::Impl::origins_of_result(const NamedTensor& result, const at::Tensor& values,
                                                bool is_gradient) {
  if (!is_gradient) return origins_of(values, this_thread_frames(), "explain");
  {
    const std::lock_guard lock(mutex);
    const BirthIds known = lineage.births_in(values);
    if (!known.empty()) return known;
  }
  ThreadFrames& frames = this_thread_frames();
  const Root root = find_root(values, frames);
  if (root.kind == BirthKind::memory || root.kind == BirthKind::data) {
    const BirthIds fused = fused_origins_of({result.name, values}, root, frames);
    if (!fused.empty()) return fused;
  }
  BirthIds before = passed_through(root, values, frames);
  if (!before.empty()) return before;
  // Also what wrote it after the backward: a reduction over replicas.
  const GradientWork on_gradients;
  const BirthId id = add_root(root, values, frames, "explain");
  const std::lock_guard lock(mutex);
  Birth& birth = births[static_cast<std::size_t>(id)].birth;
  birth.sighting.parameter = result.name;
  birth.sighting.role = "grad";
  if (birth.kind == BirthKind::data || birth.kind == BirthKind::memory) {
    birth.kind = BirthKind::memory;
    birth.sighting.phase = Phase::backward;
    const auto dot = result.name.rfind('.');
    birth.sighting.module = dot == std::string::npos ? "" : result.name.substr(0, dot);
    birth.is_module_inferred = false;
  }
  lineage.note_bad_content(values, {id});
  return {id};
}

void OperatorTrace::Impl::follow_roots_of_backward(ReachedByBirth& reached) {
  const std::lock_guard lock(mutex);
  for (const BirthId id : without_quiet_literals(roots_of_backward)) {
    reached[id].push_back({ReachedKind::loss, "loss"});
  }
}

/// Drops literals of masks, unless there is no other origin. The caller holds the lock.
BirthIds OperatorTrace::Impl::without_quiet_literals(BirthIds ids) const {
  const auto is_literal = [&](BirthId id) {
    return births[static_cast<std::size_t>(id)].birth.kind == BirthKind::literal;
  };
  if (!std::all_of(ids.begin(), ids.end(), is_literal)) std::erase_if(ids, is_literal);
  return ids;
}

void OperatorTrace::Impl::weigh(Birth& birth) {
  constexpr std::size_t kMost = 16;
  if (birth.sighting.module.empty() || birth.sighting.phase == Phase::params_after) return;
  std::vector<NamedTensor> parameters;
  {
    const std::lock_guard lock(mutex);
    parameters = declarations.parameters_of(birth.sighting.module, kMost);
  }
  for (const auto& [name, tensor] : parameters) {
    const at::Tensor values = values_of(tensor);
    if (!values.defined()) continue;
    birth.weights.push_back(
        {.parameter = name, .absmax = stats_of(values, options.threads).absmax});
  }
}

// Used if the losses are unknown. A bad derivative at a point where the forward operator was bad is
// attributed to that operator; else the backward of a 0/0 loss would be blamed, not the loss.
void OperatorTrace::Impl::blame_forward(ReachedByBirth& reached) const {
  const auto is_computed = [](const Birth& birth) {
    return birth.kind == BirthKind::nan || birth.kind == BirthKind::nan_from_inf ||
           birth.kind == BirthKind::inf;
  };
  ReachedByBirth blamed;
  for (const auto& [id, names] : reached) {
    BirthId culprit = id;
    const Birth& backward = births[static_cast<std::size_t>(id)].birth;
    for (BirthId before = 0; before < id && !backward.forward_op.empty(); ++before) {
      const Birth& forward = births[static_cast<std::size_t>(before)].birth;
      const bool is_same = forward.sighting.phase != Phase::backward && is_computed(forward) &&
                           is_call_of(forward.sighting.op, backward.forward_op) &&
                           forward.sighting.module == backward.sighting.module;
      if (!is_same) continue;
      culprit = before;
      break;
    }
    auto& all = blamed[culprit];
    all.insert(all.end(), names.begin(), names.end());
  }
  reached = std::move(blamed);
}

/// A function that is undefined has no derivative: of both, the function is the origin, if the
/// losses show it.
void OperatorTrace::Impl::blame_functions(ReachedByBirth& reached) const {
  for (auto last = reached.end(); last != reached.begin();) {
    --last;
    const auto function = functions.find(last->first);
    const auto known = function != functions.end() ? reached.find(function->second) : reached.end();
    if (known == reached.end()) continue;
    for (Reached& each : last->second) {
      if (std::ranges::find(known->second, each) == known->second.end()) {
        known->second.push_back(std::move(each));
      }
    }
    last = reached.erase(last);
  }
}

Explanation OperatorTrace::Impl::explain(std::span<const NamedTensor> losses,
                                         std::span<const NamedTensor> gradients) {
  // A value that is first read here, after the pass, is of an unknown position in it.
  const auto first_unread = [this] {
    const std::lock_guard lock(mutex);
    return births.size();
  }();
  // Births, each with the bad results that it reached, in the results' order.
  ReachedByBirth reached;
  const auto follow = [&](std::span<const NamedTensor> results, ReachedKind kind) {
    for (const NamedTensor& result : results) {
      const at::Tensor values = values_of(result.tensor);
      if (!values.defined() || !is_bad(values)) continue;
      const BirthIds ids = origins_of_result(result, values, kind == ReachedKind::parameter);
      const std::lock_guard lock(mutex);
      for (const BirthId id : without_quiet_literals(ids)) {
        reached[id].push_back({kind, result.name});
      }
    }
  };
  // Bad values sent to other ranks may have come back from them. They count if this rank has no
  // other origin.
  const auto follow_sent = [&](const std::set<BirthId>& sent) {
    const std::lock_guard lock(mutex);
    const auto is_received = [&](const auto& entry) {
      return births[static_cast<std::size_t>(entry.first)].birth.kind == BirthKind::collective;
    };
    if (!std::all_of(reached.begin(), reached.end(), is_received)) return;
    for (const BirthId id : sent) {
      if (births[static_cast<std::size_t>(id)].birth.kind == BirthKind::literal) continue;
      reached[id].push_back({ReachedKind::other_ranks, {}});
    }
  };
  follow(losses, ReachedKind::loss);
  if (losses.empty()) follow_roots_of_backward(reached);
  follow_sent(sent_in_forward);
  if (reached.empty()) follow(gradients, ReachedKind::parameter);
  follow_sent(sent_in_backward);

  {
    const std::lock_guard lock(mutex);
    for (std::size_t i = first_unread; i < births.size(); ++i) {
      births[i].birth.sighting.position.reset();
    }
  }
  Explanation explanation = explanation_of(reached, losses.empty());
  for (TracedBirth& traced : explanation.births) {
    // The sum of +Inf and -Inf turns an overflow into NaN.
    const BirthKind kind = traced.birth.kind;
    if (kind == BirthKind::inf || kind == BirthKind::nan) weigh(traced.birth);
  }
  return explanation;
}

Explanation OperatorTrace::Impl::explain_sent() {
  ReachedByBirth reached;
  {
    const std::lock_guard lock(mutex);
    for (const BirthId id : sent_to_one) {
      const BirthKind kind = births[static_cast<std::size_t>(id)].birth.kind;
      if (kind == BirthKind::literal || kind == BirthKind::collective) continue;
      reached[id].push_back({ReachedKind::other_ranks, {}});
    }
  }
  return explanation_of(std::move(reached), false);
}

Explanation OperatorTrace::Impl::explanation_of(ReachedByBirth reached, bool are_losses_unknown) {
  const std::lock_guard lock(mutex);
  if (are_losses_unknown) blame_forward(reached);
  blame_functions(reached);
  std::set<BirthId> reported;
  for (const auto& [id, names] : reached) {
    for (std::optional<int> at = id; at && reported.insert(*at).second;) {
      at = births[static_cast<std::size_t>(*at)].birth.parent;
      if (at && births[static_cast<std::size_t>(*at)].birth.kind == BirthKind::literal) break;
    }
  }
  Explanation explanation;
  std::map<BirthId, int> position;
  for (const BirthId id : reported) {
    position.emplace(id, static_cast<int>(explanation.births.size()));
    TracedBirth traced = births[static_cast<std::size_t>(id)];
    Birth& birth = traced.birth;
    if (const auto names = reached.find(id); names != reached.end()) birth.reached = names->second;
    if (birth.parent) {
      const Birth& parent = births[static_cast<std::size_t>(*birth.parent)].birth;
      if (parent.kind == BirthKind::literal && !reported.contains(*birth.parent)) {
        birth.literal_op = parent.sighting.op;
      }
      const auto found = position.find(*birth.parent);
      birth.parent = found == position.end() ? std::nullopt : std::optional<int>(found->second);
    }
    explanation.births.push_back(std::move(traced));
  }
  explanation.masked = static_cast<std::int64_t>(births.size() - reported.size());
  explanation.operators = operators.load();
  explanation.notes.assign(notes.begin(), notes.end());
  if (calls_not_kept > 0) {
    explanation.notes.push_back("the calls of " + std::to_string(calls_not_kept) +
                                " births were not kept, of " + first_not_kept +
                                " first: copies may take " + std::to_string(options.kept_bytes) +
                                " bytes, and half of the host's free memory");
  }
  if (births_not_kept > 0) {
    explanation.notes.push_back(std::to_string(births_not_kept) +
                                " births beyond the first ones were kept without their calls");
  }
  return explanation;
}

}  // namespace nanlocator::inline operators_room
