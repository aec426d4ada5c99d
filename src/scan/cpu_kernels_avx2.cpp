// The CPU kernels in AVX2, FMA and F16C; see cpu_kernels.inc.
#include "scan/cpu_kernels.hpp"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define NANLOCATOR_VECTOR_BYTES 32
#include "scan/cpu_kernels.inc"

namespace nanlocator::inline scan_room {
const CpuKernels* avx2_kernels() noexcept {
  return &kKernels;
}
}  // namespace nanlocator::inline scan_room
#else
namespace nanlocator::inline scan_room {
const CpuKernels* avx2_kernels() noexcept {
  return nullptr;
}
}  // namespace nanlocator::inline scan_room
#endif
