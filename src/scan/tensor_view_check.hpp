// What a scan accepts: the checks that the CPU and the CUDA scanner share.
#pragma once

#include "nanlocator/scan/tensor_view.hpp"

namespace nanlocator::inline scan_room {

/// Throws UnsupportedError for an unknown dtype, UsageError for a view that describes no tensor:
/// negative sizes or strides, sizes that do not give `numel`, elements without an address. The text
/// names the field, what it holds and what is expected.
void check_view(const TensorView& view);

}  // namespace nanlocator::inline scan_room
