#include "plain_containers.hpp"

#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>

namespace py = pybind11;
using py::literals::operator""_a;

namespace nanlocator {
namespace {

constexpr int kDeepest = 16;  // also stops at a container that contains itself

bool is_constant(PyObject* object) {
  return object == Py_None || PyBool_Check(object) || PyLong_CheckExact(object) ||
         PyFloat_CheckExact(object) || PyComplex_CheckExact(object) ||
         PyUnicode_CheckExact(object) || PyBytes_CheckExact(object) || THPDtype_Check(object) ||
         THPDevice_Check(object);
}

bool is_sequence(PyObject* object) {
  return PyTuple_CheckExact(object) || PyList_CheckExact(object);
}

/// False at anything else than plain containers, constants and tensors.
bool collect(PyObject* object, int depth, std::vector<PyObject*>& tensors) {
  if (is_constant(object)) return true;
  if (is_sequence(object)) {
    if (depth > kDeepest) return false;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); ++i) {
      if (!collect(PySequence_Fast_GET_ITEM(object, i), depth + 1, tensors)) return false;
    }
    return true;
  }
  if (PyDict_CheckExact(object)) {
    if (depth > kDeepest) return false;
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    for (Py_ssize_t position = 0; PyDict_Next(object, &position, &key, &value) != 0;) {
      if (!is_constant(key) || !collect(value, depth + 1, tensors)) return false;
    }
    return true;
  }
  // Not isinstance, which may run code of the object.
  auto* const of_tensors = reinterpret_cast<PyTypeObject*>(THPVariableClass);
  if (PyType_IsSubtype(Py_TYPE(object), of_tensors) == 0) return false;
  tensors.push_back(object);
  return true;
}

py::object replaced(PyObject* object, PyObject* by_id) {
  if (PyTuple_CheckExact(object)) {
    py::tuple copy(PyTuple_GET_SIZE(object));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(object); ++i) {
      PyTuple_SET_ITEM(copy.ptr(), i, replaced(PyTuple_GET_ITEM(object, i), by_id).release().ptr());
    }
    return std::move(copy);
  }
  if (PyList_CheckExact(object)) {
    py::list copy(PyList_GET_SIZE(object));
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(object); ++i) {
      PyList_SET_ITEM(copy.ptr(), i, replaced(PyList_GET_ITEM(object, i), by_id).release().ptr());
    }
    return std::move(copy);
  }
  if (PyDict_CheckExact(object)) {
    py::dict copy;
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    for (Py_ssize_t position = 0; PyDict_Next(object, &position, &key, &value) != 0;) {
      copy[py::handle(key)] = replaced(value, by_id);
    }
    return std::move(copy);
  }
  const auto id = py::reinterpret_steal<py::object>(PyLong_FromVoidPtr(object));
  PyObject* const found = PyDict_GetItemWithError(by_id, id.ptr());
  if (found == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return py::reinterpret_borrow<py::object>(found != nullptr ? found : object);
}

}  // namespace

std::optional<std::vector<PyObject*>> plain_tensors(const py::handle& object) {
  std::vector<PyObject*> tensors;
  if (!collect(object.ptr(), 0, tensors)) return std::nullopt;
  return tensors;
}

void bind_plain_containers(py::module_& m) {
  m.def(
      "gradients_of",
      [](const py::object& given) {
        const py::list parameters(given);  // the list itself
        py::list numbers, gradients;
        for (std::size_t i = 0; i < parameters.size(); ++i) {
          PyObject* const parameter = parameters[i].ptr();
          if (!THPVariable_Check(parameter)) throw py::type_error("gradients_of takes tensors");
          const at::Tensor& gradient = THPVariable_Unpack(parameter).grad();
          if (!gradient.defined()) continue;
          numbers.append(i);
          gradients.append(py::reinterpret_steal<py::object>(THPVariable_Wrap(gradient)));
        }
        return py::make_tuple(numbers, gradients);
      },
      "parameters"_a, "The numbers of those that have a gradient, and the gradients.");
  m.def(
      "plain_tensors",
      [](const py::object& object) -> py::object {
        const auto tensors = plain_tensors(object);
        if (!tensors) return py::none();
        py::list list(tensors->size());
        for (std::size_t i = 0; i < tensors->size(); ++i) list[i] = py::handle((*tensors)[i]);
        return std::move(list);
      },
      "object"_a,
      "The tensors in nested tuples, lists and dictionaries that hold nothing but tensors and "
      "constants; None if they hold anything else.");
  m.def(
      "plain_replaced",
      [](const py::object& object, const py::dict& by_id) {
        return replaced(object.ptr(), by_id.ptr());
      },
      "object"_a, "by_id"_a,
      "A copy of such containers, with the values of `by_id` in place of the objects with these "
      "ids.");
}

}  // namespace nanlocator
