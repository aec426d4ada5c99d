// The scan in ATen operators, for devices without kernels of nanlocator.
//
// In: a strided tensor, floating-point or complex, on any device. Out: its statistics as small
// tensors on that device, read by `read_stats`; nothing waits in between. Equal to the kernels'
// stats, except for the order in which squares are added. Cost: about twenty operators per 2^20
// elements, and the temporaries of one such chunk (8 bytes an element each), however large the
// tensor is. A tensor that is not contiguous also needs a copy of the chunk.
#pragma once

#include <ATen/core/Tensor.h>

#include "nanlocator/scan/tensor_stats.hpp"

namespace nanlocator::inline tensor_room {

/// The unread statistics of one tensor, one row per chunk of 2^20 elements.
struct AtenStats {
  std::int64_t numel = 0;
  std::int64_t element_size = 0;
  at::Tensor
      counts;  // int64 [chunks, 7]: NaN, +Inf, -Inf, zeros, first bad index, fingerprint S0, S1
  at::Tensor
      values;  // float64 [chunks, 5]: min, max, absmin, absmax, sum of squares (float32 on MPS)
};

/// Whether this build has CUDA kernels; if not, CUDA tensors are scanned here.
[[nodiscard]] bool has_cuda_kernels();

/// Warns, once per process, that scans on a CUDA device take the slow path in this build.
void warn_of_slow_path(at::Device device);

[[nodiscard]] AtenStats scan_with_aten(const at::Tensor& tensor);

/// bool, without dimensions, on the device: whether the tensor holds a NaN or Inf. Four operators
/// per 2^20 elements.
[[nodiscard]] at::Tensor has_nonfinite_with_aten(const at::Tensor& tensor);

/// int32 [1] on the device: 1 if the scan found a NaN or Inf, else 0.
[[nodiscard]] at::Tensor has_nonfinite(const AtenStats& stats);

/// Waits for the device.
[[nodiscard]] TensorStats read_stats(const AtenStats& stats);

}  // namespace nanlocator::inline tensor_room
