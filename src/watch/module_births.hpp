// Finds the module call that made the first bad tensor.
//
// The events are replayed over the tree of calls. In forward, the caller's code makes a call's
// inputs and its own code the outputs; in backward, the caller's code makes grad_outputs and its
// own the grad_inputs. If a call's incoming tensors are finite, the first bad tensor inside it was
// born there.
#pragma once

#include <cstdint>
#include <span>

#include "watch/module_watch_state.hpp"

namespace nanlocator::module_watch {

/// Births and sightings of the step in `state`, whose scans have been read and whose mutex is held.
/// A birth in a module that owns, or computes with, a bad parameter or buffer is attributed to that
/// tensor.
[[nodiscard]] ModuleWatch::Collected explain(State& state, std::int64_t iteration,
                                             std::span<const NamedTensor> parameters,
                                             std::span<const NamedTensor> buffers);

}  // namespace nanlocator::module_watch
