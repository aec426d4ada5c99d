// Calls make a tree (a module's call, the calls inside it); what was seen of them is an event list
// in execution order. `collect` replays the events over the tree: in forward a call's inputs come
// from its caller's code and its outputs from its own; in backward it is grad_outputs that come
// from the caller's and grad_inputs from its own. The first bad thing inside a call whose own
// incoming tensors were good was born there.
//
// A call's own part of a gradient: from the outputs' nodes autograd's graph is walked to the edges
// that lead to an input's (node, output number), or to a parameter, through nodes made during the
// call (their sequence numbers; torch/csrc/autograd/function.h). What a node hands to such an edge
// is this call's contribution and no other consumer's, unlike what a tensor hook sees.
#include "nanlocator/trace/module_watch.hpp"

#include <ATen/SequenceNumber.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "gradients/tensor_access.hpp"
#include "nanlocator/trace/microbatch_scope.hpp"
#include "trace/deferred_looks.hpp"

namespace nanlocator {
namespace {

namespace autograd = torch::autograd;

constexpr ModuleCallId kNoCall = -1;
/// A step of 64 microbatches of 2000 modules. A process that calls modules without ever starting a
/// step (evaluation) forgets what came before, so that its memory stays bounded.
constexpr std::size_t kMostCalls = std::size_t{1} << 17;

enum class Place : std::uint8_t { input, output, grad_output, grad_input, weight_gradient };

bool is_backward(Place place) {
  return place >= Place::grad_output;
}
/// Comes from the caller's code (or a sibling), not from the call's own.
bool is_incoming(Place place) {
  return place == Place::input || place == Place::grad_output;
}

/// One tensor, seen at one place of one call.
struct Event {
  ModuleCallId call;
  Place place;
  DeferredLooks::Id look;
  at::ScalarType type;
  c10::SmallVector<std::int64_t, 4> shape;
  std::string role;                            // of the input or output; gradients add "grad_"
  std::string node;                            // backward
  const c10::TensorImpl* parameter = nullptr;  // weight_gradient
  bool requires_grad = false;
};

struct Call {
  ModulePath path;
  ModuleCallId parent;
  std::uint64_t first_sequence_number;
  MicrobatchPlace batch;
  // Only while the call runs: where its inputs hang in autograd's graph.
  struct InputEdge {
    autograd::Edge edge;
    at::Tensor leaf;  // instead of an edge: making its accumulator now would be an effect
    std::string role;
  };
  std::vector<InputEdge> inputs;
  std::vector<const c10::TensorImpl*>
      parameters;  // that its outputs were computed from; to compare
};

/// The part of a call in the graph's backward: `gradient` of what goes to an edge.
struct Contribution {
  std::uint32_t output;  // of the node
  Place place;
  std::string role;
  const c10::TensorImpl* parameter;
};

/// What the hooks share with the watch, which may be gone before autograd's graph is.
struct State {
  explicit State(int threads) : looks(threads) {}

  std::mutex mutex;
  bool is_alive = true;
  std::uint64_t step = 0;  // hooks of another step do nothing
  DeferredLooks looks;
  std::vector<Call> calls;
  std::vector<Event> events;
  std::map<std::thread::id, std::vector<ModuleCallId>> running;  // by thread, innermost last
  std::unordered_map<ModulePath, ModuleCallId> latest;           // the latest call of each path

  void see(ModuleCallId call, Place place, const at::Tensor& tensor, const std::string& role,
           const std::string& node, const c10::TensorImpl* parameter) {
    if (!DeferredLooks::can_look(tensor)) return;
    Event event{call, place, looks.look(tensor), tensor.scalar_type(),  {},
                role, node,  parameter,          tensor.requires_grad()};
    event.shape.assign(tensor.sizes().begin(), tensor.sizes().end());
    events.push_back(std::move(event));
  }

  void forget() {
    ++step;
    looks.clear();
    calls.clear();
    events.clear();
    running.clear();
    latest.clear();
  }
};

/// Of a node whose outputs belong to a call: sees the gradients of these outputs.
class GradOutputHook : public autograd::FunctionPreHook {
 public:
  GradOutputHook(std::shared_ptr<State> state, ModuleCallId call, std::string node)
      : state_(std::move(state)), step_(state_->step), call_(call), node_(std::move(node)) {}

  void add(std::uint32_t output, std::string role) { roles_.emplace_back(output, std::move(role)); }

