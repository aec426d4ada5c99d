// The gradients at a module call's boundary, seen by hooks of autograd's nodes.
//
// A call's own part of a gradient: from the outputs' nodes autograd's graph is walked to the edges
// that lead to an input's (node, output number), or to a parameter, through nodes made during the
// call (their sequence numbers; torch/csrc/autograd/function.h). What a node hands to such an edge
// is this call's contribution and no other consumer's, unlike what a tensor hook sees.
#pragma once

#include <torch/csrc/autograd/edge.h>

#include <memory>
#include <span>

#include "watch/module_watch_state.hpp"

namespace nanlocator::module_watch {

/// Where `tensor` hangs in autograd's graph; invalid where autograd cannot tell (a view whose base
/// was modified in place behind its back).
[[nodiscard]] torch::autograd::Edge edge_of(const at::Tensor& tensor);

/// Hooks the nodes through which the call takes and gives gradients. `state`'s mutex is held.
void hook_gradients(const std::shared_ptr<State>& state, ModuleCallId id,
                    std::span<const NamedTensor> outputs);

}  // namespace nanlocator::module_watch
