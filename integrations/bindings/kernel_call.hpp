// A kernel's call as Python holds it: on its way into a bundle, and to be executed again.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "nanlocator/replay/kernel_replay.hpp"

namespace nanlocator {

/// From an object with the attributes of nanlocator.calls.kernel_calls.KernelCallRecord. With the
/// GIL held; the result may be used and dropped without it.
[[nodiscard]] KeptKernelCall kept_kernel_call(const pybind11::object& record);

}  // namespace nanlocator