  autograd::variable_list operator()(const autograd::variable_list& gradients) override {
    const std::lock_guard lock(state_->mutex);
    if (state_->is_alive && state_->step == step_) {
      for (const auto& [output, role] : roles_) {
        if (output < gradients.size()) {
          state_->see(call_, Place::grad_output, gradients[output], role, node_, nullptr);
        }
      }
    }
    return gradients;
  }
  // Compiled autograd calls no hook of ours, and need not know.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}

 private:
  std::shared_ptr<State> state_;
  std::uint64_t step_;
  ModuleCallId call_;
  std::string node_;
  std::vector<std::pair<std::uint32_t, std::string>> roles_;
};

/// Of a node at a call's boundary: sees what it hands to the call's inputs and to parameters.
class ContributionHook : public autograd::FunctionPostHook {
 public:
  ContributionHook(std::shared_ptr<State> state, ModuleCallId call, std::string node,
                   std::vector<Contribution> contributions)
      : state_(std::move(state)),
        step_(state_->step),
        call_(call),
        node_(std::move(node)),
        contributions_(std::move(contributions)) {}

  autograd::variable_list operator()(const autograd::variable_list& outputs,
                                     const autograd::variable_list& /*inputs*/) override {
    const std::lock_guard lock(state_->mutex);
    if (state_->is_alive && state_->step == step_) {
      for (const auto& c : contributions_) {
        if (c.output < outputs.size()) {
          state_->see(call_, c.place, outputs[c.output], c.role, node_, c.parameter);
        }
      }
    }
    return outputs;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}

