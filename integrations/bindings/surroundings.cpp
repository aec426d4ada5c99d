// What surrounds a call: settings and parts of modules, hooks of autograd's nodes. Read in each
// step, so in C++.
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstdint>
#include <span>
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

std::int64_t digest_of_constants(const std::vector<py::dict>& dictionaries) {
  std::size_t mixed = dictionaries.size();
  for (const py::dict& each : dictionaries) {
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    for (Py_ssize_t position = 0; PyDict_Next(each.ptr(), &position, &key, &value) != 0;) {
      if (!is_constant(value)) continue;
      const auto hash = static_cast<std::size_t>(PyObject_Hash(value));
      mixed ^= hash + 0x9e3779b97f4a7c15 + (mixed << 6) + (mixed >> 2);  // boost::hash_combine
    }
  }
  return static_cast<std::int64_t>(mixed);
}

/// Which objects dictionaries hold: their addresses, which are only compared.
class Identities {
 public:
  explicit Identities(const std::vector<py::dict>& dictionaries) {
    ends_.reserve(dictionaries.size());
    for (const py::dict& each : dictionaries) {
      PyObject* key = nullptr;
      PyObject* value = nullptr;
      for (Py_ssize_t position = 0; PyDict_Next(each.ptr(), &position, &key, &value) != 0;) {
        objects_.push_back(value);
      }
      ends_.push_back(objects_.size());
    }
  }

  /// Whether each dictionary of `later` holds all that it held here.
  [[nodiscard]] bool are_in(const Identities& later) const {
    if (objects_ == later.objects_) return true;
    if (ends_.size() != later.ends_.size()) return false;
    for (std::size_t i = 0; i < ends_.size(); ++i) {
      const auto now = later.of(i);
      const std::unordered_set<const PyObject*> held(now.begin(), now.end());
      const auto is_held = [&](const PyObject* object) { return held.contains(object); };
      if (!std::ranges::all_of(of(i), is_held)) return false;
    }
    return true;
  }

 private:
  [[nodiscard]] std::span<PyObject* const> of(std::size_t i) const {
    const std::size_t begin = i == 0 ? 0 : ends_[i - 1];
    return std::span(objects_).subspan(begin, ends_[i] - begin);
  }

  std::vector<PyObject*> objects_;
  std::vector<std::size_t> ends_;  // of each dictionary's objects
};

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
  m.def("digest_of_constants", &digest_of_constants, "dictionaries"_a,
        "Of their numbers, strings, bools and None, and of the order of these.");
  py::class_<Identities>(m, "Identities", "Which objects dictionaries hold, without keeping them.")
      .def(py::init<const std::vector<py::dict>&>(), "dictionaries"_a)
      .def("are_in", &Identities::are_in, "later"_a,
           "Whether each of the same dictionaries holds later all that it held then.");
  m.def("count_node_hooks", &count_node_hooks, "roots"_a,
        "Hooks and pre-hooks of the nodes of the graph below these tensors; hooks of tensors are "
        "not counted.");
}

}  // namespace nanlocator
