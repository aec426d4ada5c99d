#include "nanlocator/watch/module_watch.hpp"

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <mutex>
#include <thread>
#include <utility>

#include "watch/module_births.hpp"
#include "watch/module_gradient_hooks.hpp"
#include "watch/module_watch_state.hpp"

namespace nanlocator::inline watch_room {

using module_watch::Call;
using module_watch::kNoCall;
using module_watch::State;
using module_watch::TensorPlace;

namespace {

/// A step of 64 microbatches of 2000 modules. A process that calls modules without ever starting a
/// step (evaluation) forgets earlier calls at this limit, so that its memory stays bounded.
constexpr std::size_t kMostCalls = std::size_t{1} << 17;

/// A subclass or wrapper that hides its memory, so that its values are unknown.
bool is_hidden(const at::Tensor& tensor) {
  return tensor.defined() && (tensor.is_floating_point() || tensor.is_complex()) &&
         !DeferredScans::can_scan(tensor);
}

}  // namespace

struct ModuleWatch::Impl {
  explicit Impl(int threads) : state(std::make_shared<State>(threads)) {}
  std::shared_ptr<State> state;
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
  const bool is_in_backward = torch::autograd::get_current_graph_task_id() != -1;
  if (running.empty() && !is_in_backward && state.calls.size() >= kMostCalls) state.forget();

  Call call{path,
            running.empty() ? kNoCall : running.back(),
            at::sequence_number::peek(),
            current_microbatch(),
            {},
            {}};
  // A module that is recomputed in backward belongs to the parent of its first call.
  if (running.empty() && is_in_backward) {
    if (const auto first = state.latest.find(path); first != state.latest.end()) {
      call.parent = state.calls[first->second].parent;
    }
  }
  const auto id = static_cast<ModuleCallId>(state.calls.size());
  const bool has_graph = at::GradMode::is_enabled();
  for (const auto& [role, tensor] : inputs) {
    state.see(id, TensorPlace::input, tensor, role, "", nullptr);
    call.has_hidden_input |= is_hidden(tensor);
    if (!has_graph || !DeferredScans::can_scan(tensor) || !tensor.requires_grad()) continue;
    if (tensor.is_leaf()) {
      call.inputs.push_back({{}, tensor, role});
    } else {
      call.inputs.push_back({module_watch::edge_of(tensor), {}, role});
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
  if (frame == running.end()) return;  // entered in a forgotten step
  for (const auto& [role, tensor] : outputs) {
    state->see(call, TensorPlace::output, tensor, role, "", nullptr);
  }
  if (at::GradMode::is_enabled()) module_watch::hook_gradients(state, call, outputs);
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
  state.scans.read();
  return module_watch::explain(state, iteration, parameters, buffers);
}

}  // namespace nanlocator::inline watch_room