 private:
  std::shared_ptr<State> state_;
  std::uint64_t step_;
  ModuleCallId call_;
  std::string node_;
  std::vector<Contribution> contributions_;
};

/// Invalid where autograd cannot tell (a view whose base was modified in place behind its back).
autograd::Edge edge_of(const at::Tensor& tensor) {
  try {
    return autograd::impl::gradient_edge(tensor);
  } catch (const c10::Error&) {
    return {};
  }
}

bool was_made_during(const Call& call, const autograd::Node& node) {
  // AccumulateGrad's number is the largest there is.
  return node.sequence_nr() >= call.first_sequence_number &&
         node.sequence_nr() != std::numeric_limits<std::uint64_t>::max();
}

const autograd::AccumulateGrad* accumulator_of(const autograd::Edge& edge) {
  return edge.function->sequence_nr() == std::numeric_limits<std::uint64_t>::max()
             ? dynamic_cast<const autograd::AccumulateGrad*>(edge.function.get())
             : nullptr;
}

const Call::InputEdge* input_at(const Call& call, const autograd::Edge& edge) {
  for (const auto& input : call.inputs) {
    if (input.edge.is_valid() && input.edge == edge) return &input;
  }
  return nullptr;
}

/// Hooks the nodes through which `call` takes and gives gradients.
void hook_gradients(const std::shared_ptr<State>& state, ModuleCallId id,
                    std::span<const NamedTensor> outputs) {
  Call& call = state->calls[id];
  for (auto& input : call.inputs) {
    if (!input.leaf.defined()) continue;
    if (auto accumulator = autograd::impl::try_get_grad_accumulator(input.leaf)) {
      input.edge = {std::move(accumulator), 0};
    }
  }
  std::vector<autograd::Node*> to_visit;
  std::vector<std::pair<autograd::Node*, std::unique_ptr<GradOutputHook>>> of_outputs;
  for (const auto& [role, tensor] : outputs) {
    if (!DeferredLooks::can_look(tensor) || !tensor.requires_grad() || tensor.is_leaf()) continue;
    const autograd::Edge edge = edge_of(tensor);
    // An output that the call did not compute: an input handed on, or a cached value.
    if (!edge.is_valid() || !was_made_during(call, *edge.function) || input_at(call, edge)) {
      continue;
    }
    auto* const node = edge.function.get();
    auto found = std::ranges::find(of_outputs, node, [](const auto& n) { return n.first; });
    if (found == of_outputs.end()) {
      of_outputs.emplace_back(node, std::make_unique<GradOutputHook>(state, id, node->name()));
      found = of_outputs.end() - 1;
      to_visit.push_back(node);
    }
    found->second->add(edge.input_nr, role);
  }
  for (auto& [node, hook] : of_outputs) node->add_pre_hook(std::move(hook));

  std::unordered_set<autograd::Node*> visited(to_visit.begin(), to_visit.end());
  std::vector<Contribution> contributions;
  while (!to_visit.empty()) {
    autograd::Node* const node = to_visit.back();
    to_visit.pop_back();
    contributions.clear();
    const auto& edges = node->next_edges();
    for (std::uint32_t i = 0; i < edges.size(); ++i) {
      const autograd::Edge& edge = edges[i];
      if (!edge.is_valid()) continue;
      if (const auto* input = input_at(call, edge)) {
        contributions.push_back({i, Place::grad_input, input->role, nullptr});
      } else if (const auto* accumulator = accumulator_of(edge)) {
        const auto* parameter = accumulator->variable.unsafeGetTensorImpl();
        contributions.push_back({i, Place::weight_gradient, "", parameter});
        call.parameters.push_back(parameter);
      } else if (was_made_during(call, *edge.function) &&
                 visited.insert(edge.function.get()).second) {
        to_visit.push_back(edge.function.get());
      }
    }
    if (!contributions.empty()) {
      node->add_post_hook(
          std::make_unique<ContributionHook>(state, id, node->name(), contributions));
    }
  }
}

// ---- Explaining the events ---------------------------------------------------------------------

/// 0 where masked and -Inf where not, or the other way round: added to attention scores on purpose.
bool is_additive_mask(const TensorStats& stats) {
  return stats.nan == 0 && stats.pos_inf == 0 && stats.absmax == 0 && stats.zeros > 0;
}

/// Which kinds of badness.
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

/// What has been found bad about one call so far, in one direction.
struct Found {
  Badness incoming;
  Badness inside;  // of the call's own outgoing tensors and of everything of the calls inside it
};

/// Of modules that end in one node the innermost is hooked first, and told first. What comes in
/// comes to the outermost first.
std::vector<Event> from_outside_in(std::vector<Event> events) {
  const auto is_grad_output = [](const Event& e) { return e.place == Place::grad_output; };
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
  Explainer(const std::vector<Call>& calls, std::vector<Event> events, const DeferredLooks& looks,
            std::int64_t iteration, std::span<const NamedTensor> parameters)
      : calls_(calls),
        events_(from_outside_in(std::move(events))),
        looks_(looks),
        iteration_(iteration),
        forward_(calls.size()),
        backward_(calls.size()) {
    for (const auto& [name, tensor] : parameters) {
      if (tensor.defined()) parameter_names_.emplace(tensor.unsafeGetTensorImpl(), name);
    }
  }

  struct Result {
    ModuleWatch::Collected collected;
    std::vector<ModuleCallId> makers;  // of the births
  };

  Result run() {
    for (std::size_t begin = 0; begin < events_.size();) {
      // What a call takes in at once, or gives out at once, is one observation.
      std::size_t end = begin;
      Badness badness;
      while (end < events_.size() && belong_together(events_[begin], events_[end])) {
        badness.add(badness_of(looks_.stats(events_[end].look)));
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
      if (badness_of(looks_.stats(events_[i].look)).any()) {
        collected_.sightings.push_back(sighting_of(events_[i]));
      }
    }
    const Event& event = worst(begin, end, badness);
    const bool backward = is_backward(event.place);
    auto& found = backward ? backward_ : forward_;
    // Made by the code of `maker`: the call's own, or for what comes in its caller's.
    const ModuleCallId maker = is_incoming(event.place) ? calls_[event.call].parent : event.call;
    const bool is_new =
        maker == kNoCall ? is_new_outside(backward, badness) : is_new_in(maker, backward, badness);
    for (auto& birth : collected_.births) birth.reached = {"module " + *calls_[event.call].path};
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

  [[nodiscard]] bool is_new_in(ModuleCallId maker, bool backward, Badness badness) const {
    const Found& found = backward ? backward_[maker] : forward_[maker];
    if (backward) {
      // Backward reads what forward has saved: then it is forward's.
      const Found& forward = forward_[maker];
      if (badness_before(forward.incoming, forward.inside, badness)) return false;
    }
    return !badness_before(found.incoming, found.inside, badness);
  }

  /// Whether what was there before accounts for `badness`: NaN for anything, Inf for Inf.
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

  /// The first one with NaN, where there is NaN; else the first bad one. What goes on to other
  /// modules tells more than what ends in a parameter.
  const Event& worst(std::size_t begin, std::size_t end, Badness badness) const {
    const Event* found = nullptr;
    for (std::size_t i = begin; i < end; ++i) {
      const Badness b = badness_of(looks_.stats(events_[i].look));
      if (!(badness.nan ? b.nan : b.inf)) continue;
      if (events_[i].place != Place::weight_gradient) return events_[i];
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
      birth.sighting.role = *calls_[event.call].path + " " + birth.sighting.role;
      if (backward) {
        birth.sighting.phase = Phase::loss;
      } else if (!event.requires_grad) {  // nothing that is trained has computed it
        birth.kind = BirthKind::data;
        birth.sighting.module = *calls_[event.call].path;
        birth.sighting.role = role_of(event);
      }
    } else if (maker != event.call) {
      birth.sighting.module = *calls_[maker].path;
      birth.sighting.role = *calls_[event.call].path + " " + birth.sighting.role;
    }
    if (is_known(birth)) return;
    birth.node = event.node;
    if (maker != kNoCall) {
      const Found& found = backward ? backward_[maker] : forward_[maker];
      if (badness.nan && (found.incoming.inf || found.inside.inf)) {
        birth.kind = BirthKind::nan_from_inf;
        birth.parent = latest_inf_birth();
      }
      birth.inputs = inputs_of(maker, backward);
    }
    collected_.births.push_back(std::move(birth));
    makers_.push_back(maker);
  }

  /// Further microbatches, and the second forward of a recomputed module, tell nothing new.
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
      case Place::input:
      case Place::output:
        return event.role;
      case Place::grad_output:
      case Place::grad_input:
        return "grad_" + event.role;
      case Place::weight_gradient:
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
    sighting.stats = looks_.stats(event.look);
    return sighting;
  }

  /// One line for each tensor that came in.
  [[nodiscard]] std::vector<std::string> inputs_of(ModuleCallId call, bool backward) const {
    std::vector<std::string> lines;
    const Place place = backward ? Place::grad_output : Place::input;
    for (const Event& event : events_) {
      if (event.call != call || event.place != place) continue;
      std::ostringstream line;
      line << role_of(event) << ": " << dtype_name(event.type) << " [";
      for (std::size_t d = 0; d < event.shape.size(); ++d) {
        line << (d ? ", " : "") << event.shape[d];
      }
      const TensorStats& stats = looks_.stats(event.look);
      line << "], ";
      if (stats.is_finite()) {
        line << "finite";
      } else {
        line << stats.nan << " NaN, " << stats.pos_inf + stats.neg_inf << " Inf";
      }
      lines.push_back(line.str());
    }
    return lines;
  }

  const std::vector<Call>& calls_;
  std::vector<Event> events_;
  const DeferredLooks& looks_;
  std::int64_t iteration_;
  std::vector<Found> forward_, backward_;  // by call
  Badness outside_forward_, outside_backward_;
  std::unordered_map<const c10::TensorImpl*, std::string> parameter_names_;
  ModuleWatch::Collected collected_;
  std::vector<ModuleCallId> makers_;  // of the births
};

/// The module that owns `name`: the longest called path above it, "" for none.
std::string owner_of(const std::string& name, const std::set<std::string>& called) {
  std::string path = name;
  for (auto dot = path.rfind('.'); dot != std::string::npos; dot = path.rfind('.')) {
    path.resize(dot);
    if (called.contains(path)) return path;
  }
  return "";
}

}  // namespace

struct ModuleWatch::Impl {
  explicit Impl(int threads) : state(std::make_shared<State>(threads)) {}
  std::shared_ptr<State> state;

