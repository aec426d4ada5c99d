// How much a kernel's reference computes, and how much memory it takes, before it is executed.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "nanlocator/replay/kernel_replay.hpp"
#include "replay/work.hpp"

namespace nanlocator::inline replay_room {

/// Of one execution in float64, within a factor of a few. `bytes`: the most that it has at once,
/// with its copies of the arguments. It is executed on tensors without memory (meta), whose
/// operators are counted; where it asks for a value, it is taken for one that passes over its
/// arguments a few times. Nothing is computed or allocated in proportion to the arguments.
[[nodiscard]] Work work_of_reference(const KernelReference& reference,
                                     const std::vector<at::Tensor>& arguments);

}  // namespace nanlocator::inline replay_room
