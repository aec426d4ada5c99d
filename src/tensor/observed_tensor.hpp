// Scanning a tensor between two operators: is anything in it NaN or Inf, and where does it lie?
//
// Every function runs on the caller's thread, as work of our own (no observer sees it), and waits
// for the device where the tensor is on one. None allocates in proportion to the tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "nanlocator/record/birth.hpp"
#include "nanlocator/scan/content.hpp"
#include "nanlocator/scan/tensor_stats.hpp"

namespace nanlocator::inline tensor_room {

/// The tensor whose memory holds the values: itself, or the values of a sparse COO tensor.
/// Undefined where there is nothing to scan: integers, empty, meta, nested, quantised, and
/// wrappers whose inner operators are seen themselves (functorch, Python subclasses,
/// functionalisation).
[[nodiscard]] at::Tensor values_of(const at::Tensor& tensor);

/// The same without a copy of the handle, for the common case: true if `tensor` is strided and
/// holds values to scan.
[[nodiscard]] bool is_plainly_observable(const at::Tensor& tensor) noexcept;

/// The same for tensors of whatever dtype.
[[nodiscard]] bool has_own_memory(const at::Tensor& tensor) noexcept;

/// Each of them observable. One wait for all that are on a device.
[[nodiscard]] bool any_is_bad(const std::vector<const at::Tensor*>& tensors);
[[nodiscard]] bool is_bad(const at::Tensor& observable);
/// The same, and which of both. In host memory it stops at the first chunk that holds a NaN.
[[nodiscard]] Content content_of(const at::Tensor& observable);

/// Of an observable tensor; complex numbers count as two elements each.
[[nodiscard]] TensorStats stats_of(const at::Tensor& observable, int threads);

/// Of any defined tensor; of one that is not observable without stats.
[[nodiscard]] Operand operand_of(std::string name, const at::Tensor& tensor, int threads);

/// Bytes of a storage that a view can reach, from the storage's start.
struct ByteRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  bool is_dense = true;  // every byte between belongs to the view

  [[nodiscard]] bool overlaps(const ByteRange& other) const noexcept {
    return begin < other.end && other.begin < end;
  }
  [[nodiscard]] bool contains(const ByteRange& other) const noexcept {
    return begin <= other.begin && other.end <= end;
  }
};
[[nodiscard]] ByteRange range_of(const at::Tensor& observable) noexcept;

}  // namespace nanlocator::inline tensor_room
