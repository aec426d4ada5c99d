// One function per room: each binds that room's structs and classes to the extension.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <string>
#include <vector>

namespace nanlocator {

void bind_trace(pybind11::module_& m);   // the operator trace
void bind_watch(pybind11::module_& m);   // the module stack, the module watch
void bind_replay(pybind11::module_& m);  // bundles and replay

void bind_rerun(pybind11::module_& m);  // the repeat of a bad step

/// This thread's Python frames, innermost first, without those of torch and nanlocator: "file.py:12
/// in forward". Takes the GIL; empty on threads of autograd that run no Python.
std::vector<std::string> python_stack();

}  // namespace nanlocator
