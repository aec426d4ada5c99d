#include "watch/module_births.hpp"

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tensor/tensor_access.hpp"

namespace nanlocator::module_watch {
namespace {

/// 0 at one kind of position and -Inf at the other: a mask that is added to attention scores.
bool is_additive_mask(const TensorStats& stats) {
  return stats.nan == 0 && stats.pos_inf == 0 && stats.absmax == 0 && stats.zeros > 0;
}

/// Kinds of non-finite values.
struct Badness {
  bool nan = false;
  bool inf = false;

  [[nodiscard]] bool any() const { return nan || inf; }
  void add(Badness other) {
    nan |= other.nan;
    inf |= other.inf;
  }
};

Badness badness_of(const TensorStats& stats) {
  if (stats.is_finite() || is_additive_mask(stats)) return {};
  return {stats.nan > 0, stats.pos_inf + stats.neg_inf > 0};
}

/// The non-finite values found in one call so far, in one direction.
struct Found {
  Badness incoming;
  Badness inside;  // of the call's own outgoing tensors and of everything in the calls inside it
};

/// If modules end in the same node, the innermost is hooked and reported first. Incoming tensors
/// must reach the outermost first.
std::vector<Event> from_outside_in(std::vector<Event> events) {
  const auto is_grad_output = [](const Event& e) { return e.place == TensorPlace::grad_output; };
  for (auto begin = events.begin(); begin != events.end();) {
    begin = std::find_if(begin, events.end(), is_grad_output);
    const auto end = std::find_if_not(begin, events.end(), is_grad_output);
    std::stable_sort(begin, end, [](const Event& a, const Event& b) { return a.call < b.call; });
    begin = end;
  }
  return events;
}

class Explainer {
 public:
  Explainer(const std::vector<Call>& calls, std::vector<Event> events, const DeferredScans& scans,
            std::int64_t iteration, std::span<const NamedTensor> parameters)
      : calls_(calls),
        events_(from_outside_in(std::move(events))),
        scans_(scans),
        iteration_(iteration),
        forward_(calls.size()),
        backward_(calls.size()) {
    for (const auto& [name, tensor] : parameters) {
      if (tensor.defined()) parameter_names_.emplace(tensor.unsafeGetTensorImpl(), name);
    }
  }

  struct Result {
    ModuleWatch::Collected collected;
    std::vector<ModuleCallId> makers;  // of the births, by index
  };

  Result run() {
    for (std::size_t begin = 0; begin < events_.size();) {
      // A call's simultaneous inputs, or outputs, are one observation.
      std::size_t end = begin;
      Badness badness;
      while (end < events_.size() && belong_together(events_[begin], events_[end])) {
        badness.add(badness_of(scans_.stats(events_[end].scan)));
        ++end;
      }
      if (badness.any()) observe(begin, end, badness);
      begin = end;
    }
    return {std::move(collected_), std::move(makers_)};
  }

 private:
  void observe(std::size_t begin, std::size_t end, Badness badness) {
    for (std::size_t i = begin; i < end; ++i) {
      if (badness_of(scans_.stats(events_[i].scan)).any()) {
        collected_.sightings.push_back(sighting_of(events_[i]));
      }
    }
    const Event& event = worst(begin, end, badness);
    const bool backward = is_backward(event.place);
    auto& found = backward ? backward_ : forward_;
    // `maker`'s code made it: the call's own code an output, the caller's an input.
    const ModuleCallId maker =
        knows_its_input(is_incoming(event.place) ? calls_[event.call].parent : event.call);
    const bool is_new =
        maker == kNoCall ? is_new_outside(backward, badness) : is_new_in(maker, backward, badness);
    for (auto& birth : collected_.births) {
      birth.reached = {{ReachedKind::module, *calls_[event.call].path}};
    }
    if (is_new) add_birth(event, maker, backward, badness);

    Badness& outside = backward ? outside_backward_ : outside_forward_;
    if (is_incoming(event.place)) {
      found[event.call].incoming.add(badness);
    } else {
      found[event.call].inside.add(badness);
    }
    for (auto c = calls_[event.call].parent; c != kNoCall; c = calls_[c].parent) {
      found[c].inside.add(badness);
    }
    outside.add(badness);
  }

  /// The innermost call, from this one outwards, without hidden inputs; else the outermost one. A
  /// hidden input may have been bad, in which case the code around the call made it.
  [[nodiscard]] ModuleCallId knows_its_input(ModuleCallId call) const {
    if (call == kNoCall) return call;
    while (calls_[call].has_hidden_input && calls_[call].parent != kNoCall) {
      call = calls_[call].parent;
    }
    return call;
  }

