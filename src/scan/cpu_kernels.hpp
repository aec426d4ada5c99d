// The CPU kernels, one table per instruction set; private to the scan room.
//
// In: one chunk of contiguous memory. Out: ChunkStats, raw bits and integers that cpu_scan.cpp
// merges, in chunk order, into TensorStats. All tables give the same bits for the same chunk.
// Nothing here allocates, throws or keeps state; a kernel runs on the caller's thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "nanlocator/scan/cpu_scan.hpp"
#include "nanlocator/scan/dtype.hpp"

namespace nanlocator::inline scan_room {

/// Bytes of a chunk, the unit of work of a thread. A kernel reads it as four streams, a quarter of
/// the chunk apart. With streams 128 KiB apart a Zen 4 core reads 6 to 12 % faster than with one
/// stream; with streams 4 to 16 KiB apart it reads 30 % slower (the prefetchers soon see each end).
inline constexpr std::size_t kChunkBytes = std::size_t{512} << 10;

/// The result of one chunk. Extremes are bits of finite elements, zero-extended. Without a finite
/// element they keep their neutral values.
struct ChunkStats {
  std::int64_t nan;
  std::int64_t pos_inf;
  std::int64_t neg_inf;
  std::int64_t zeros;
  std::int64_t first_bad;      // index in the chunk, or -1
  std::uint64_t unsigned_max;  // of the bits: the most negative element, if one has a sign bit
  std::uint64_t signed_max;  // of the bits as two's complement: the largest one without a sign bit
  std::uint64_t magnitude_min;  // of the bits without sign
  double sum_of_squares;
  std::uint64_t fingerprint;  // of the chunk alone, see fingerprint.hpp
};

/// Scans `numel` elements (at least 1, at most kChunkBytes) at `data`, aligned or not. Expects the
/// default floating-point environment: round to nearest, no flush to zero, exceptions masked.
using ScanChunk = void (*)(const void* data, std::size_t numel, ChunkStats& stats);

/// Whether any of `numel` elements at `data`, aligned or not, is a NaN or Inf. `numel` is
/// unlimited.
using HasNonfinite = bool (*)(const void* data, std::size_t numel);

struct CpuKernels {
  ScanChunk scan_chunk[kDTypeCount];  // by DType
  HasNonfinite has_nonfinite[kDTypeCount];
};

/// Null if the compiler could not build them (another processor family).
[[nodiscard]] const CpuKernels* plain_kernels() noexcept;
[[nodiscard]] const CpuKernels* avx2_kernels() noexcept;
[[nodiscard]] const CpuKernels* avx512_kernels() noexcept;

/// The kernels of `isa`, or null if this build or this processor lacks them.
[[nodiscard]] const CpuKernels* kernels_for(InstructionSet isa) noexcept;

/// has_nonfinite with the given kernels instead of those of active_instruction_set().
[[nodiscard]] bool has_nonfinite_with(const CpuKernels& kernels, const TensorView& tensor);

/// scan_cpu with the given kernels instead of those of active_instruction_set().
void scan_cpu_with(const CpuKernels& kernels, std::span<const TensorView> tensors,
                   std::span<TensorStats> results, int threads);

}  // namespace nanlocator::inline scan_room
