// Checks that a device computes correctly: a fixed set of operators on fixed inputs. Each result is
// compared with a reference in plain C++ doubles, within the bound that format and operator allow;
// each operator is repeated, bit for bit; each result has a fingerprint by which equal devices are
// compared. Well under a second on one CPU core; on a GPU the copies back dominate. Runs on the
// calling thread and on the device's current stream, and waits for it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace nanlocator::netcheck {

/// The result of one operator in one format.
struct OperatorCheck {
  std::string name;               // "gemm", "softmax", ...
  std::string dtype;              // "float32", ...
  double worst = 0;               // largest |error| / bound; up to 1 is right
  std::uint64_t fingerprint = 0;  // of the first result's bits
};

struct ComputeCheck {
  std::vector<std::string> failures;     // sentences; empty if all is right
  std::vector<OperatorCheck> operators;  // in a fixed order: the same on every rank
  double seconds = 0;
  [[nodiscard]] bool is_right() const noexcept { return failures.empty(); }
};

/// Receives each result, in host memory, before it is compared: operator, dtype, re-run from 0.
/// Drills and tests plant an error here.
using AfterOperator = std::function<void(const std::string& name, const std::string& dtype,
                                         int rerun, const at::Tensor& result)>;

/// Checks `device` (CPU or CUDA; UsageError for others). Turns TF32 and reduced-precision
/// reductions off and restores them. Identical devices with the same Torch build and number of
/// threads give identical fingerprints. An error of the device or its driver is a failure and ends
/// the check of this device.
[[nodiscard]] ComputeCheck check_compute(at::Device device, const AfterOperator& after = {});

}  // namespace nanlocator::netcheck
