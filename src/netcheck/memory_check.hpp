// Checks that memory keeps what is written to it. Writes patterns to a part of a device's free
// memory, reads them back and compares them on the device. The tests are those of MemTest86 (its
// "own address", "moving inversions, ones and zeros" and "moving inversions, 8-bit pattern"), which
// cuda_memtest (Shi et al., On testing GPU memory for hard and soft errors, SAAHPC 2009) brought to
// GPUs, over 64-bit words and in whole slices of memory. Runs on the calling thread and on the
// device's current stream, waits for it, and frees everything that it allocated.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace nanlocator::netcheck {

struct MemoryCheck {
  std::vector<std::string> failures;   // sentences, at most one per test; empty if all is right
  std::vector<std::string> completed;  // the tests that covered all of the memory in time
  std::size_t tests = 0;               // number of tests
  std::uint64_t bytes = 0;             // read back and compared by one test or more
  double seconds = 0;
  [[nodiscard]] bool is_right() const noexcept { return failures.empty(); }
};

/// Receives the words (int64, the chunks in order) after they are written and before they are read.
/// Drills and tests flip a bit here.
using AfterWrite =
    std::function<void(const std::string& test, const std::vector<at::Tensor>& chunks)>;

/// Checks `fraction` (0 to 0.95; 0: 64 MiB, or half of the free memory if less) of the free memory
/// of `device` (CPU or CUDA; UsageError for others): on CUDA cudaMemGetInfo's, on the CPU
/// /proc/meminfo's MemAvailable, or what the process's cgroup (version 2) leaves if less. Ranks on
/// one host share its memory: each takes its fraction, divided by their number. Stops after about
/// `seconds` (above 0), which the tests share equally; if that is too short for all of the memory,
/// they divide it among themselves. A failed allocation or any error of the device is a failure.
[[nodiscard]] MemoryCheck check_memory(at::Device device, double fraction, double seconds,
                                       const AfterWrite& after = {});

}  // namespace nanlocator::netcheck
