// The threads that share a scan with its caller.
//
// Threads are created at first use, kept for the life of the process and parked on a condition
// variable between scans. A process that forks gets a new pool: threads do not survive fork().
#pragma once

#include <functional>

namespace nanlocator::inline scan_room {

/// Runs `work` on this thread and, at the same time, on up to `more` others; returns when all of
/// them have come back. Late threads are not waited for: one that wakes up after the caller has
/// finished finds nothing to do. So `work` must be complete when any one call of it has returned
/// and no call is under way, as it is when all of them take items from one counter. `work` must not
/// throw.
///
/// Callable from any thread. While the pool serves another caller, or where the system gives no
/// thread, `work` runs on this thread alone.
void run_shared(int more, const std::function<void()>& work);

}  // namespace nanlocator::inline scan_room
