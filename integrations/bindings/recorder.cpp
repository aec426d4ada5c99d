// The recorder of a step, and the execution of what it has recorded.
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "nanlocator/trace/step_recorder.hpp"

namespace py = pybind11;
using py::literals::operator""_a;

namespace nanlocator {
namespace {

using Event = std::shared_ptr<RecordedEvent>;
using ReleaseGil = py::call_guard<py::gil_scoped_release>;

/// Python's classes know no const.
Event exposed(std::shared_ptr<const RecordedEvent> event) {
  return std::const_pointer_cast<RecordedEvent>(std::move(event));
}

/// What the engine may drop on any thread, without the GIL.
std::shared_ptr<void> payload_of(py::object object) {
  return {new py::object(std::move(object)), [](void* dropped) {
            const py::gil_scoped_acquire gil;
            delete static_cast<py::object*>(dropped);
          }};
}

py::object object_of(const RecordedEvent& event) {
  return event.payload() ? *static_cast<py::object*>(event.payload().get()) : py::none();
}

}  // namespace

void bind_recorder(py::module_& m) {
  py::class_<RecordedEvent, Event>(m, "RecordedEvent")
      .def_property_readonly("is_operator", &RecordedEvent::is_operator)
      .def_property_readonly("payload", &object_of)
      .def_property_readonly("backwards_before", &RecordedEvent::backwards_before);
  py::class_<RecordedValue>(m, "RecordedValue");
  py::class_<StepRecorder>(m, "StepRecorder")
      .def(py::init([](std::uint64_t most_bytes) {
             return std::make_unique<StepRecorder>(
                 RecorderOptions{.program_code = python_code(), .most_bytes = most_bytes});
           }),
           "most_bytes"_a)
      .def("set_parameters", &StepRecorder::set_parameters, "parameters"_a)
      .def("pause", &StepRecorder::pause)
      .def("resume", &StepRecorder::resume)
      .def("begin_step", &StepRecorder::begin_step, ReleaseGil())
      .def("forget", &StepRecorder::forget, ReleaseGil())
      .def(
          "enter_module",
          [](StepRecorder& r, const std::optional<PathHandle>& path) {
            r.enter_module(path ? path->path : nullptr);
          },
          "path"_a)
      .def("value_of", &StepRecorder::value_of, "tensor"_a)
      .def(
          "add_call",
          [](StepRecorder& r, py::object payload, const std::vector<at::Tensor>& inputs,
             const std::vector<at::Tensor>& outputs) {
            r.add_call(payload_of(std::move(payload)), inputs, outputs);
          },
          "payload"_a, "inputs"_a, "outputs"_a)
      .def(
          "add_backward",
          [](StepRecorder& r, py::object payload, const std::vector<at::Tensor>& roots) {
            r.add_backward(payload_of(std::move(payload)), roots);
          },
          "payload"_a, "roots"_a)
      .def_property_readonly("backwards", &StepRecorder::backwards)
      .def("problem", &StepRecorder::problem)
      .def("needed",
           [](const StepRecorder& r) {
             std::vector<Event> events;
             for (auto& event : r.needed()) events.push_back(exposed(std::move(event)));
             return events;
           })
      .def("size", &StepRecorder::size);
  py::class_<StepReplay>(m, "StepReplay")
      .def(py::init([](const std::vector<Event>& events) {
             return std::make_unique<StepReplay>(
                 std::vector<std::shared_ptr<const RecordedEvent>>(events.begin(), events.end()));
           }),
           "events"_a)
      .def("tensor", &StepReplay::tensor, "value"_a)
      .def(
          "set_outputs",
          [](StepReplay& r, const RecordedEvent& call, const std::vector<at::Tensor>& outputs) {
            r.set_outputs(call, outputs);
          },
          "call"_a, "outputs"_a)
      .def("execute", &StepReplay::execute, "operation"_a, ReleaseGil())
      .def("leave", &StepReplay::leave, "event"_a, ReleaseGil());
}

}  // namespace nanlocator
