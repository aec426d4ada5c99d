// The CPU kernels in AVX-512 (F, BW, VL, DQ); see cpu_kernels.inc.
#include "scan/cpu_kernels.hpp"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define NANLOCATOR_VECTOR_BYTES 64
#include "scan/cpu_kernels.inc"

namespace nanlocator::inline scan_room {
const CpuKernels* avx512_kernels() noexcept {
  return &kKernels;
}
}  // namespace nanlocator::inline scan_room
#else
namespace nanlocator::inline scan_room {
const CpuKernels* avx512_kernels() noexcept {
  return nullptr;
}
}  // namespace nanlocator::inline scan_room
#endif
