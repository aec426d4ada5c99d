// The full stats of many tensors, each as it is when it passes.
//
// In: tensors, one by one. Out: of host memory the stats at once; on CUDA one launch into a slot of
// the tensor's own, elsewhere a few ATen operators, both on the current stream, and a number that
// `read` resolves. Only `read` waits, once for all. From any thread, one at a time inside.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <variant>
#include <vector>

#include "nanlocator/scan/tensor_stats.hpp"

namespace nanlocator::inline tensor_room {

class TensorScans {
 public:
  /// Counted from 0 since the last `read`.
  using Number = std::uint32_t;
  /// Neither: a tensor without memory of its own to read (meta, fake, freed, under vmap), of a
  /// dtype or layout that the scan does not know, or on a stream that is being captured.
  using Scan = std::variant<std::monostate, TensorStats, Number>;

  TensorScans();
  ~TensorScans();
  TensorScans(const TensorScans&) = delete;  // owns device slots
  TensorScans& operator=(const TensorScans&) = delete;

  /// Strided, of floating point or complex (the parts, counted singly), on any device. The tensor
  /// is not kept: it may be written or freed afterwards, in the order of the current stream.
  [[nodiscard]] Scan enqueue(const at::Tensor& tensor);
  /// Stats by number. Waits for the devices; then all numbers are forgotten.
  [[nodiscard]] std::vector<TensorStats> read();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace nanlocator::inline tensor_room
