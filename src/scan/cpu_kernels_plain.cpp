// The CPU kernels for the baseline instructions of the processor family (SSE2, NEON); see
// cpu_kernels.inc.
#include "scan/cpu_kernels.hpp"

#define NANLOCATOR_VECTOR_BYTES 16
#include "scan/cpu_kernels.inc"

namespace nanlocator::inline scan_room {
const CpuKernels* plain_kernels() noexcept {
  return &kKernels;
}
}  // namespace nanlocator::inline scan_room
