// The tensors of an origin around its first bad element, read from its bundle.
#pragma once

#include <vector>

#include "nanlocator/record/bundle.hpp"
#include "nanlocator/report/run_report.hpp"

namespace nanlocator::inline report_room {

/// Cuts of at most 32 x 48 around the first bad element, from the operator call, or from the module
/// call if no operator call was kept: the first outputs with a bad element, and the inputs that it
/// may come from. A finite input of the output's shape is cut at the output's bad element, because
/// that was computed from it. Integer tensors count as inputs, never as bad outputs. Tensors
/// without elements and of types whose values cannot be read here are left out.
[[nodiscard]] std::vector<TensorWindow> windows_of(const OpenBundle& bundle);

}  // namespace nanlocator::inline report_room
