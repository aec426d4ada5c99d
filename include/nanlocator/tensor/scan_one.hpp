// A synchronous scan of one tensor, for a check in the middle of a forward.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "nanlocator/scan/tensor_stats.hpp"

namespace nanlocator::inline tensor_room {

/// Stats of a tensor on any device; waits for the device. In host memory a finite tensor is read
/// twice; use scan_tensors if every tensor's stats are needed. Empty for tensors that cannot hold a
/// NaN or Inf or cannot be read: integers, undefined tensors, subclasses that hide their memory,
/// all during capture of a CUDA graph. For a sparse tensor, the stats of its values. From any
/// thread.
[[nodiscard]] std::optional<TensorStats> scan_one(const at::Tensor& tensor);

}  // namespace nanlocator::inline tensor_room
