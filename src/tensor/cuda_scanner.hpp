// The CUDA slot scanner over Torch's device memory.
#pragma once

#ifdef NANLOCATOR_CUDA

#include <ATen/core/Tensor.h>

#include <memory>

#include "nanlocator/scan/slot_scanner.hpp"

namespace nanlocator::inline tensor_room {

/// Its memory comes from Torch's caching allocator, which gives back to the device what it holds
/// unused and tries again before it refuses; so a card that Torch fills has room for a scanner, and
/// limits that the program sets for Torch hold. Throws as make_cuda_slot_scanner.
[[nodiscard]] std::unique_ptr<SlotScanner> make_torch_cuda_scanner(at::Device device);

}  // namespace nanlocator::inline tensor_room

#endif
