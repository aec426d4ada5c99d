// What surrounds a call: settings and parts of modules, hooks of autograd's nodes. Read in each
// step, so in C++.
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <unordered_set>
#include <utility>
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

std::size_t mixed_with(std::size_t mixed, std::size_t value) {  // boost::hash_combine
  return mixed ^ (value + 0x9e3779b97f4a7c15 + (mixed << 6) + (mixed >> 2));
}

void for_each_value(PyObject* dictionary, const auto& use) {
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  for (Py_ssize_t position = 0; PyDict_Next(dictionary, &position, &key, &value) != 0;) use(value);
}

/// The attributes of objects, which it does not keep alive.
class Held {
 public:
  explicit Held(const std::vector<py::object>& owners) {
    for (const py::object& owner : owners) owners_.emplace_back(owner);
  }

  /// Calls `use` with the dictionary of each that still exists.
  void for_each(const auto& use) const {
    for (const py::weakref& each : owners_) {
      const py::object owner = each();
      if (owner.is_none()) continue;
      const auto attributes =
          py::reinterpret_steal<py::object>(PyObject_GenericGetDict(owner.ptr(), nullptr));
      if (!attributes) throw py::error_already_set();
      use(attributes.ptr());
    }
  }

 private:
  std::vector<py::weakref> owners_;
};

/// Which objects dictionaries held: their addresses, which are only compared.
struct Identities {
  std::vector<PyObject*> objects;
  std::vector<std::size_t> ends;  // of each dictionary's objects

  [[nodiscard]] std::span<PyObject* const> of(std::size_t i) const {
    const std::size_t begin = i == 0 ? 0 : ends[i - 1];
    return std::span(objects).subspan(begin, ends[i] - begin);
  }
  /// Whether each dictionary holds later all that it held here.
  [[nodiscard]] bool are_in(const Identities& later) const {
    if (objects == later.objects) return true;
    if (ends.size() != later.ends.size()) return false;
    for (std::size_t i = 0; i < ends.size(); ++i) {
      const auto now = later.of(i);
      const std::unordered_set<const PyObject*> held(now.begin(), now.end());
      const auto is_held = [&](const PyObject* object) { return held.contains(object); };
      if (!std::ranges::all_of(of(i), is_held)) return false;
    }
    return true;
  }
};

/// Healthy steps change nothing, and then allocate nothing.
class HeldObjects {
 public:
  /// `names`: of their attributes that are dictionaries; if empty, their attributes themselves.
  HeldObjects(const std::vector<py::object>& owners, const std::vector<py::str>& names)
      : held_(owners), names_(names) {}

  [[nodiscard]] std::shared_ptr<Identities> now() {
    std::size_t mixed = 0;
    for_each([&](PyObject* dictionary) {
      mixed = mixed_with(mixed, static_cast<std::size_t>(PyDict_GET_SIZE(dictionary)));
      for_each_value(dictionary, [&](PyObject* value) {
        mixed = mixed_with(mixed, std::hash<PyObject*>()(value));
      });
    });
    if (latest_ && mixed == digest_) return latest_;
    auto made = std::make_shared<Identities>();
    for_each([&](PyObject* dictionary) {
      for_each_value(dictionary, [&](PyObject* value) { made->objects.push_back(value); });
      made->ends.push_back(made->objects.size());
    });
    digest_ = mixed;
    latest_ = std::move(made);
    return latest_;
  }

 private:
  void for_each(const auto& use) const {
    held_.for_each([&](PyObject* attributes) {
      if (names_.empty()) return use(attributes);
      for (const py::str& name : names_) {
        PyObject* const found = PyDict_GetItem(attributes, name.ptr());
        if (found != nullptr && PyDict_Check(found)) use(found);
      }
    });
  }

  Held held_;
  std::vector<py::str> names_;
  std::size_t digest_ = 0;
  std::shared_ptr<Identities> latest_;
};

class HeldConstants {
 public:
  explicit HeldConstants(const std::vector<py::object>& owners) : held_(owners) {}

  [[nodiscard]] std::int64_t now() const {
    std::size_t mixed = 0;
    held_.for_each([&](PyObject* attributes) {
      for_each_value(attributes, [&](PyObject* value) {
        if (is_constant(value)) {
          mixed = mixed_with(mixed, static_cast<std::size_t>(PyObject_Hash(value)));
        }
      });
    });
    return static_cast<std::int64_t>(mixed);
  }

 private:
  Held held_;
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
  py::class_<Identities, std::shared_ptr<Identities>>(m, "Identities",
                                                      "Which objects dictionaries held.")
      .def("are_in", &Identities::are_in, "later"_a,
           "Whether each of the same dictionaries held later all that it held then.");
  py::class_<HeldObjects>(m, "HeldObjects", "Which objects the dictionaries of owners hold.")
      .def(py::init<std::vector<py::object>, std::vector<py::str>>(), "owners"_a, "names"_a)
      .def("now", &HeldObjects::now);
  py::class_<HeldConstants>(m, "HeldConstants",
                            "Numbers, strings, bools and None in owners, and their order.")
      .def(py::init<std::vector<py::object>>(), "owners"_a)
      .def("now", &HeldConstants::now, "A digest of them.");
  m.def("count_node_hooks", &count_node_hooks, "roots"_a,
        "Hooks and pre-hooks of the nodes of the graph below these tensors; hooks of tensors are "
        "not counted.");
}

}  // namespace nanlocator
