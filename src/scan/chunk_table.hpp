// The tables of a CUDA scan, and the reading of the slots that it fills. Host code without CUDA, so
// that it can be tested without a GPU.
//
// In: the tensors of a plan. Out: one TensorEntry per tensor and one ChunkEntry per chunk, ready to
// be copied to the device. The chunks of a tensor depend on its numel only.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "nanlocator/scan/tensor_stats.hpp"
#include "nanlocator/scan/tensor_view.hpp"
#include "scan/cuda_chunk.hpp"

namespace nanlocator::cuda {

struct ChunkTable {
  std::vector<TensorEntry> tensors;  // `slot` is left null
  /// Largest first, so that the last blocks to finish have little left; equal ones keep their
  /// order.
  std::vector<ChunkEntry> chunks;
};

/// An empty tensor has one empty chunk, so that its slot is filled too. Throws UsageError for an
/// inconsistent view, UnsupportedError for one whose dimensions cannot be joined to kMaxDims or
/// fewer.
[[nodiscard]] ChunkTable make_chunk_table(std::span<const TensorView> tensors);

/// One tensor without a table (`slot` left null, `first_partial` 0); `chunk_of` gives its chunks.
/// Throws as make_chunk_table does.
[[nodiscard]] TensorEntry make_tensor_entry(const TensorView& tensor);

/// For a slot that was never filled: empty stats.
[[nodiscard]] TensorStats stats_of(const RawSlot& slot);

}  // namespace nanlocator::cuda
