// What surrounds a call: settings and parts of modules, hooks of autograd's nodes. Read in each
// step, so in C++.
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <unordered_set>
#include <vector>

#include "bindings.hpp"

namespace py = pybind11;
using py::literals::operator""_a;

namespace nanlocator {
namespace {

bool is_constant(PyObject* object) {
  return object == Py_None || PyBool_Check(object) || PyLong_CheckExact(object) ||
         PyFloat_CheckExact(object) || PyUnicode_CheckExact(object);
}

/// `digest_of` returns nullopt for values that do not count.
template <typename DigestOf>
std::int64_t digest(const std::vector<py::dict>& dictionaries, DigestOf digest_of) {
  std::size_t mixed = dictionaries.size();
  for (const py::dict& each : dictionaries) {
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    for (Py_ssize_t position = 0; PyDict_Next(each.ptr(), &position, &key, &value) != 0;) {
      if (const std::optional<std::size_t> found = digest_of(value)) {
        mixed ^= *found + 0x9e3779b97f4a7c15 + (mixed << 6) + (mixed >> 2);  // boost::hash_combine
      }
    }
  }
  return static_cast<std::int64_t>(mixed);
}

std::int64_t count_node_hooks(const std::vector<at::Tensor>& roots) {
  std::unordered_set<torch::autograd::Node*> seen;
  std::vector<torch::autograd::Node*> waiting;
  const auto reach = [&](torch::autograd::Node* node) {
    if (node != nullptr && seen.insert(node).second) waiting.push_back(node);
  };
  std::int64_t hooks = 0;
  for (const at::Tensor& root : roots) reach(root.grad_fn().get());
  while (!waiting.empty()) {
    torch::autograd::Node* const node = waiting.back();
    waiting.pop_back();
    hooks += static_cast<std::int64_t>(node->pre_hooks().size() + node->post_hooks().size());
    for (const torch::autograd::Edge& edge : node->next_edges()) reach(edge.function.get());
  }
  return hooks;
}

}  // namespace

void bind_surroundings(py::module_& m) {
  m.def(
      "digest_of_constants",
      [](const std::vector<py::dict>& dictionaries) {
        return digest(dictionaries, [](PyObject* value) -> std::optional<std::size_t> {
          if (!is_constant(value)) return std::nullopt;
          return static_cast<std::size_t>(PyObject_Hash(value));
        });
      },
      "dictionaries"_a, "Of their numbers, strings, bools and None, and of the order of these.");
  m.def(
      "digest_of_identities",
      [](const std::vector<py::dict>& dictionaries) {
        return digest(dictionaries, [](PyObject* value) -> std::optional<std::size_t> {
          return std::hash<PyObject*>()(value);
        });
      },
      "dictionaries"_a, "Of which objects they hold.");
  m.def("count_node_hooks", &count_node_hooks, "roots"_a,
        "Hooks and pre-hooks of the nodes of the graph below these tensors; hooks of tensors are "
        "not counted.");
}

}  // namespace nanlocator
