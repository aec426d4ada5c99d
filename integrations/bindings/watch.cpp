// The module stack, the module watch, and the one-line scan of a tensor.
#include <pybind11/stl.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "nanlocator/operators/operator_trace.hpp"
#include "nanlocator/tensor/scan_one.hpp"
#include "nanlocator/watch/module_scope.hpp"
#include "nanlocator/watch/module_watch.hpp"
#include "plain_containers.hpp"

namespace py = pybind11;
using py::literals::operator""_a;

namespace nanlocator {
namespace {

// ---- Tensors in Python's containers -------------------------------------------------------------

constexpr int kMostNested = 8;  // also stops at a container that contains itself

std::string text_of(PyObject* key) {
  return py::str(py::handle(key)).cast<std::string>();
}

bool is_plain_value(PyObject* object) {
  return object == Py_None || PyLong_Check(object) || PyFloat_Check(object) ||
         PyUnicode_Check(object);
}

/// False for an object of another library, which may hold tensors.
bool holds_no_tensor(PyObject* object) {
  return is_plain_value(object) || PyCallable_Check(object) != 0 || PyBytes_Check(object) ||
         THPDtype_Check(object) || THPDevice_Check(object) ||
         PyObject_HasAttrString(reinterpret_cast<PyObject*>(Py_TYPE(object)), "__members__") != 0;
}

/// Adds every tensor in `object`: in tuples and lists as "[0]", in dictionaries as "[key]", in
/// dataclasses, named tuples and transformers' outputs as ".name". Returns whether that is all.
bool collect_tensors(PyObject* object, const std::string& role, int depth,
                     std::vector<NamedTensor>& tensors) {
  if (THPVariable_Check(object)) {
    tensors.push_back({role, THPVariable_Unpack(object)});
    return true;
  }
  if (is_plain_value(object)) return true;
  if (depth >= kMostNested) return false;
  bool is_all = true;
  if (PyTuple_Check(object) || PyList_Check(object)) {
    py::object names;
    if (PyTuple_Check(object) && !PyTuple_CheckExact(object)) {
      names = py::getattr(object, "_fields", py::none());
    }
    const bool is_named = names && py::isinstance<py::tuple>(names) &&
                          PyTuple_GET_SIZE(names.ptr()) == PySequence_Fast_GET_SIZE(object);
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); ++i) {
      PyObject* const item = PySequence_Fast_GET_ITEM(object, i);
      if (is_plain_value(item)) continue;
      is_all &= collect_tensors(item,
                                is_named ? role + "." + text_of(PyTuple_GET_ITEM(names.ptr(), i))
                                         : role + "[" + std::to_string(i) + "]",
                                depth + 1, tensors);
    }
    return is_all;
  }
  auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  const bool is_dataclass = PyObject_HasAttrString(type, "__dataclass_fields__") != 0;
  if (PyDict_Check(object)) {
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    for (Py_ssize_t position = 0; PyDict_Next(object, &position, &key, &value) != 0;) {
      if (is_plain_value(value)) continue;
      is_all &= collect_tensors(
          value, is_dataclass ? role + "." + text_of(key) : role + "[" + text_of(key) + "]",
          depth + 1, tensors);
    }
    return is_all;
  }
  if (is_dataclass) {
    const py::dict fields = py::getattr(type, "__dataclass_fields__");
    for (const auto& field : fields) {
      // A field that is missing or raises holds no tensor that a call uses.
      const auto value =
          py::reinterpret_steal<py::object>(PyObject_GetAttr(object, field.first.ptr()));
      if (!value) {
        PyErr_Clear();
        continue;
      }
      is_all &=
          collect_tensors(value.ptr(), role + "." + text_of(field.first.ptr()), depth + 1, tensors);
    }
    return is_all;
  }
  // A mapping that is not a dict (transformers' BatchEncoding, a UserDict) keeps its items in
  // `data`.
  if (PyMapping_Check(object) != 0 && PyObject_HasAttrString(object, "data") != 0) {
    const py::object data = py::getattr(object, "data", py::none());
    if (PyDict_Check(data.ptr())) return collect_tensors(data.ptr(), role, depth + 1, tensors);
  }
  return holds_no_tensor(object);
}

