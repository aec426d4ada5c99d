// Batched scans of many tensors.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings.hpp"
#include "nanlocator/tensor/tensor_scans.hpp"

namespace py = pybind11;
using py::literals::operator""_a;

namespace nanlocator {

void bind_scans(py::module_& m) {
  using ReleaseGil = py::call_guard<py::gil_scoped_release>;
  py::class_<TensorScans>(m, "TensorScans")
      .def(py::init<>())
      .def("enqueue", &TensorScans::enqueue, "tensor"_a, ReleaseGil(),
           "Its TensorStats where they are there at once, else the number that `read` resolves; "
           "None "
           "for what cannot be read.")
      .def("read", &TensorScans::read, ReleaseGil(),
           "The TensorStats by number; waits for the devices, and forgets the numbers.");
}

}  // namespace nanlocator
