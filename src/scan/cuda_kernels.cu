// Scans all tensors of a plan in one launch, or one tensor without a plan.
//
// Blocks of 256 threads take chunks from the table, largest first; a chunk's result goes to its own
// place in `partials`. The block that finishes a tensor's last chunk merges that tensor's partials
// in order and writes the slot. So the sum of squares has the same bits in every run, which
// atomicAdd on doubles would not give.
//
// Memory traffic: one read of every element, 80 bytes written per 65536 elements.
//
// Registers: 64 on sm_80 and sm_90, 24 to 72 bytes spilled (nvcc 13.0, -Xptxas -v), so a
// multiprocessor holds four blocks with 64 KiB of loads in flight. Instructions per 32-bit word in
// the inner loops, counted in the SASS:
//            float64  float32  float16  bfloat16  e4m3fn  e5m2
//     sm_80     11.8     10.6     18.0      17.1    38.0  35.0
//     sm_90     11.7      9.3     12.0      12.2    25.7  22.7
// A multiprocessor issues 128 lanes' instructions per clock. At 4.3 TB/s and 1.7 GHz, one of an
// H200 is fed 4.8 words per clock, so 26 instructions per word are the limit; at 2.0 TB/s and 1.4
// GHz, one of an A100 is fed 3.3 words, so 39 are. Measured on an H100 (docs/benchmarks.md): the
// speed of a copy, except for bfloat16 (0.93 of it) and fp8 (0.74, 0.79).
#include <cuda_runtime.h>

#include "scan/cuda_kernels.hpp"