  [[nodiscard]] bool is_new_in(ModuleCallId maker, bool backward, Badness badness) const {
    const Found& found = backward ? backward_[maker] : forward_[maker];
    if (backward) {
      // Backward reads what forward has saved, so it may inherit forward's bad values.
      const Found& forward = forward_[maker];
      if (badness_before(forward.incoming, forward.inside, badness)) return false;
    }
    return !badness_before(found.incoming, found.inside, badness);
  }

  /// True if earlier values account for `badness`: NaN accounts for anything, Inf for Inf.
  [[nodiscard]] static bool badness_before(Badness incoming, Badness inside, Badness badness) {
    if (incoming.nan || inside.nan) return true;
    return !badness.nan && (incoming.inf || inside.inf);
  }

  [[nodiscard]] bool is_new_outside(bool backward, Badness badness) const {
    if (badness_before(outside_forward_, {}, badness)) return false;
    return !backward || !badness_before(outside_backward_, {}, badness);
  }

  [[nodiscard]] static bool belong_together(const Event& a, const Event& b) {
    return a.call == b.call && is_backward(a.place) == is_backward(b.place) &&
           is_incoming(a.place) == is_incoming(b.place);
  }

  /// The first with NaN if there is one, else the first bad one. Gradients that flow to other
  /// modules are preferred to parameters' gradients: they say more.
  const Event& worst(std::size_t begin, std::size_t end, Badness badness) const {
    const Event* found = nullptr;
    for (std::size_t i = begin; i < end; ++i) {
      const Badness b = badness_of(scans_.stats(events_[i].scan));
      if (!(badness.nan ? b.nan : b.inf)) continue;
      if (events_[i].place != TensorPlace::weight_gradient) return events_[i];
      if (!found) found = &events_[i];
    }
    return *found;
  }

  void add_birth(const Event& event, ModuleCallId maker, bool backward, Badness badness) {
    Birth birth;
    birth.sighting = sighting_of(event);
    birth.kind = badness.nan ? BirthKind::nan : BirthKind::inf;
    if (maker == kNoCall) {
      birth.sighting.module.clear();
      birth.sighting.role = *calls_[event.call].path + " " + role_of(event);
      if (backward) {
        birth.sighting.phase = Phase::loss;
      } else if (!event.requires_grad) {  // no trained module computed it
        birth.kind = BirthKind::data;
        birth.sighting.module = *calls_[event.call].path;
        birth.sighting.role = role_of(event);
        birth.sighting.position.reset();  // it was bad before the pass
      }
    } else if (maker != event.call) {
      birth.sighting.module = *calls_[maker].path;
      birth.sighting.role = *calls_[event.call].path + " " + role_of(event);
    }
    if (is_known(birth)) return;
    birth.node = event.node;
    if (maker != kNoCall) {
      const Found& found = backward ? backward_[maker] : forward_[maker];
      if (badness.nan && (found.incoming.inf || found.inside.inf)) {
        birth.kind = BirthKind::nan_from_inf;
        birth.parent = latest_inf_birth();
      }
      birth.operands = operands_of(maker, backward);
    }
    collected_.births.push_back(std::move(birth));
    makers_.push_back(maker);
  }

  /// Further microbatches, and the second forward of a recomputed module, add nothing.
  [[nodiscard]] bool is_known(const Birth& birth) const {
    return std::ranges::any_of(collected_.births, [&](const Birth& other) {
      return other.sighting.module == birth.sighting.module &&
             other.sighting.phase == birth.sighting.phase &&
             other.sighting.role == birth.sighting.role &&
             (other.kind == BirthKind::inf) == (birth.kind == BirthKind::inf);
    });
  }

  [[nodiscard]] std::optional<int> latest_inf_birth() const {
    for (auto i = static_cast<int>(collected_.births.size()) - 1; i >= 0; --i) {
      if (collected_.births[static_cast<std::size_t>(i)].kind == BirthKind::inf) return i;
    }
    return std::nullopt;
  }

  [[nodiscard]] static std::string role_of(const Event& event) {
    switch (event.place) {
      case TensorPlace::input:
      case TensorPlace::output:
        return event.role;
      case TensorPlace::grad_output:
      case TensorPlace::grad_input:
        return "grad_" + event.role;
      case TensorPlace::weight_gradient:
        return "grad";
    }
    return event.role;
  }

