// The threads that share a scan with its caller.
//
// Threads are created at first use, kept for the life of the process and parked on a condition
// variable between scans. A forked process gets a new pool: threads do not survive fork().
#pragma once

#include <functional>

namespace nanlocator::inline scan_room {

/// Runs `work` on this thread and at the same time on up to `more` others; returns when all calls
/// have returned. Does not wait for late threads: one that wakes up after the caller has finished
/// finds nothing to do. So `work` must be complete once any call of it has returned and none is
/// running, as when all calls take items from one counter. `work` must not throw.
///
/// Callable from any thread. While the pool serves another caller, or if the system gives no
/// thread, `work` runs on this thread alone.
void run_shared(int more, const std::function<void()>& work);

}  // namespace nanlocator::inline scan_room
