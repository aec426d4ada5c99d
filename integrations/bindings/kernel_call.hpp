// A kernel call as a Python object, to be written to a bundle and executed again.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "nanlocator/replay/kernel_replay.hpp"

namespace nanlocator {

/// Converts an object with the attributes of nanlocator.calls.kernel_calls.KernelCallRecord. Needs
/// the GIL; the result may be used and dropped without it.
[[nodiscard]] KeptKernelCall kept_kernel_call(const pybind11::object& record);

}  // namespace nanlocator
