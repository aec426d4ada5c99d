// Full stats of many tensors, each at the time of the call.
//
// In: tensors, one by one. Out: for host memory the stats at once; on CUDA one launch into the
// tensor's own slot, elsewhere a few ATen operators, both on the current stream, and a number that
// `read` resolves. Only `read` waits, once for all. From any thread; calls are serialised.
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
  /// monostate: a tensor without readable memory of its own (meta, fake, freed, under vmap), with a
  /// dtype or layout unknown to the scan, or on a stream in capture.
  using Scan = std::variant<std::monostate, TensorStats, Number>;

  TensorScans();
  ~TensorScans();
  TensorScans(const TensorScans&) = delete;  // owns device slots
  TensorScans& operator=(const TensorScans&) = delete;

  /// A strided tensor, floating-point or complex (its parts count as elements), on any device. The
  /// tensor is not kept: it may be written or freed afterwards, in the order of the current stream.
  [[nodiscard]] Scan enqueue(const at::Tensor& tensor);
  /// Stats by number. Waits for the devices; afterwards all numbers are invalid.
  [[nodiscard]] std::vector<TensorStats> read();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace nanlocator::inline tensor_room
