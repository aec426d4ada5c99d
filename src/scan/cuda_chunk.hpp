// One GPU thread's share of a chunk, and the tables that define it. Compiled by nvcc and by the
// host compiler, like cuda_word.hpp; C++17. No thread waits for another here.
//
// A chunk is up to 65536 consecutive elements of one tensor. Between its first and last 16-byte
// boundary, threads read vectors, loading four before they scan any. The words outside, chunks that
// are not aligned to 4 bytes and strided tensors are assembled element by element. The order of the
// sum of squares depends on numel, on the layout and on the address modulo 16, never on the GPU or
// on timing.
#pragma once

#include <cstdint>
#include <cstring>

#include "scan/cuda_word.hpp"

namespace nanlocator::cuda {

inline constexpr std::uint32_t kThreads = 256;  // of a block, which scans a chunk
/// 65536 elements are 64 (fp8) to 512 KiB (float64). That is enough to make a block's reduction
/// (about 150 instructions per warp) negligible beside the scan (1000 to 4000), and few enough for
/// 1e8 elements to give 1500 chunks, two or three for each block that an H100 holds.
inline constexpr std::uint32_t kChunkElements = 65536;
inline constexpr int kMaxDims = 8;
/// Vectors that a thread has in flight: 64 bytes, times 1024 threads per SM, times 132 SMs = 8.6
/// MB, more than the 4.8 TB/s * 0.8 us that an H200 needs.
inline constexpr int kBatchVectors = 4;

/// A filled slot as stored in device memory. All zero bytes: never filled.
struct RawSlot {
  SlotPartial partial;
  std::uint64_t numel;
  std::uint32_t dtype;  // a DType
  std::uint32_t padding;
};

struct TensorEntry {
  RawSlot* slot;
  std::uint64_t numel;
  std::uint32_t first_partial;
  std::uint32_t chunk_count;
  std::uint32_t chunks_done;  // counts up during a scan; the last block resets it to zero
  DType dtype;
  std::int32_t dims;  // 0: contiguous
  std::int64_t sizes[kMaxDims];
  std::int64_t strides[kMaxDims];  // in elements
};

struct ChunkEntry {
  const void* data;             // contiguous: the chunk's first element; strided: the tensor's
  std::uint64_t first_element;  // of the chunk, counted in the tensor's logical order
  std::uint32_t numel;
  std::uint32_t tensor;  // its TensorEntry
  std::uint32_t
      partial;  // index of its result; a tensor's chunks have consecutive indices in order
  std::uint32_t padding;
};

/// Partials of a tensor that is scanned without a table: chunk i goes to partial i modulo this. Up
/// to 2^26 elements every chunk has its own, and the sum of squares has the bits that a plan gives.
inline constexpr std::uint32_t kSinglePartials = 1024;

/// Chunk `index` of a tensor, counted from its first element, as in the table of a plan.
[[nodiscard]] NANLOCATOR_HOST_DEVICE inline ChunkEntry chunk_of(const TensorEntry& tensor,
                                                                const void* data,
                                                                std::uint32_t element_bytes,
                                                                std::uint32_t index) {
  ChunkEntry chunk{};
  chunk.first_element = static_cast<std::uint64_t>(index) * kChunkElements;
  const std::uint64_t left = tensor.numel - chunk.first_element;
  chunk.numel = left < kChunkElements ? static_cast<std::uint32_t>(left) : kChunkElements;
  chunk.data = tensor.dims == 0 && data != nullptr
                   ? static_cast<const unsigned char*>(data) + chunk.first_element * element_bytes
                   : data;
  chunk.partial = index % kSinglePartials;
  return chunk;
}

// Aliasing rules forbid the host to read floats as integers; the device may, and gains from a typed
// load. The host traps on misaligned addresses, as the device would.
template <class T>
[[nodiscard]] NANLOCATOR_HOST_DEVICE inline T load(const T* address) {
#if defined(__CUDA_ARCH__)
  return *address;
#else
  if (reinterpret_cast<std::uintptr_t>(address) % alignof(T) != 0) __builtin_trap();
  T value;
  std::memcpy(&value, static_cast<const void*>(address), sizeof(T));
  return value;
#endif
}

/// Every byte is read once: streaming loads leave the cache to the training step.
[[nodiscard]] NANLOCATOR_HOST_DEVICE inline Vector load_vector(const Vector* address) {
#if defined(__CUDA_ARCH__)
  const uint4 words = __ldcs(reinterpret_cast<const uint4*>(address));
  return Vector{{words.x, words.y, words.z, words.w}};
#else
  return load(address);
#endif
}

/// Element i of a chunk, for the two layouts.
template <DType dtype>
struct ContiguousElements {
  const ElementWord<dtype>* data;