std::vector<NamedTensor> inputs_of(const py::tuple& arguments, const py::dict& keywords) {
  std::vector<NamedTensor> tensors;
  const std::string role = "input";
  collect_tensors(arguments.ptr(), role, 0, tensors);
  if (PyDict_GET_SIZE(keywords.ptr()) > 0) collect_tensors(keywords.ptr(), role, 0, tensors);
  return tensors;
}

std::vector<NamedTensor> outputs_of(const py::object& output) {
  std::vector<NamedTensor> tensors;
  const bool is_single = THPVariable_Check(output.ptr());
  collect_tensors(output.ptr(), is_single ? "output[0]" : "output", 0, tensors);
  return tensors;
}

// ---- Bindings -----------------------------------------------------------------------------------

void bind_module_scope(py::module_& m) {
  py::class_<PathHandle>(m, "ModulePath")
      .def(py::init([](const std::string& path) { return PathHandle{intern_module_path(path)}; }),
           "path"_a)
      .def("__str__", [](const PathHandle& handle) { return *handle.path; });
  m.def(
      "enter_module", [](const PathHandle& handle) { return enter_module(handle.path); }, "path"_a,
      "Pushes; returns the depth before.");
  m.def(
      "tensors_in",
      [](const py::object& object) {
        std::vector<at::Tensor> tensors;
        if (const auto plain = plain_tensors(object)) {
          for (PyObject* each : *plain) tensors.push_back(THPVariable_Unpack(each));
          return tensors;
        }
        std::vector<NamedTensor> named;
        collect_tensors(object.ptr(), "", 0, named);
        for (auto& each : named) tensors.push_back(std::move(each.tensor));
        return tensors;
      },
      "object"_a, "In containers, dataclasses and outputs of transformers too, in their order.");
  m.def(
      "note_model_inputs",
      [](const py::tuple& args, const py::dict& kwargs) {
        std::vector<NamedTensor> named;
        const bool is_all =
            collect_tensors(args.ptr(), "", 0, named) & collect_tensors(kwargs.ptr(), "", 0, named);
        std::vector<at::Tensor> tensors;
        for (auto& each : named) tensors.push_back(std::move(each.tensor));
        note_model_inputs(tensors, is_all);
      },
      "args"_a, "kwargs"_a, "For the operator trace: the program passes these to a model.");
  m.def("leave_modules", &leave_modules, "depth"_a);
  m.def("module_depth", &module_depth);
  m.def("current_module", []() -> std::optional<std::string> {
    const ModulePath path = current_module();
    if (!path) return std::nullopt;
    return *path;
  });
}

