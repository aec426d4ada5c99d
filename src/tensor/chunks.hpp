// The elements of a tensor in chunks, for scans whose memory must not grow with the tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

#include "nanlocator/scan/tensor_stats.hpp"

namespace nanlocator::inline tensor_room {

/// Calls `visit(chunk, first)` for the elements of a strided tensor, as real numbers
/// (tensor_access: as_real) and in row-major order: 1-D, contiguous, `most` at a time and fewer at
/// the end; `first` counts real elements. In place if the tensor is contiguous without a pending
/// conjugation or negation, else in copies of a chunk.
void for_each_chunk(const at::Tensor& tensor, std::int64_t most,
                    const std::function<void(const at::Tensor&, std::int64_t)>& visit);

/// Adds the stats of the part that begins at element `first`. Parts come in order and begin at
/// whole words of 4 bytes.
void add_part(TensorStats& total, const TensorStats& part, std::int64_t first,
              std::size_t element_bytes);

}  // namespace nanlocator::inline tensor_room
