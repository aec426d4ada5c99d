// Scans a tensor between two operators: does it hold a NaN or Inf, and where?
//
// Every function runs on the caller's thread, hidden from observers, and waits for the device if
// the tensor is on one. None allocates in proportion to the tensor.
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
/// Undefined if there is nothing to scan: integers, empty, meta, nested, quantised, and wrappers
/// whose inner operators are seen themselves (functorch, Python subclasses, functionalisation).
[[nodiscard]] at::Tensor values_of(const at::Tensor& tensor);

/// The same without a copy of the handle, for the common case: true if `tensor` is strided and
/// holds values to scan.
[[nodiscard]] bool is_plainly_observable(const at::Tensor& tensor) noexcept;

/// The same for any dtype.
[[nodiscard]] bool has_own_memory(const at::Tensor& tensor) noexcept;

/// All must be observable. One wait for all that are on a device.
[[nodiscard]] bool any_is_bad(const std::vector<const at::Tensor*>& tensors);
[[nodiscard]] bool is_bad(const at::Tensor& observable);
/// The worst class of value in it. In host memory it stops at the first chunk that holds a NaN.
[[nodiscard]] Content content_of(const at::Tensor& observable);

/// For an observable tensor; complex numbers count as two elements each.
[[nodiscard]] TensorStats stats_of(const at::Tensor& observable, int threads);

/// For any defined tensor; without stats if it is not observable.
[[nodiscard]] Operand operand_of(std::string name, const at::Tensor& tensor, int threads);

/// The bytes of a storage that a view can reach, counted from the storage's start.
struct ByteRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  bool is_dense = true;  // every byte in the range belongs to the view

  [[nodiscard]] bool overlaps(const ByteRange& other) const noexcept {
    return begin < other.end && other.begin < end;
  }
  [[nodiscard]] bool contains(const ByteRange& other) const noexcept {
    return begin <= other.begin && other.end <= end;
  }
};
[[nodiscard]] ByteRange range_of(const at::Tensor& observable) noexcept;

}  // namespace nanlocator::inline tensor_room
