// A description, without Torch, of memory to be scanned.
#pragma once

#include <cstdint>
#include <vector>

#include "nanlocator/scan/dtype.hpp"

namespace nanlocator::inline scan_room {

/// A view of a tensor. The caller keeps the memory alive until the scan has run (on CUDA: until the
/// work enqueued on the scan's stream is done). A complex tensor is described by its real view
/// (twice the elements). `data` must be aligned to the element size.
struct TensorView {
  const void* data =
      nullptr;  // host memory for the CPU scanner, device memory for the CUDA scanner
  std::int64_t numel = 0;
  DType dtype = DType::float32;
  // Both empty: contiguous. Otherwise one entry per dimension. Strides are in elements; zero and
  // overlapping strides are allowed, negative ones are not (Torch has none).
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;

  [[nodiscard]] bool is_contiguous() const noexcept { return strides.empty(); }

  friend bool operator==(const TensorView&, const TensorView&) = default;
};

}  // namespace nanlocator::inline scan_room
