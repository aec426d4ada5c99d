// The CUDA slot scanner with Torch's device memory.
#pragma once

#ifdef NANLOCATOR_CUDA

#include <ATen/core/Tensor.h>

#include <memory>

#include "nanlocator/scan/slot_scanner.hpp"

namespace nanlocator::inline tensor_room {

/// Memory comes from Torch's caching allocator, which returns unused blocks to the device and
/// retries before it refuses. So a card that Torch fills has room for a scanner, and the program's
/// memory limits for Torch apply. Throws like make_cuda_slot_scanner.
[[nodiscard]] std::unique_ptr<SlotScanner> make_torch_cuda_scanner(at::Device device);

}  // namespace nanlocator::inline tensor_room

#endif
