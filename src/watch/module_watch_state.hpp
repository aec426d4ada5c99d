// A ModuleWatch's record of a step: the tree of module calls and the tensors at their boundaries,
// in execution order.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>  // complete, for the pointer in Edge

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "nanlocator/watch/microbatch_scope.hpp"
#include "nanlocator/watch/module_watch.hpp"
#include "nanlocator/watch/position.hpp"
#include "tensor/deferred_scans.hpp"

namespace nanlocator::module_watch {

inline constexpr ModuleCallId kNoCall = -1;

enum class TensorPlace : std::uint8_t { input, output, grad_output, grad_input, weight_gradient };

inline bool is_backward(TensorPlace place) {
  return place >= TensorPlace::grad_output;
}
/// True if the caller's code (or a sibling) made it, not the call's own.
inline bool is_incoming(TensorPlace place) {
  return place == TensorPlace::input || place == TensorPlace::grad_output;
}

/// One tensor at one place of one call.
struct Event {
  ModuleCallId call;
  TensorPlace place;
  DeferredScans::Id scan;
  at::ScalarType type;
  c10::SmallVector<std::int64_t, 4> shape;
  std::string role;                            // "input[0]", "output[0]"; gradients add "grad_"
  std::string node;                            // backward
  const c10::TensorImpl* parameter = nullptr;  // weight_gradient
  bool requires_grad = false;
  std::optional<std::int64_t> position = {};
};

struct Call {
  ModulePath path;
  ModuleCallId parent;
  std::uint64_t first_sequence_number;
  MicrobatchPlace batch;
  struct InputEdge {
    torch::autograd::Edge edge;
    at::Tensor leaf;  // instead of an edge: making its accumulator now would be an effect
    std::string role;
  };
  // Its inputs' edges in autograd's graph; only while the call runs.
  std::vector<InputEdge> inputs;
  // The parameters that its outputs were computed from; only to compare.
  std::vector<const c10::TensorImpl*> parameters;
  bool has_hidden_input = false;  // a floating-point input that cannot be scanned
};

/// State shared by the watch and its hooks. Autograd's graph may outlive the watch.
struct State {
  explicit State(int threads) : scans(threads) {}

  std::mutex mutex;
  bool is_alive = true;
  std::uint64_t step = 0;  // hooks of another step do nothing
  DeferredScans scans;
  std::vector<Call> calls;
  std::vector<Event> events;
  std::map<std::thread::id, std::vector<ModuleCallId>> running;  // by thread, innermost last
  std::unordered_map<ModulePath, ModuleCallId> latest;           // each path's latest call

  void see(ModuleCallId call, TensorPlace place, const at::Tensor& tensor, const std::string& role,
           const std::string& node, const c10::TensorImpl* parameter) {
    if (!DeferredScans::can_scan(tensor)) return;
    Event event{call, place, scans.scan(tensor), tensor.scalar_type(),   {},
                role, node,  parameter,          tensor.requires_grad(), current_position()};
    event.shape.assign(tensor.sizes().begin(), tensor.sizes().end());
    events.push_back(std::move(event));
  }

  void forget() {
    ++step;
    scans.clear();
    calls.clear();
    events.clear();
    running.clear();
    latest.clear();
  }
};

}  // namespace nanlocator::module_watch
