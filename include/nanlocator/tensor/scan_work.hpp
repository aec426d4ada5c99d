// What the scans of this process have cost since it started: for benchmarks, and for the check that
// what `tools/bench plan` derives of a configuration is what the engine does.
#pragma once

#include <cstdint>

namespace nanlocator::inline tensor_room {

struct ScanWork {
  std::int64_t launches = 0;  // one kernel each on CUDA
  std::int64_t tensors = 0;   // one slot each on CUDA
  std::int64_t bytes = 0;     // read of them
  std::int64_t plans = 0;     // made: each uploads its tables on CUDA, and waits for that
  std::int64_t waits = 0;     // of the host for a flag
};

/// From any thread.
[[nodiscard]] ScanWork scan_work() noexcept;

void count_scan(std::int64_t tensors, std::int64_t bytes) noexcept;  // by one launch
void count_plan() noexcept;
void count_wait() noexcept;

}  // namespace nanlocator::inline tensor_room