  [[nodiscard]] Sighting sighting_of(const Event& event) const {
    Sighting sighting;
    sighting.iteration = iteration_;
    sighting.phase = is_backward(event.place) ? Phase::backward : Phase::forward;
    const Call& call = calls_[event.call];
    sighting.module = *call.path;
    sighting.microbatch = call.batch.microbatch;
    sighting.chunk = call.batch.chunk;
    sighting.role = role_of(event);
    if (event.parameter) {
      const auto found = parameter_names_.find(event.parameter);
      if (found != parameter_names_.end()) sighting.parameter = found->second;
    }
    sighting.dtype = dtype_name(event.type);
    sighting.shape.assign(event.shape.begin(), event.shape.end());
    sighting.stats = scans_.stats(event.scan);
    sighting.position = event.position;
    return sighting;
  }

  /// The call's incoming tensors.
  [[nodiscard]] std::vector<Operand> operands_of(ModuleCallId call, bool backward) const {
    std::vector<Operand> operands;
    const TensorPlace place = backward ? TensorPlace::grad_output : TensorPlace::input;
    for (const Event& event : events_) {
      if (event.call != call || event.place != place) continue;
      if (operands.size() == kMostOperands) break;
      Operand operand;
      operand.name = role_of(event);
      operand.dtype = dtype_name(event.type);
      operand.shape.assign(event.shape.begin(), event.shape.end());
      operand.stats = scans_.stats(event.scan);
      operands.push_back(std::move(operand));
    }
    return operands;
  }

  const std::vector<Call>& calls_;
  std::vector<Event> events_;
  const DeferredScans& scans_;
  std::int64_t iteration_;
  std::vector<Found> forward_, backward_;  // by call
  Badness outside_forward_, outside_backward_;
  std::unordered_map<const c10::TensorImpl*, std::string> parameter_names_;
  ModuleWatch::Collected collected_;
  std::vector<ModuleCallId> makers_;  // of the births, by index
};

/// The module that owns `name`: the longest called path above it; "" if none.
std::string owner_of(const std::string& name, const std::set<std::string>& called) {
  std::string path = name;
  for (auto dot = path.rfind('.'); dot != std::string::npos; dot = path.rfind('.')) {
    path.resize(dot);
    if (called.contains(path)) return path;
  }
  return "";
}

/// Attributes a birth in a module that owns, or computes with, a bad tensor to that tensor.
void blame(State& state, Explainer::Result& result, std::span<const NamedTensor> tensors,
           BirthKind kind) {
  std::set<std::string> called;
  for (const Call& call : state.calls) called.insert(*call.path);
  auto& births = result.collected.births;
  for (const auto& [name, tensor] : tensors) {
    if (!DeferredScans::can_scan(tensor)) continue;
    const auto owner = owner_of(name, called);
    for (std::size_t i = 0; i < births.size(); ++i) {
      Birth& birth = births[i];
      if (result.makers[i] == kNoCall || birth.sighting.phase != Phase::forward ||
          birth.kind == BirthKind::weight) {
        continue;
      }
      const auto& used = state.calls[result.makers[i]].parameters;
      // Tensors of no called module belong to the outermost one, whose path is its class name.
      if (birth.sighting.module != owner && !(owner.empty() && result.makers[i] == 0) &&
          std::ranges::find(used, tensor.unsafeGetTensorImpl()) == used.end()) {
        continue;
      }
      const auto scan = state.scans.scan(tensor);
      state.scans.read();
      const TensorStats stats = state.scans.stats(scan);
      if (!badness_of(stats).any()) break;
      birth.kind = kind;
      birth.parent.reset();
      birth.sighting.position.reset();  // it was bad before the pass
      birth.sighting.role = kind == BirthKind::weight ? "weight" : "buffer";
      birth.sighting.parameter = name;
      birth.sighting.dtype = dtype_name(tensor.scalar_type());
      birth.sighting.shape = tensor.sizes().vec();
      birth.sighting.stats = stats;
    }
  }
}

}  // namespace

ModuleWatch::Collected explain(State& state, std::int64_t iteration,
                               std::span<const NamedTensor> parameters,
                               std::span<const NamedTensor> buffers) {
  auto result = Explainer(state.calls, state.events, state.scans, iteration, parameters).run();
  blame(state, result, parameters, BirthKind::weight);
  blame(state, result, buffers, BirthKind::buffer);
  return std::move(result.collected);
}

}  // namespace nanlocator::module_watch
