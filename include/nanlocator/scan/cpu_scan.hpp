// The CPU scan: one vectorised pass over host memory on any number of threads.
//
// In: a TensorView of host memory. Out: TensorStats. Cost: one read of the memory; a 16 KiB block
// that holds a NaN, an Inf or a zero is read a second time, from cache, to be counted. The result,
// sum of squares included, is bit-identical for every thread count and instruction set.
#pragma once

#include <span>
#include <string_view>

#include "nanlocator/scan/tensor_stats.hpp"
#include "nanlocator/scan/tensor_view.hpp"

namespace nanlocator::inline scan_room {

enum class InstructionSet { plain, avx2, avx512 };

/// The instruction set in use: the best one of this processor, or the one named by the environment
/// variable NANLOCATOR_CPU_ISA (plain, avx2, avx512), which is read once. Throws UsageError if that
/// one is unknown or this processor lacks it.
[[nodiscard]] InstructionSet active_instruction_set();
[[nodiscard]] std::string_view name_of(InstructionSet isa) noexcept;

/// Scans one tensor with up to `threads` threads (at least 1). The caller is one of them; the
/// others are created once and sleep between scans. May be called from several threads at once and
/// after fork(). Strided views are read in logical order and give the stats of their contiguous
/// copy. Throws UsageError or UnsupportedError for an unusable view or thread count.
[[nodiscard]] TensorStats scan_cpu(const TensorView& tensor, int threads = 1);

/// True if the tensor holds a NaN or Inf. For observers that scan every value and rarely find
/// anything: only reads memory, on the calling thread, and stops at the first 16 KiB block that
/// holds one. Throws UsageError or UnsupportedError for an unusable view.
[[nodiscard]] bool has_nonfinite(const TensorView& tensor);

/// Scans many tensors, dividing their total memory evenly among the threads; `results[i]` belongs
/// to `tensors[i]`. Throws UsageError if the spans' sizes differ.
void scan_cpu(std::span<const TensorView> tensors, std::span<TensorStats> results, int threads);

}  // namespace nanlocator::inline scan_room
