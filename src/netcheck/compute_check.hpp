// Does a device compute correctly? A fixed set of operators on fixed inputs: each result against a
// reference in plain C++ doubles, within the bound that the format and the operator allow; each
// repeated, bit by bit; each with a fingerprint by which equal devices are compared with each
// other. On one CPU core well under a second; on a GPU the copies back dominate. Runs on the
// calling thread and on the device's current stream, and waits for it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace nanlocator::netcheck {

/// One operator in one format, as it came out.
struct OperatorCheck {
  std::string name;               // "gemm", "softmax", ...
  std::string dtype;              // "float32", ...
  double worst = 0;               // largest |error| / bound; 1 is still right
  std::uint64_t fingerprint = 0;  // of the first result's bits
};

struct ComputeCheck {
  std::vector<std::string> failures;     // sentences; empty where all is right
  std::vector<OperatorCheck> operators;  // in a fixed order: the same on every rank
  double seconds = 0;
  [[nodiscard]] bool is_right() const noexcept { return failures.empty(); }
};

/// Sees each result, in host memory, before it is compared: operator, dtype, re-run from 0. For
/// drills and tests, which plant an error there.
using AfterOperator = std::function<void(const std::string& name, const std::string& dtype,
                                         int rerun, const at::Tensor& result)>;

/// Checks `device` (CPU or CUDA; UsageError for others). TF32 and reductions in reduced precision
/// are turned off for it and restored afterwards. Identical devices with the same Torch build and
/// number of threads give identical fingerprints. What the device or its driver throws is a
/// failure, and the last: nothing further is asked of it.
[[nodiscard]] ComputeCheck check_compute(at::Device device, const AfterOperator& after = {});

}  // namespace nanlocator::netcheck
