// The work of this process's scans since it started: for benchmarks, and to check the engine
// against what `tools/bench plan` derives from a configuration.
#pragma once

#include <cstdint>

namespace nanlocator::inline tensor_room {

struct ScanWork {
  std::int64_t launches = 0;  // one kernel each on CUDA
  std::int64_t tensors = 0;   // one slot each on CUDA
  std::int64_t bytes = 0;     // read from them
  std::int64_t plans = 0;     // plans made: each uploads its tables on CUDA, and waits for that
  std::int64_t waits = 0;     // of the host, for a flag
};

/// From any thread.
[[nodiscard]] ScanWork scan_work() noexcept;

void count_scan(std::int64_t tensors, std::int64_t bytes) noexcept;  // for one launch
void count_plan() noexcept;
void count_wait() noexcept;

}  // namespace nanlocator::inline tensor_room