  [[nodiscard]] NANLOCATOR_HOST_DEVICE ElementWord<dtype> operator[](std::uint32_t i) const {
    return load(data + i);
  }
};

/// The offset in elements of element `index` (logical row-major order) of a strided tensor.
template <class Index>
[[nodiscard]] NANLOCATOR_HOST_DEVICE inline std::int64_t strided_offset(const TensorEntry& tensor,
                                                                        Index index) {
  std::int64_t offset = 0;
  for (int dim = tensor.dims - 1; dim > 0; --dim) {
    const auto size = static_cast<Index>(tensor.sizes[dim]);
    const Index outer = index / size;
    offset += static_cast<std::int64_t>(index - outer * size) * tensor.strides[dim];
    index = outer;
  }
  return offset + static_cast<std::int64_t>(index) * tensor.strides[0];
}

template <DType dtype>
struct StridedElements {
  const ElementWord<dtype>* data;
  const TensorEntry* tensor;
  std::uint64_t first_element;

  [[nodiscard]] NANLOCATOR_HOST_DEVICE ElementWord<dtype> operator[](std::uint32_t i) const {
    const std::uint64_t index = first_element + i;
    // A 64-bit division takes about three times as long as a 32-bit one.
    const std::int64_t offset = tensor->numel <= 0xffffffffu
                                    ? strided_offset(*tensor, static_cast<std::uint32_t>(index))
                                    : strided_offset(*tensor, index);
    return load(data + offset);
  }
};

/// Unit `unit` of the chunk, assembled from its elements; the chunk's last one may have fewer.
template <DType dtype, class Elements>
NANLOCATOR_HOST_DEVICE inline void add_loose_unit(const Elements& elements, const ChunkEntry& chunk,
                                                  std::uint32_t unit,
                                                  ChunkPartial<Unit<dtype>>& partial) {
  const std::uint32_t first = unit * kElementsPerUnit<dtype>;
  const std::uint32_t count = smaller(kElementsPerUnit<dtype>, chunk.numel - first);
  Unit<dtype> bits = 0;
  for (std::uint32_t i = 0; i < count; ++i) {
    bits |= static_cast<Unit<dtype>>(elements[first + i]) << (kElementBits<dtype> * i);
  }
  add_unit_to_fingerprint<dtype>(bits, chunk.first_element / kElementsPerUnit<dtype> + unit,
                                 partial);
  add_unit_carefully<dtype>(bits, count, first, partial);
}

/// `count` vectors, `kThreads` apart, beginning with vector `vector` of `vectors`, which start at
/// the chunk's unit `first_unit`.
template <DType dtype, int count>
NANLOCATOR_HOST_DEVICE inline void add_batch(const Vector* vectors, std::uint32_t vector,
                                             std::uint32_t first_unit, const ChunkEntry& chunk,
                                             ChunkPartial<Unit<dtype>>& partial) {
  constexpr std::uint32_t units = kUnitsPerVector<dtype>;
  constexpr std::uint32_t words_per_unit = sizeof(Unit<dtype>) / 4;
  Vector batch[count];
#pragma unroll
  for (int i = 0; i < count; ++i) batch[i] = load_vector(vectors + vector + i * kThreads);

  const auto base_word = static_cast<std::uint32_t>(
      (chunk.first_element / kElementsPerUnit<dtype> + first_unit) * words_per_unit);
  QuickScan<dtype> scan;
  double squares = 0.0;
#pragma unroll
  for (int i = 0; i < count; ++i) {
    add_vector_to_fingerprint(batch[i], base_word + 4 * (vector + i * kThreads), partial);
    VectorSum<dtype> sum = 0;
#pragma unroll
    for (std::uint32_t k = 0; k < units; ++k) {
      const Unit<dtype> unit = unit_of<dtype>(batch[i], k);
      scan.add(unit);
      sum = add_squares<dtype>(unit, sum);
    }
    squares += sum;
  }
  const Extremes<Unit<dtype>> extremes = scan.settle();

  if (needs_care<dtype>(extremes)) {
    const ContiguousElements<dtype> elements{static_cast<const ElementWord<dtype>*>(chunk.data)};
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const std::uint32_t first =
          (first_unit + (vector + i * kThreads) * units) * kElementsPerUnit<dtype>;
#pragma unroll 1
      for (std::uint32_t k = 0; k < units * kElementsPerUnit<dtype>; ++k) {
        add_element<dtype>(elements[first + k], first + k, partial);
      }
    }
    return;
  }
  partial.extremes.merge(extremes);
  partial.squares += squares * kSquareUnit<dtype>;
  if (extremes.magnitude_min == 0) {
#pragma unroll
    for (int i = 0; i < count; ++i) {
#pragma unroll
      for (std::uint32_t k = 0; k < units; ++k) {
        partial.zeros += count_zeros<dtype>(unit_of<dtype>(batch[i], k));
      }
    }
  }
}

