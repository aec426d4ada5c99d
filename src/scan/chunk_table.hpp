// The tables that a CUDA scan runs from, and the reading of the slots that it fills. Host code
// without CUDA, so that it is tested where there is no GPU.
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
  /// Largest first, so that the last blocks at work have little left; equal ones keep their order.
  std::vector<ChunkEntry> chunks;
};

/// An empty tensor has one empty chunk, so that its slot is filled too. Throws UsageError for a
/// view that contradicts itself, UnsupportedError for one of more than kMaxDims dimensions that
/// cannot be walked as fewer.
[[nodiscard]] ChunkTable make_chunk_table(std::span<const TensorView> tensors);

/// One tensor without a table (`slot` left null, `first_partial` 0): its chunks are `chunk_of` it.
/// Throws as make_chunk_table does.
[[nodiscard]] TensorEntry make_tensor_entry(const TensorView& tensor);

/// Empty stats for a slot that was never filled.
[[nodiscard]] TensorStats stats_of(const RawSlot& slot);

}  // namespace nanlocator::cuda
