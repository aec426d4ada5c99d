// Where versions of Torch differ for the room `operators` (src/tensor/torch_versions.hpp).
#pragma once

#include "tensor/torch_versions.hpp"

namespace nanlocator::inline operators_room {

/// From 2.10 on a call that goes to the __torch_dispatch__ of a tensor's class has a frame inside
/// it that says so: without a schema, of the name "PythonSubclass".
inline constexpr bool kPythonSubclassHasAFrame = !NANLOCATOR_TORCH_BEFORE(2, 10);

/// Whether this thread is one on which a ProcessGroupGloo runs its collectives. Before 2.11 the
/// thread has no name, and a backtrace is asked (0.1 ms).
[[nodiscard]] bool is_thread_of_gloo() noexcept;

}  // namespace nanlocator::inline operators_room
