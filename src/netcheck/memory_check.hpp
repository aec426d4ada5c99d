// Does memory keep what is written to it? Patterns are written to a part of a device's free memory,
// read back and compared on the device. The tests are those of MemTest86 (its "own address",
// "moving inversions, ones and zeros" and "moving inversions, 8-bit pattern"), which cuda_memtest
// (Shi et al., On testing GPU memory for hard and soft errors, SAAHPC 2009) brought to GPUs, over
// 64-bit words and in whole slices of memory. Runs on the calling thread and on the device's
// current stream, waits for it, and frees all that it has allocated.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace nanlocator::netcheck {

struct MemoryCheck {
  std::vector<std::string> failures;   // sentences, at most one per test; empty where all is right
  std::vector<std::string> completed;  // the tests that reached the end of the memory in time
  std::size_t tests = 0;               // that there are
  std::uint64_t bytes = 0;             // read back and compared by one test or more
  double seconds = 0;
  [[nodiscard]] bool is_right() const noexcept { return failures.empty(); }
};

/// Sees the words (int64, the chunks in order) after they have been written and before they are
/// read. For drills and tests, which flip a bit there.
using AfterWrite =
    std::function<void(const std::string& test, const std::vector<at::Tensor>& chunks)>;

/// Checks `fraction` (0 to 0.95; 0: 64 MiB, or half of what is free where that is less) of the
/// memory of `device` (CPU or CUDA; UsageError for others) that is free now: on CUDA
/// cudaMemGetInfo's, on the CPU /proc/meminfo's MemAvailable, or what the process's cgroup (version
/// 2) leaves where that is less. Ranks that share a host share that memory: each takes its
/// fraction, divided by their number. Stops after about `seconds` (above 0), of which the tests
/// have equal shares; where these are too short for all of the memory, they divide it among
/// themselves. An allocation that fails is a failure; so is whatever the device throws.
[[nodiscard]] MemoryCheck check_memory(at::Device device, double fraction, double seconds,
                                       const AfterWrite& after = {});

}  // namespace nanlocator::netcheck
