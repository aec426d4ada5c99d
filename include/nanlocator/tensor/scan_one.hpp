// A scan of one tensor, now: the check a person drops into a forward.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "nanlocator/scan/tensor_stats.hpp"

namespace nanlocator::inline tensor_room {

/// Stats of a tensor on any device; waits for the device. In host memory a finite tensor is read
/// twice: use scan_tensors where every tensor's stats are wanted. Empty for what cannot hold a NaN
/// or Inf or cannot be read: integers, undefined tensors, subclasses that hide their memory, all
/// while a CUDA graph is captured. Of a sparse tensor, its values. From any thread.
[[nodiscard]] std::optional<TensorStats> scan_one(const at::Tensor& tensor);

}  // namespace nanlocator::inline tensor_room
