// Host interface of the CUDA scan's two kernels: for a plan's tensors, and for one tensor.
//
// In: the tables of a plan in device memory, or one tensor's entry by value. Out: every tensor's
// RawSlot, and the flag, set to 1 if a NaN or Inf was found. Nothing is allocated and nothing
// waits; the launch may be captured in a graph.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "scan/cuda_chunk.hpp"

namespace nanlocator::cuda {

/// All in device memory. A running scan uses `tensors` and `partials` as scratch: two scans with
/// the same tables must be ordered, by a stream or by events.
struct ScanTables {
  const ChunkEntry* chunks;
  std::uint32_t chunk_count;
  TensorEntry* tensors;
  SlotPartial* partials;  // one per chunk
  std::int32_t* bad_flag;
};

/// Scratch of a running scan of one tensor, in device memory; all zero bytes before the first scan.
/// Scans that share it must be ordered.
struct SingleScratch {
  SlotPartial partials[kSinglePartials];
  std::uint32_t groups_done;  // counts up during a scan; the last block resets it to zero
  std::uint32_t padding;
};

/// The number of blocks that device `device`, which must be current, holds at once. More blocks
/// would only queue.
[[nodiscard]] cudaError_t count_resident_blocks(int device, std::uint32_t& blocks);

/// Launches at most `blocks` blocks; `tables.chunk_count` must not be zero.
[[nodiscard]] cudaError_t launch_scan(const ScanTables& tables, std::uint32_t blocks,
                                      cudaStream_t stream);

/// Fills `tensor.slot`; `data` is the tensor's first element.
[[nodiscard]] cudaError_t launch_single_scan(const TensorEntry& tensor, const void* data,
                                             SingleScratch* scratch, std::int32_t* bad_flag,
                                             std::uint32_t blocks, cudaStream_t stream);

}  // namespace nanlocator::cuda
