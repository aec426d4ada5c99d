// The memory of the host that this process may still use.
#pragma once

#include <cstdint>

namespace nanlocator::inline replay_room {

/// Bytes: what the system could supply without swapping (proc(5), MemAvailable) or, if less, what
/// is left below the limit of the process's control group. The largest number if the system does
/// not say.
[[nodiscard]] std::uint64_t free_host_memory();

}  // namespace nanlocator::inline replay_room
