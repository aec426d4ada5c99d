// The work and memory of a kernel's reference, estimated before it is executed.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "nanlocator/replay/kernel_replay.hpp"
#include "replay/work.hpp"

namespace nanlocator::inline replay_room {

/// For one execution in float64, within a factor of a few. `bytes`: the peak, including its copies
/// of the arguments. Executes the reference on tensors without memory (meta) and counts the
/// operators. If it asks for a value, it is assumed to pass over its arguments a few times.
/// Computes and allocates nothing in proportion to the arguments.
[[nodiscard]] Work work_of_reference(const KernelReference& reference,
                                     const std::vector<at::Tensor>& arguments);

}  // namespace nanlocator::inline replay_room
