#include "python_values.hpp"

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/python_variable.h>

#include <limits>

namespace py = pybind11;

namespace nanlocator {
namespace {

constexpr int kDeepestValue = 12;  // bundle.json may be nested 32 deep
constexpr std::size_t kLongestRepr = 200;

std::string type_name(const py::handle& object) {
  const auto type = py::type::handle_of(object);
  return py::cast<std::string>(type.attr("__module__")) + "." +
         py::cast<std::string>(type.attr("__qualname__"));
}

BundleValue unsupported(const py::handle& object) {
  BundleValue value;
  value.kind = BundleValueKind::unsupported;
  value.text = type_name(object);
  try {
    value.text += ": " + py::cast<std::string>(py::repr(object)).substr(0, kLongestRepr);
  } catch (const py::error_already_set&) {  // repr raises: use the type alone
  }
  return value;
}

/// The fields of a dataclass (a ModelOutput is both a dataclass and a dictionary that hides None
/// fields) or of a named tuple; None for everything else.
py::object fields_of(const py::handle& object) {
  py::dict fields;
  const auto take = [&](const py::handle& names) {
    for (const auto field : names) {
      if (py::hasattr(object, field)) fields[field] = object.attr(field);
    }
  };
  if (py::hasattr(object, "__dataclass_fields__") && !PyType_Check(object.ptr())) {
    take(object.attr("__dataclass_fields__"));
  } else if (py::isinstance<py::tuple>(object) && py::hasattr(object, "_fields")) {
    take(object.attr("_fields"));
  } else {
    return py::none();
  }
  return std::move(fields);
}

}  // namespace

BundleValue ValueConverter::value(const py::handle& object, const std::string& name, int depth) {
  BundleValue result;
  const auto of_kind = [&](BundleValueKind kind) -> BundleValue& {
    result.kind = kind;
    return result;
  };
  if (object.is_none()) return result;
  if (depth > kDeepestValue) return unsupported(object);
  if (THPVariable_Check(object.ptr())) {
    return storages_.add(THPVariable_Unpack(object.ptr()), name);
  }
  if (py::isinstance<py::bool_>(object)) {
    of_kind(BundleValueKind::boolean).boolean = py::cast<bool>(object);
  } else if (py::isinstance<py::int_>(object)) {
    int overflow = 0;
    const auto number = PyLong_AsLongLongAndOverflow(object.ptr(), &overflow);
    if (overflow != 0) return unsupported(object);
    of_kind(BundleValueKind::integer).integer = number;
  } else if (py::isinstance<py::float_>(object)) {
    of_kind(BundleValueKind::real).real = PyFloat_AS_DOUBLE(object.ptr());
  } else if (PyComplex_Check(object.ptr())) {
    of_kind(BundleValueKind::complex).real = PyComplex_RealAsDouble(object.ptr());
    result.imaginary = PyComplex_ImagAsDouble(object.ptr());
  } else if (py::isinstance<py::str>(object)) {
    of_kind(BundleValueKind::text).text = py::cast<std::string>(object);
  } else if (const auto fields = fields_of(object); !fields.is_none()) {
    dictionary(py::reinterpret_borrow<py::dict>(fields), name, depth, result);
    of_kind(BundleValueKind::object).text = type_name(object);
  } else if (py::isinstance<py::tuple>(object) || py::isinstance<py::list>(object)) {
    of_kind(py::isinstance<py::tuple>(object) ? BundleValueKind::tuple : BundleValueKind::list);
    std::size_t i = 0;
    for (const auto item : py::reinterpret_borrow<py::sequence>(object)) {
      result.items.push_back(value(item, name + "." + std::to_string(i++), depth + 1));
    }
  } else if (PyDict_Check(object.ptr())) {
    const auto items = py::reinterpret_borrow<py::dict>(object);
    for (const auto& [key, _] : items) {
      if (!py::isinstance<py::str>(key)) return unsupported(object);
    }
    dictionary(items, name, depth, of_kind(BundleValueKind::dictionary));
  } else {
    return unsupported(object);
  }
  return result;
}

std::vector<BundleValue> ValueConverter::values(const py::object& sequence,
                                                const std::string& name) {
  std::vector<BundleValue> result;
  if (sequence.is_none()) return result;
  std::size_t i = 0;
  for (const auto item : sequence) {
    result.push_back(value(item, name + "." + std::to_string(i++)));
  }
  return result;
}

void ValueConverter::dictionary(const py::dict& items, const std::string& name, int depth,
                                BundleValue& result) {
  for (const auto& [key, item] : items) {
    result.names.push_back(py::cast<std::string>(key));
    result.items.push_back(value(item, name + "." + result.names.back(), depth + 1));
  }
}

}  // namespace nanlocator
