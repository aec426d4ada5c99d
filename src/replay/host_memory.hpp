// How much memory this process may still take of the host.
#pragma once

#include <cstdint>

namespace nanlocator::inline replay_room {

/// Bytes: what the system could give without swapping (proc(5), MemAvailable), or what is left
/// below the limit of the process's control group where that is less. The largest number where the
/// system does not say.
[[nodiscard]] std::uint64_t free_host_memory();

}  // namespace nanlocator::inline replay_room
