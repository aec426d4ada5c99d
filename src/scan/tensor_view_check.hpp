// Checks of a TensorView that the CPU and the CUDA scanner share.
#pragma once

#include "nanlocator/scan/tensor_view.hpp"

namespace nanlocator::inline scan_room {

/// Throws UnsupportedError for an unknown dtype, UsageError for an inconsistent view: negative
/// sizes or strides, sizes that do not multiply to `numel`, elements without an address. The text
/// names the field, its value and what is expected.
void check_view(const TensorView& view);

}  // namespace nanlocator::inline scan_room
