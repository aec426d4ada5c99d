// Differences between Torch versions in the room `operators` (see src/tensor/torch_versions.hpp).
#pragma once

#include "tensor/torch_versions.hpp"

namespace nanlocator::inline operators_room {

/// From 2.10 on, a call to the __torch_dispatch__ of a tensor's class has a frame inside it without
/// a schema, named "PythonSubclass".
inline constexpr bool kPythonSubclassHasAFrame = !NANLOCATOR_TORCH_BEFORE(2, 10);

/// True if a ProcessGroupGloo runs its collectives on this thread. Before 2.11 the thread has no
/// name, so this takes a backtrace (0.1 ms).
[[nodiscard]] bool is_thread_of_gloo() noexcept;

}  // namespace nanlocator::inline operators_room
