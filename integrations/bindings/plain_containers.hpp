// Tensors in the nested tuples, lists and dictionaries that most calls of a model have as
// arguments.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <vector>

namespace nanlocator {

/// The tensors in them, borrowed, in their order; nullopt if they hold anything but tensors and
/// constants. Runs no code of the program's classes. Needs the GIL.
[[nodiscard]] std::optional<std::vector<PyObject*>> plain_tensors(const pybind11::handle& object);

}  // namespace nanlocator
