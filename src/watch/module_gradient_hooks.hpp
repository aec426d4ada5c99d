// Hooks of autograd's nodes that scan the gradients at a module call's boundary.
//
// They isolate the call's own part of a gradient. From the outputs' nodes, autograd's graph is
// walked through nodes made during the call (known by their sequence numbers;
// torch/csrc/autograd/function.h) to the edges that lead to an input's (node, output number) or to
// a parameter. A gradient passed along such an edge is this call's contribution alone; a tensor
// hook would see the sum over all consumers.
#pragma once

#include <torch/csrc/autograd/edge.h>

#include <memory>
#include <span>

#include "watch/module_watch_state.hpp"

namespace nanlocator::module_watch {

/// The edge of `tensor` in autograd's graph; invalid if autograd does not know it (a view whose
/// base was modified in place behind its back).
[[nodiscard]] torch::autograd::Edge edge_of(const at::Tensor& tensor);

/// Hooks the nodes at which gradients enter and leave the call. `state`'s mutex is held.
void hook_gradients(const std::shared_ptr<State>& state, ModuleCallId id,
                    std::span<const NamedTensor> outputs);

}  // namespace nanlocator::module_watch