void bind_records(py::module_& m) {
  py::class_<Sighting>(m, "Sighting")
      .def_readonly("iteration", &Sighting::iteration)
      .def_readonly("microbatch", &Sighting::microbatch)
      .def_readonly("chunk", &Sighting::chunk)
      .def_property_readonly("phase",
                             [](const Sighting& s) { return std::string(name_of(s.phase)); })
      .def_readonly("module", &Sighting::module)
      .def_readonly("op", &Sighting::op)
      .def_property_readonly("role", [](const Sighting& s) { return s.role.text(); })
      .def_readonly("parameter_id", &Sighting::parameter_id)
      .def_readonly("parameter", &Sighting::parameter)
      .def_readonly("dtype", &Sighting::dtype)
      .def_readonly("shape", &Sighting::shape)
      .def_readonly("stats", &Sighting::stats)
      .def_readonly("position", &Sighting::position)
      .def("__repr__", [](const Sighting& s) {
        return "<Sighting " + std::string(name_of(s.phase)) + " " + s.module + " " + s.role.text() +
               ">";
      });
  py::class_<CodeLine>(m, "CodeLine")
      .def_readonly("file", &CodeLine::file)
      .def_readonly("line", &CodeLine::line)
      .def_readonly("function", &CodeLine::function)
      .def_readonly("text", &CodeLine::text);
  py::class_<Operand>(m, "Operand")
      .def_readonly("name", &Operand::name)
      .def_readonly("element", &Operand::element)
      .def_readonly("dtype", &Operand::dtype)
      .def_readonly("shape", &Operand::shape)
      .def_readonly("stats", &Operand::stats)
      .def_readonly("negatives", &Operand::negatives)
      .def_readonly("number", &Operand::number)
      .def_readonly("at_first_bad", &Operand::at_first_bad)
      .def_readonly("requires_grad", &Operand::requires_grad);
  py::class_<Birth>(m, "Birth")
      .def_property_readonly("kind", [](const Birth& b) { return std::string(name_of(b.kind)); })
      .def_readonly("sighting", &Birth::sighting)
      .def_readonly("is_module_inferred", &Birth::is_module_inferred)
      .def_readonly("node", &Birth::node)
      .def_readonly("forward_op", &Birth::forward_op)
      .def_readonly("parent", &Birth::parent)
      .def_readonly("is_custom_operator", &Birth::is_custom_operator)
      .def_readonly("custom_function", &Birth::custom_function)
      .def_readonly("code", &Birth::code)
      .def_readonly("framework_code", &Birth::framework_code)
      .def_readonly("operands", &Birth::operands)
      .def_property_readonly(
          "extent",
          [](const Birth& b) -> py::object {
            if (!b.extent) return py::none();
            py::list dimensions;
            for (const auto& each : b.extent->dimensions) {
              dimensions.append(py::make_tuple(each.first, each.last, each.count));
            }
            return py::make_tuple(dimensions, b.extent->is_block);
          },
          "(first, last and count of the bad indices of each dimension), is_block; or None")
      .def_property_readonly("weights",
                             [](const Birth& b) {
                               py::dict weights;
                               for (const auto& each : b.weights) {
                                 weights[py::str(each.parameter)] = each.absmax;
                               }
                               return weights;
                             })
      .def_readonly("reader", &Birth::reader)
      .def_readonly("writer", &Birth::writer)
      .def_readonly("inside", &Birth::inside)
      .def_readonly("stack", &Birth::stack)
      .def_property_readonly(
          "reached",
          [](const Birth& b) {
            std::vector<std::pair<std::string, std::string>> reached;
            for (const auto& each : b.reached) reached.emplace_back(name_of(each.kind), each.name);
            return reached;
          },
          "Pairs of kind and name.")
      .def_readonly("bundle", &Birth::bundle)
      .def_property_readonly("replay",
                             [](const Birth& b) { return std::string(name_of(b.replay)); })
      .def_readonly("replay_lines", &Birth::replay_lines)
      .def("__repr__", [](const Birth& b) {
        return "<Birth " + std::string(name_of(b.kind)) + " " +
               std::string(name_of(b.sighting.phase)) + " " + b.sighting.module + " " +
               b.sighting.role.text() + ">";
      });
}

void bind_module_watch(py::module_& m) {
  py::class_<ModuleWatch, std::shared_ptr<ModuleWatch>>(m, "ModuleWatch")
      .def(py::init<int>(), "threads"_a = 1)
      .def("begin_step", &ModuleWatch::begin_step)
      // enter and leave are short and keep the GIL, because they read Python containers.
      .def(
          "enter",
          [](ModuleWatch& watch, const PathHandle& handle, const py::tuple& arguments,
             const py::dict& keywords) {
            return watch.enter(handle.path, inputs_of(arguments, keywords));
          },
          "path"_a, "args"_a, "kwargs"_a)
      .def(
          "leave",
          [](ModuleWatch& watch, ModuleCallId call, const py::object& output) {
            watch.leave(call, outputs_of(output));
          },
          "call"_a, "output"_a)
      .def("abandon", &ModuleWatch::abandon, "call"_a)
      .def(
          "collect",
          [](ModuleWatch& watch, std::int64_t iteration, const NamedPairs& parameters,
             const NamedPairs& buffers) {
            const auto of_parameters = named_tensors(parameters);
            const auto of_buffers = named_tensors(buffers);
            ModuleWatch::Collected collected;
            {
              const py::gil_scoped_release release;
              collected = watch.collect(iteration, of_parameters, of_buffers);
            }
            return std::pair{std::move(collected.sightings), std::move(collected.births)};
          },
          "iteration"_a, "parameters"_a, "buffers"_a, "(sightings, births)");
}

void bind_scan_one(py::module_& m) {
  m.def(
      "scan_one",
      [](const at::Tensor& tensor) -> std::optional<TensorStats> {
        const py::gil_scoped_release release;
        return scan_one(tensor);
      },
      "tensor"_a, "Its stats, wherever it is; None for what cannot hold a NaN or Inf.");
}

}  // namespace

void bind_watch(py::module_& m) {
  bind_module_scope(m);
  bind_records(m);
  bind_module_watch(m);
  bind_scan_one(m);
}

}  // namespace nanlocator
