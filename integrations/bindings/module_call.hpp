// A module call as Python objects, to be written to a bundle.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <string>
#include <utility>
#include <vector>

#include "nanlocator/record/bundle.hpp"
#include "nanlocator/replay/operator_call.hpp"

namespace nanlocator {

/// Holds references to live Python objects until `add_to` turns them into a BundleModuleCall with
/// the tensors' values at that time. Construct and destroy it with the GIL held.
struct PythonModuleCall {
  std::string name;
  std::string class_name;
  bool is_training = true;
  pybind11::tuple arguments;
  pybind11::dict keywords;
  pybind11::object outputs;
  pybind11::dict weights;         // parameters and buffers by the module's own names
  pybind11::object grad_outputs;  // sequences of tensors and None
  pybind11::object grad_inputs;
  std::string pickle;  // the pickled module without its tensors; "" if none
  std::string pickle_problem;
  /// Tensors in host memory and the devices that they are copied from.
  std::vector<std::pair<at::Tensor, std::string>> came_from{};
  std::string why_left_out{};  // if not "", only the name is kept

  /// Takes the GIL. Tensors, numbers, texts, None, tuples, lists, dictionaries with text keys,
  /// dataclasses and ModelOutputs are kept; everything else is `unsupported`, with its repr. A call
  /// that was left out becomes a note of the bundle.
  void add_to(Bundle& bundle, StorageCollector& storages, BundleContents& contents) const;
};

}  // namespace nanlocator
