// std::filesystem::path in arguments and results of bound functions. Torch 2.6's pybind11 lacks
// pybind11/stl/filesystem.h.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <filesystem>

namespace pybind11::detail {

template <>
struct type_caster<std::filesystem::path> {
  PYBIND11_TYPE_CASTER(std::filesystem::path, const_name("os.PathLike | str | bytes"));

  bool load(handle source, bool /*convert*/) {
    PyObject* bytes = nullptr;
    if (PyUnicode_FSConverter(source.ptr(), &bytes) == 0) {
      PyErr_Clear();
      return false;
    }
    value =
        std::string(PyBytes_AS_STRING(bytes), static_cast<std::size_t>(PyBytes_GET_SIZE(bytes)));
    Py_DECREF(bytes);
    return true;
  }

  /// Converts to pathlib.Path.
  static handle cast(const std::filesystem::path& path, return_value_policy, handle) {
    const auto text = reinterpret_steal<object>(PyUnicode_DecodeFSDefaultAndSize(
        path.native().data(), static_cast<Py_ssize_t>(path.native().size())));
    return module_::import("pathlib").attr("Path")(text).release();
  }
};

}  // namespace pybind11::detail
