// One function per room: each binds that room's structs and classes to the extension.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "nanlocator/error.hpp"
#include "nanlocator/files/names.hpp"
#include "nanlocator/gradients/gradient_scanner.hpp"
#include "nanlocator/operators/operator_trace.hpp"
#include "nanlocator/operators/program_code.hpp"
#include "nanlocator/watch/module_scope.hpp"
#include "path.hpp"

namespace nanlocator {

void bind_arguments(pybind11::module_& m);         // command lines
void bind_trace(pybind11::module_& m);             // the operator trace
void bind_watch(pybind11::module_& m);             // the module stack, the module watch
void bind_plain_containers(pybind11::module_& m);  // tensors in arguments
void bind_surroundings(pybind11::module_& m);      // of calls
void bind_recorder(pybind11::module_& m);          // steps that can be executed again
void bind_replay(pybind11::module_& m);            // bundles and replay
void bind_operator_registration(pybind11::module_& m);
void bind_kernel_calls(pybind11::module_& m);  // kernel calls, executed again
void bind_boundary(pybind11::module_& m);      // the boundary watch
void bind_scans(pybind11::module_& m);         // batched scans of many tensors

void bind_netcheck(pybind11::module_& m);  // the network check between ranks
void bind_driver(pybind11::module_& m);    // the driver of a step

void bind_device_check(pybind11::module_& m);  // the network check's test of one device

/// An interned path as a Python object, so that no call hashes a string.
struct PathHandle {
  ModulePath path;
};

/// The lines of Python programs; takes the GIL. One per process.
std::shared_ptr<ProgramCode> python_code();

/// The value of the argument `what`. Throws UsageError for an unknown name.
template <HasNames Enum>
Enum choice(const std::string& what, const std::string& name) {
  if (const auto value = value_named<Enum>(name)) return *value;
  std::string names;
  for (const auto each : kNames<Enum>)
    names.append(names.empty() ? "'" : ", '").append(each) += '\'';
  throw UsageError(what + " is '" + name + "'; expected one of " + names);
}

using NamedPairs = std::vector<std::pair<std::string, at::Tensor>>;
std::vector<NamedTensor> named_tensors(const NamedPairs& pairs);

/// Parallel lists; `offsets` may be empty. Throws UsageError if their lengths differ.
std::vector<GradientView> gradient_views(const std::vector<std::int64_t>& parameters,
                                         const std::vector<at::Tensor>& tensors,
                                         const std::vector<std::int64_t>& offsets);

}  // namespace nanlocator
