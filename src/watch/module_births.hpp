// Which module call made the first bad tensor.
//
// The events are replayed over the tree of calls: in forward a call's inputs come from its caller's
// code and its outputs from its own; in backward it is grad_outputs that come from the caller's and
// grad_inputs from its own. The first bad thing inside a call whose own incoming tensors were good
// was born there.
#pragma once

#include <cstdint>
#include <span>

#include "watch/module_watch_state.hpp"

namespace nanlocator::module_watch {

/// Births and sightings of the step that `state` holds. Its scans have been read; its mutex is
/// held. A birth in a module that owns, or computes with, a bad parameter or buffer is that
/// tensor's.
[[nodiscard]] ModuleWatch::Collected explain(State& state, std::int64_t iteration,
                                             std::span<const NamedTensor> parameters,
                                             std::span<const NamedTensor> buffers);

}  // namespace nanlocator::module_watch