/// Everything that thread `thread` of `kThreads` reads of a chunk.
template <DType dtype>
[[nodiscard]] NANLOCATOR_HOST_DEVICE inline ChunkPartial<Unit<dtype>> scan_share(
    const ChunkEntry& chunk, const TensorEntry& tensor, std::uint32_t thread) {
  ChunkPartial<Unit<dtype>> partial;
  const auto* data = static_cast<const ElementWord<dtype>*>(chunk.data);
  const std::uint32_t units = (chunk.numel + kElementsPerUnit<dtype> - 1) / kElementsPerUnit<dtype>;
  if (tensor.dims != 0) {
    const StridedElements<dtype> elements{data, &tensor, chunk.first_element};
    for (std::uint32_t unit = thread; unit < units; unit += kThreads) {
      add_loose_unit<dtype>(elements, chunk, unit, partial);
    }
    return partial;
  }

  // Loose units before the first aligned vector, vectors, loose units after the last full one. A
  // chunk that starts between two 4-byte boundaries consists of loose units: its memory words are
  // not its logical words.
  const auto address = reinterpret_cast<std::uintptr_t>(chunk.data);
  const std::uint32_t full_units = chunk.numel / kElementsPerUnit<dtype>;
  std::uint32_t head = units;
  std::uint32_t vector_count = 0;
  if (address % sizeof(Unit<dtype>) == 0) {
    const auto to_boundary =
        static_cast<std::uint32_t>((16 - address % 16) % 16 / sizeof(Unit<dtype>));
    head = smaller(to_boundary, full_units);
    vector_count = (full_units - head) / kUnitsPerVector<dtype>;
  }
  const std::uint32_t vector_units = vector_count * kUnitsPerVector<dtype>;
  const ContiguousElements<dtype> elements{data};
  for (std::uint32_t loose = thread; loose < units - vector_units; loose += kThreads) {
    add_loose_unit<dtype>(elements, chunk, loose < head ? loose : loose + vector_units, partial);
  }

  const auto* vectors = reinterpret_cast<const Vector*>(data + head * kElementsPerUnit<dtype>);
  std::uint32_t vector = thread;
#pragma unroll 1
  for (; vector + (kBatchVectors - 1) * kThreads < vector_count;
       vector += kBatchVectors * kThreads) {
    add_batch<dtype, kBatchVectors>(vectors, vector, head, chunk, partial);
  }
#pragma unroll 1
  for (; vector < vector_count; vector += kThreads) {
    add_batch<dtype, 1>(vectors, vector, head, chunk, partial);
  }
  return partial;
}

}  // namespace nanlocator::cuda