namespace nanlocator::cuda {
namespace {

constexpr int kWarps = kThreads / 32;
constexpr int kBlocksPerMultiprocessor = 4;

template <class T>
__device__ T shuffle_down(const T& value, int lanes) {
  static_assert(sizeof(T) % 4 == 0);
  constexpr int words = sizeof(T) / 4;
  std::uint32_t buffer[words];
  memcpy(buffer, &value, sizeof(T));
#pragma unroll
  for (int i = 0; i < words; ++i) buffer[i] = __shfl_down_sync(0xffffffffu, buffer[i], lanes);
  T result;
  memcpy(&result, buffer, sizeof(T));
  return result;
}

/// Merges all threads' values in a fixed order; the result is in thread 0. The caller must pass a
/// barrier before `shared` is written again.
template <class T>
__device__ void reduce_block(T& value, void* shared) {
  T* const of_warp = static_cast<T*>(shared);
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) value.merge(shuffle_down(value, lanes));
  if (lane == 0) of_warp[warp] = value;
  __syncthreads();
  if (warp == 0) {
    value = lane < kWarps ? of_warp[lane] : T{};
#pragma unroll
    for (int lanes = kWarps / 2; lanes > 0; lanes /= 2) value.merge(shuffle_down(value, lanes));
  }
}

/// Loads a partial that another block has written, bypassing the L1 cache, which does not see other
/// multiprocessors' writes.
__device__ SlotPartial load_partial(const SlotPartial* address) {
  constexpr int words = sizeof(SlotPartial) / 8;
  static_assert(sizeof(SlotPartial) % 8 == 0);
  unsigned long long buffer[words];
  const auto* source = reinterpret_cast<const unsigned long long*>(address);
#pragma unroll
  for (int i = 0; i < words; ++i) buffer[i] = __ldcg(source + i);
  SlotPartial result;
  memcpy(&result, buffer, sizeof(SlotPartial));
  return result;
}

/// The block's result for one chunk, in thread 0.
__device__ SlotPartial scan_chunk(const ChunkEntry& chunk, const TensorEntry& tensor,
                                  void* shared) {
  if (tensor.dtype == DType::float64) {
    auto partial = scan_share<DType::float64>(chunk, tensor, threadIdx.x);
    reduce_block(partial, shared);
    return widen(partial, chunk.first_element);
  }
  ChunkPartial<std::uint32_t> partial;
  switch (tensor.dtype) {
    case DType::float64:
      break;
    case DType::float32:
      partial = scan_share<DType::float32>(chunk, tensor, threadIdx.x);
      break;
    case DType::float16:
      partial = scan_share<DType::float16>(chunk, tensor, threadIdx.x);
      break;
    case DType::bfloat16:
      partial = scan_share<DType::bfloat16>(chunk, tensor, threadIdx.x);
      break;
    case DType::float8_e4m3fn:
      partial = scan_share<DType::float8_e4m3fn>(chunk, tensor, threadIdx.x);
      break;
    case DType::float8_e5m2:
      partial = scan_share<DType::float8_e5m2>(chunk, tensor, threadIdx.x);
      break;
  }
  reduce_block(partial, shared);
  return widen(partial, chunk.first_element);
}

/// Merges a tensor's partials in order and fills its slot. Run by one block after the others are
/// done.
__device__ void finish_tensor(const TensorEntry& tensor, const SlotPartial* partials,
                              std::uint32_t count, std::int32_t* bad_flag, void* shared) {
  SlotPartial of_tensor;
  for (std::uint32_t i = threadIdx.x; i < count; i += kThreads) {
    of_tensor.merge(load_partial(partials + i));
  }
  reduce_block(of_tensor, shared);
  if (threadIdx.x == 0) {
    RawSlot& slot = *tensor.slot;
    slot.partial = of_tensor;
    slot.numel = tensor.numel;
    slot.dtype = static_cast<std::uint32_t>(tensor.dtype);
    // Atomic, because other tensors' last blocks may do this at the same time.
    if (of_tensor.nan + of_tensor.pos_inf + of_tensor.neg_inf > 0) atomicExch(bad_flag, 1);
  }
}

__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    scan_kernel(const ScanTables tables) {
  __shared__ __align__(16) unsigned char shared[kWarps * sizeof(SlotPartial)];
  __shared__ bool is_last_chunk;
  for (std::uint32_t index = blockIdx.x; index < tables.chunk_count; index += gridDim.x) {
    const ChunkEntry& chunk = tables.chunks[index];
    TensorEntry& tensor = tables.tensors[chunk.tensor];
    const SlotPartial of_chunk = scan_chunk(chunk, tensor, shared);
    if (threadIdx.x == 0) {
      tables.partials[chunk.partial] = of_chunk;
      __threadfence();  // the partial before the count
      const std::uint32_t last = tensor.chunk_count - 1;
      is_last_chunk = atomicInc(&tensor.chunks_done, last) == last;
    }
    __syncthreads();
    if (!is_last_chunk) continue;

    __threadfence();  // the count before the other blocks' partials
    finish_tensor(tensor, tables.partials + tensor.first_partial, tensor.chunk_count,
                  tables.bad_flag, shared);
    __syncthreads();
  }
}

/// Scans a tensor that is an argument of the launch. Group g, a block's unit of work, is the chunks
/// g, g + kSinglePartials, ..., merged in this order into partial g. So scratch of a fixed size
/// serves a tensor of any size, and the sum of squares does not depend on the number of blocks.
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    single_scan_kernel(const __grid_constant__ TensorEntry tensor, const void* data,
                       std::uint32_t element_bytes, SingleScratch* scratch,
                       std::int32_t* bad_flag) {
  __shared__ __align__(16) unsigned char shared[kWarps * sizeof(SlotPartial)];
  __shared__ bool is_last_group;
  const std::uint32_t groups = smaller(tensor.chunk_count, kSinglePartials);
  for (std::uint32_t group = blockIdx.x; group < groups; group += gridDim.x) {
    SlotPartial of_group;
    for (std::uint32_t index = group; index < tensor.chunk_count; index += kSinglePartials) {
      const ChunkEntry chunk = chunk_of(tensor, data, element_bytes, index);
      const SlotPartial of_chunk = scan_chunk(chunk, tensor, shared);
      if (threadIdx.x == 0) of_group.merge(of_chunk);
      __syncthreads();  // `shared` is written again
    }
    if (threadIdx.x == 0) {
      scratch->partials[group] = of_group;
      __threadfence();  // the partial before the count
      is_last_group = atomicInc(&scratch->groups_done, groups - 1) == groups - 1;
    }
    __syncthreads();
    if (!is_last_group) continue;

    __threadfence();  // the count before the other blocks' partials
    finish_tensor(tensor, scratch->partials, groups, bad_flag, shared);
    return;  // only one group
  }
}

}  // namespace

cudaError_t count_resident_blocks(int device, std::uint32_t& blocks) {
  int multiprocessors = 0;
  int per_multiprocessor = 0;
  cudaError_t status =
      cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (status != cudaSuccess) return status;
  status =
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, scan_kernel, kThreads, 0);
  if (status != cudaSuccess) return status;
  blocks = static_cast<std::uint32_t>(multiprocessors * per_multiprocessor);
  return cudaSuccess;
}

cudaError_t launch_scan(const ScanTables& tables, std::uint32_t blocks, cudaStream_t stream) {
  ScanTables parameter = tables;
  void* parameters[] = {&parameter};
  return cudaLaunchKernel(scan_kernel, dim3(smaller(blocks, tables.chunk_count)), dim3(kThreads),
                          parameters, 0, stream);
}

cudaError_t launch_single_scan(const TensorEntry& tensor, const void* data, SingleScratch* scratch,
                               std::int32_t* bad_flag, std::uint32_t blocks, cudaStream_t stream) {
  TensorEntry entry = tensor;
  auto element_bytes = static_cast<std::uint32_t>(size_of(tensor.dtype));
  const std::uint32_t groups = smaller(tensor.chunk_count, kSinglePartials);
  void* parameters[] = {&entry, &data, &element_bytes, &scratch, &bad_flag};
  return cudaLaunchKernel(single_scan_kernel, dim3(smaller(blocks, groups)), dim3(kThreads),
                          parameters, 0, stream);
}

}  // namespace nanlocator::cuda