  /// A birth in a module that owns, or computes with, a bad tensor is that tensor's.
  void blame(Explainer::Result& result, std::span<const NamedTensor> tensors, BirthKind kind) {
    std::set<std::string> called;
    for (const Call& call : state->calls) called.insert(*call.path);
    auto& births = result.collected.births;
    for (const auto& [name, tensor] : tensors) {
      if (!DeferredLooks::can_look(tensor)) continue;
      const auto owner = owner_of(name, called);
      for (std::size_t i = 0; i < births.size(); ++i) {
        Birth& birth = births[i];
        if (result.makers[i] == kNoCall || birth.sighting.phase != Phase::forward ||
            birth.kind == BirthKind::weight) {
          continue;
        }
        const auto& used = state->calls[result.makers[i]].parameters;
        // What belongs to no called module belongs to the outermost one, which goes by its class.
        if (birth.sighting.module != owner && !(owner.empty() && result.makers[i] == 0) &&
            std::ranges::find(used, tensor.unsafeGetTensorImpl()) == used.end()) {
          continue;
        }
        const auto look = state->looks.look(tensor);
        state->looks.read();
        const TensorStats stats = state->looks.stats(look);
        if (!badness_of(stats).any()) break;
        birth.kind = kind;
        birth.parent.reset();
        birth.sighting.role = kind == BirthKind::weight ? "weight" : "buffer";
        birth.sighting.parameter = name;
        birth.sighting.dtype = dtype_name(tensor.scalar_type());
        birth.sighting.shape = tensor.sizes().vec();
        birth.sighting.stats = stats;
      }
    }
  }
};

ModuleWatch::ModuleWatch(int threads) : impl_(std::make_unique<Impl>(threads)) {}

ModuleWatch::~ModuleWatch() {
  const std::lock_guard lock(impl_->state->mutex);
  impl_->state->is_alive = false;
  impl_->state->forget();
}

void ModuleWatch::begin_step() {
  const std::lock_guard lock(impl_->state->mutex);
  impl_->state->forget();
}

ModuleCallId ModuleWatch::enter(ModulePath path, std::span<const NamedTensor> inputs) {
  State& state = *impl_->state;
  const std::lock_guard lock(state.mutex);
  auto& running = state.running[std::this_thread::get_id()];
  const bool is_in_backward = autograd::get_current_graph_task_id() != -1;
  if (running.empty() && !is_in_backward && state.calls.size() >= kMostCalls) state.forget();

  Call call{path,
            running.empty() ? kNoCall : running.back(),
            at::sequence_number::peek(),
            current_microbatch(),
            {},
            {}};
  // A module that is recomputed in backward belongs where it was called first.
  if (running.empty() && is_in_backward) {
    if (const auto first = state.latest.find(path); first != state.latest.end()) {
      call.parent = state.calls[first->second].parent;
    }
  }
  const auto id = static_cast<ModuleCallId>(state.calls.size());
  const bool has_graph = at::GradMode::is_enabled();
  for (const auto& [role, tensor] : inputs) {
    state.see(id, Place::input, tensor, role, "", nullptr);
    if (!has_graph || !DeferredLooks::can_look(tensor) || !tensor.requires_grad()) continue;
    if (tensor.is_leaf()) {
      call.inputs.push_back({{}, tensor, role});
    } else {
      call.inputs.push_back({edge_of(tensor), {}, role});
    }
  }
  state.calls.push_back(std::move(call));
  state.running[std::this_thread::get_id()].push_back(id);
  state.latest[path] = id;
  return id;
}

void ModuleWatch::leave(ModuleCallId call, std::span<const NamedTensor> outputs) {
  const auto& state = impl_->state;
  const std::lock_guard lock(state->mutex);
  auto& running = state->running[std::this_thread::get_id()];
  const auto frame = std::ranges::find(running, call);
  if (frame == running.end()) return;  // entered in a step that has been forgotten
  for (const auto& [role, tensor] : outputs) {
    state->see(call, Place::output, tensor, role, "", nullptr);
  }
  if (at::GradMode::is_enabled()) hook_gradients(state, call, outputs);
  for (auto inner = frame; inner != running.end(); ++inner) state->calls[*inner].inputs.clear();
  running.erase(frame, running.end());
}

void ModuleWatch::abandon(ModuleCallId call) {
  State& state = *impl_->state;
  const std::lock_guard lock(state.mutex);
  auto& running = state.running[std::this_thread::get_id()];
  const auto frame = std::ranges::find(running, call);
  if (frame == running.end()) return;
  for (auto inner = frame; inner != running.end(); ++inner) state.calls[*inner].inputs.clear();
  running.erase(frame, running.end());
}

ModuleWatch::Collected ModuleWatch::collect(std::int64_t iteration,
                                            std::span<const NamedTensor> parameters,
                                            std::span<const NamedTensor> buffers) {
  State& state = *impl_->state;
  const std::lock_guard lock(state.mutex);
  state.looks.read();
  auto result = Explainer(state.calls, state.events, state.looks, iteration, parameters).run();
  impl_->blame(result, parameters, BirthKind::weight);
  impl_->blame(result, buffers, BirthKind::buffer);
  return std::move(result.collected);
}

}  // namespace nanlocator
