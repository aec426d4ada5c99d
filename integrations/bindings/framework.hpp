// The engine's contract with a framework (nanlocator/step/framework.hpp), for Python frameworks.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

#include "interrupted.hpp"
#include "nanlocator/step/framework.hpp"

namespace nanlocator {

/// A Python object that the engine may call, copy and drop without the GIL.
class PythonObject {
 public:
  explicit PythonObject(pybind11::object object)
      : object_(new pybind11::object(std::move(object)), [](pybind11::object* dropped) {
          const pybind11::gil_scoped_acquire gil;
          delete dropped;
        }) {}

  /// Takes the GIL. Throws Interrupted for anything but an Exception; rethrows an Exception.
  template <typename Result, typename... Arguments>
  Result call(const char* method, const Arguments&... arguments) const {
    return with_gil([&] { return object_->attr(method)(arguments...).template cast<Result>(); });
  }
  /// The same for an attribute.
  template <typename Result>
  [[nodiscard]] Result get(const char* attribute) const {
    return with_gil([&] { return object_->attr(attribute).template cast<Result>(); });
  }
  /// True if the attribute is None.
  [[nodiscard]] bool lacks(const char* attribute) const {
    return with_gil([&] { return object_->attr(attribute).is_none(); });
  }

 private:
  template <typename Work>
  static std::invoke_result_t<const Work&> with_gil(const Work& work) {
    const pybind11::gil_scoped_acquire gil;
    try {
      return work();
    } catch (pybind11::error_already_set& error) {
      if (error.matches(PyExc_Exception)) throw;
      throw Interrupted{std::move(error)};
    }
  }

  std::shared_ptr<pybind11::object> object_;
};

/// Scale, whether it falls on overflow, whether the gradients are multiplied by it.
using PythonScale = std::optional<std::tuple<double, bool, bool>>;
[[nodiscard]] std::optional<LossScale> loss_scale_of(const PythonScale& scale);

/// For an object with the attributes of nanlocator.engine.driver.Adapter; keeps it alive.
[[nodiscard]] std::shared_ptr<Framework> python_framework(pybind11::object adapter);
/// For an object with the methods of nanlocator.engine.driver.Pass.
[[nodiscard]] std::shared_ptr<StepPass> python_pass(pybind11::object step_pass);

}  // namespace nanlocator
