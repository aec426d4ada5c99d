// The byte ranges of storages that a group of tensors can reach: the unit in which memory is
// copied, so that tensors that shared memory share it again.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "nanlocator/replay/operator_call.hpp"
#include "tensor/observed_tensor.hpp"

namespace nanlocator::inline replay_room {

/// Empty (begin == end) for a tensor without elements.
[[nodiscard]] ByteRange reach_of(const at::Tensor& tensor);

/// A range of a storage that one or more tensors of the group use, whole elements of each.
struct StorageRange {
  c10::Storage storage;
  at::Device device;
  ByteRange bytes;
  std::vector<std::size_t> tensors;  // positions in the group
};

/// Overlapping ranges of one storage are joined. `range_of[i]` is tensor i's range. Every tensor
/// must have plain memory (values.hpp).
struct StorageRanges {
  std::vector<StorageRange> ranges;  // in the order of their first tensors
  std::vector<std::size_t> range_of;
};
[[nodiscard]] StorageRanges storage_ranges(const std::vector<at::Tensor>& tensors);

/// The range as a tensor of bytes that shares its memory.
[[nodiscard]] at::Tensor bytes_of(const StorageRange& range);

/// A tensor like `like` (dtype, sizes, strides, lazy conjugation, wrapped number, requires_grad)
/// over `bytes`, the memory of `range` or a copy of it on any device.
[[nodiscard]] at::Tensor view_like(const at::Tensor& like, const at::Tensor& bytes,
                                   const ByteRange& range);

/// The size of the ranges of the tensors with plain memory, which a joint copy needs.
[[nodiscard]] std::uint64_t bytes_of(const std::vector<at::Tensor>& tensors);

/// Copies of the tensors that share memory exactly as the originals do. Tensors without plain
/// memory and empty storages that lost their memory are returned unchanged. Copies are on the
/// originals' devices; with `came_from`, in host memory, and it receives the original devices.
[[nodiscard]] std::vector<at::Tensor> copy_together(const std::vector<at::Tensor>& tensors,
                                                    CameFrom* came_from = nullptr);

/// Copies on the original devices of their storages.
[[nodiscard]] std::vector<at::Tensor> bring_back(const std::vector<at::Tensor>& tensors,
                                                 const CameFrom& came_from);

/// The tensors within `values` at `positions`, and those that share a storage with them.
[[nodiscard]] std::vector<at::Tensor> sharing_with(const std::vector<c10::IValue>& values,
                                                   const std::vector<std::size_t>& positions);

/// Replaces the tensors of `sharing_with` by copies that share memory as they did; `came_from`: as
/// for copy_together.
void copy_written(std::vector<c10::IValue>& values, const std::vector<std::size_t>& positions,
                  CameFrom* came_from = nullptr);

}  // namespace nanlocator::inline replay_room
