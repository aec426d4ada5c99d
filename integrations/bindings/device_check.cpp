#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include "bindings.hpp"
#include "netcheck/compute_check.hpp"
#include "netcheck/memory_check.hpp"

namespace py = pybind11;
using py::literals::operator""_a;

namespace nanlocator {
namespace {

using namespace netcheck;
using ReleaseGil = py::call_guard<py::gil_scoped_release>;

}  // namespace

void bind_device_check(py::module_& m) {
  py::class_<OperatorCheck>(m, "OperatorCheck")
      .def_readonly("name", &OperatorCheck::name)
      .def_readonly("dtype", &OperatorCheck::dtype)
      .def_readonly("worst", &OperatorCheck::worst)
      .def_readonly("fingerprint", &OperatorCheck::fingerprint);
  py::class_<ComputeCheck>(m, "ComputeCheck")
      .def_property_readonly("is_right", &ComputeCheck::is_right)
      .def_readonly("failures", &ComputeCheck::failures)
      .def_readonly("operators", &ComputeCheck::operators)
      .def_readonly("seconds", &ComputeCheck::seconds);
  py::class_<MemoryCheck>(m, "MemoryCheck")
      .def_property_readonly("is_right", &MemoryCheck::is_right)
      .def_readonly("failures", &MemoryCheck::failures)
      .def_readonly("completed", &MemoryCheck::completed)
      .def_readonly("tests", &MemoryCheck::tests)
      .def_readonly("bytes", &MemoryCheck::bytes)
      .def_readonly("seconds", &MemoryCheck::seconds);
  m.def(
      "check_compute",
      [](const std::string& device, const AfterOperator& after) {
        return check_compute(at::Device(device), after);
      },
      "device"_a, "after"_a = AfterOperator(), ReleaseGil(),
      "Operators on fixed inputs against their references, and repeated. after(name, dtype, "
      "repeat, "
      "result) may change a result on the host before it is looked at.");
  m.def(
      "check_memory",
      [](const std::string& device, double fraction, double seconds, const AfterWrite& after) {
        return check_memory(at::Device(device), fraction, seconds, after);
      },
      "device"_a, "fraction"_a = 0.0, "seconds"_a = 10.0, "after"_a = AfterWrite(), ReleaseGil(),
      "Patterns written to this part of the free memory and read back. after(test, chunks) may "
      "change what has been written.");
}

}  // namespace nanlocator
