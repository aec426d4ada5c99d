// The CPU scan: one pass over host memory, vectorised, any number of threads, the same bits always.
//
// In: a TensorView of host memory. Out: TensorStats. Cost: one read of the memory; a block of 16
// KiB that holds a NaN, an Inf or a zero is read a second time, from cache, to be counted. The
// result, sum of squares included, is bit-identical for every thread count and instruction set.
#pragma once

#include <span>
#include <string_view>

#include "nanlocator/scan/tensor_stats.hpp"
#include "nanlocator/scan/tensor_view.hpp"

namespace nanlocator::inline scan_room {

enum class InstructionSet { plain, avx2, avx512 };

/// The instruction set in use: the best one of this processor, or the one that the environment
/// variable NANLOCATOR_CPU_ISA (plain, avx2, avx512) asks for, read once. A value that is unknown
/// or that this processor lacks throws UsageError.
[[nodiscard]] InstructionSet active_instruction_set();
[[nodiscard]] std::string_view name_of(InstructionSet isa) noexcept;

/// Scans one tensor with up to `threads` threads (at least 1; the caller is one of them, the others
/// are created once and wait, asleep, between scans). Callable from several threads at once and
/// after fork(). Strided views are read in logical order and give the stats of their contiguous
/// copy. Throws UsageError or UnsupportedError for a view or thread count that cannot be used.
[[nodiscard]] TensorStats scan_cpu(const TensorView& tensor, int threads = 1);

/// True if the tensor holds a NaN or Inf. One read of the memory on the calling thread and nothing
/// else, for observers that scan every value and rarely find anything; stops at the first block
/// of 16 KiB that holds one. Throws UsageError or UnsupportedError for a view that cannot be used.
[[nodiscard]] bool has_nonfinite(const TensorView& tensor);

/// Scans many tensors, dividing all their memory evenly over the threads: `results[i]` is of
/// `tensors[i]`. Throws UsageError if the spans' sizes differ.
void scan_cpu(std::span<const TensorView> tensors, std::span<TensorStats> results, int threads);

}  // namespace nanlocator::inline scan_room
