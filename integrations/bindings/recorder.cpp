// The recorder of a step, and the execution of recorded events.
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "nanlocator/operators/earlier_write.hpp"
#include "nanlocator/recorder/refused_inputs.hpp"
#include "nanlocator/recorder/step_recorder.hpp"
#include "tensor/steady_copy.hpp"

namespace py = pybind11;
using py::literals::operator""_a;

namespace nanlocator {
namespace {

using Event = std::shared_ptr<RecordedEvent>;
using ReleaseGil = py::call_guard<py::gil_scoped_release>;

/// Python's context manager.
struct Refused {
  std::optional<RefusedInputs> now;
  std::vector<at::Tensor> tensors;
};

/// Python classes have no const.
Event exposed(std::shared_ptr<const RecordedEvent> event) {
  return std::const_pointer_cast<RecordedEvent>(std::move(event));
}

/// An object that the engine may drop on any thread, without the GIL.
std::shared_ptr<void> payload_of(py::object object) {
  return {new py::object(std::move(object)), [](void* dropped) {
            const py::gil_scoped_acquire gil;
            delete static_cast<py::object*>(dropped);
          }};
}

py::object object_of(const RecordedEvent& event) {
  return event.payload() ? *static_cast<py::object*>(event.payload().get()) : py::none();
}

/// The custom function whose `apply` (torch/autograd/function.py) is calling Torch now: the result
/// of `describe(cls, args, kwargs)`, and the arguments' tensors.
std::pair<std::shared_ptr<void>, std::vector<at::Tensor>> function_call(
    const py::object& describe) {
  const py::gil_scoped_acquire gil;
  try {
    const auto frame =
        py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
    if (!frame) return {};
    const auto name = frame.attr("f_code").attr("co_name").cast<std::string>();
    if (name != "apply") return {};
    const py::object locals = frame.attr("f_locals");
    for (const auto* each : {"cls", "args", "kwargs"}) {
      if (!locals.contains(each)) return {};
    }
    const auto described = describe(locals["cls"], locals["args"], locals["kwargs"]);
    const auto [payload, tensors] =
        described.cast<std::pair<py::object, std::vector<at::Tensor>>>();
    return {payload_of(payload), tensors};
  } catch (const py::error_already_set&) {
    return {};
  }
}

}  // namespace

void bind_recorder(py::module_& m) {
  py::class_<RecordedEvent, Event>(m, "RecordedEvent")
      .def_property_readonly("is_operator", &RecordedEvent::is_operator)
      .def_property_readonly("payload", &object_of)
      .def_property_readonly("backwards_before", &RecordedEvent::backwards_before);
  py::class_<RecordedValue>(m, "RecordedValue");
  m.def("content_sample", &content_sample, "tensor"_a, ReleaseGil());
  m.def("has_content", &has_content, "tensor"_a, "sample"_a, ReleaseGil());
  m.def(
      "steady_copies",
      [](const std::vector<at::Tensor>& tensors) {
        auto copies = steady_together(tensors, steady_copy);
        for (std::size_t i = 0; i < tensors.size(); ++i) note_copy(tensors[i], copies[i]);
        return copies;
      },
      "tensors"_a, ReleaseGil());
  py::class_<StepRecorder>(m, "StepRecorder")
      .def(py::init([](const py::function& function_call_of, std::uint64_t most_bytes) {
             const auto describe =
                 std::static_pointer_cast<py::object>(payload_of(function_call_of));
             return std::make_unique<StepRecorder>(
                 RecorderOptions{.program_code = python_code(),
                                 .function_call = [describe] { return function_call(*describe); },
                                 .most_bytes = most_bytes});
           }),
           "function_call"_a, "most_bytes"_a)
      .def("set_parameters", &StepRecorder::set_parameters, "parameters"_a)
      .def("state_of_gradients", &StepRecorder::state_of_gradients)
      .def("changed_gradients", &StepRecorder::changed_gradients)
      .def("zeroed_gradients", &StepRecorder::zeroed_gradients)
      .def("assigned_gradients", &StepRecorder::assigned_gradients)
      .def(
          "note_restored",
          [](StepRecorder& r, const std::vector<at::Tensor>& parameters) {
            r.note_restored(parameters);
          },
          "parameters"_a)
      .def("has_checked_gradients", &StepRecorder::has_checked_gradients)
      .def("has_reduced_gradients", &StepRecorder::has_reduced_gradients)
      .def("note_weights", &StepRecorder::note_weights)
      .def("written_by_program", &StepRecorder::written_by_program)
      .def("note_updated", &StepRecorder::note_updated)
      .def("begin_call", &StepRecorder::begin_call)
      .def("end_call", &StepRecorder::end_call)
      .def("set_loading", &StepRecorder::set_loading, "is_loading"_a)
      .def("changed_weights", &StepRecorder::changed_weights)
      .def("close", &StepRecorder::close)
      .def("pause", &StepRecorder::pause)
      .def("resume", &StepRecorder::resume)
      .def_property_readonly("is_inside_event",
                             [](const StepRecorder&) { return StepRecorder::is_inside_event(); })
      .def("begin_step", &StepRecorder::begin_step, ReleaseGil())
      .def("forget", &StepRecorder::forget, ReleaseGil())
      .def(
          "enter_module",
          [](StepRecorder& r, const std::optional<PathHandle>& path) {
            r.enter_module(path ? path->path : nullptr);
          },
          "path"_a)
      .def("value_of", &StepRecorder::value_of, "tensor"_a)
      .def("is_filled_with_bad", &StepRecorder::is_filled_with_bad, "tensor"_a)
      .def("refused", &StepRecorder::refused)
      .def(
          "note_received",
          [](StepRecorder& r, const std::vector<at::Tensor>& tensors) { r.note_received(tensors); },
          "tensors"_a)
      .def(
          "add_hook",
          [](StepRecorder& r, py::object payload, const at::Tensor& tensor) {
            r.add_hook(payload_of(std::move(payload)), tensor);
          },
          "payload"_a, "tensor"_a)
      .def("note_earlier_writes", &StepRecorder::note_earlier_writes, ReleaseGil())
      .def("steady", &StepRecorder::steady, "tensors"_a, ReleaseGil())
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
      .def("has_read", &StepRecorder::has_read, "tensor"_a)
      .def("latest_event", &StepRecorder::latest_event)
      .def("forget_since", &StepRecorder::forget_since, "event"_a)
      .def("unfinished", &StepRecorder::unfinished)
      .def("take_read", &StepRecorder::take_read)
      .def(
          "have_common_calls",
          [](StepRecorder& r, const std::vector<at::Tensor>& some,
             const std::vector<at::Tensor>& others) { return r.have_common_calls(some, others); },
          "some"_a, "others"_a)
      .def(
          "note_losses",
          [](StepRecorder& r, const std::vector<at::Tensor>& losses) { r.note_losses(losses); },
          "losses"_a)
      .def("is_like_losses", &StepRecorder::is_like_losses, "tensor"_a, "in_function"_a)
      .def("problem", &StepRecorder::problem)
      .def("needed",
           [](const StepRecorder& r) {
             std::vector<Event> events;
             for (auto& event : r.needed()) events.push_back(exposed(std::move(event)));
             return events;
           })
      .def("size", &StepRecorder::size);
  py::class_<Refused>(m, "RefusedInputs")
      .def(py::init<>())
      .def_readonly("tensors", &Refused::tensors)
      .def("__enter__", [](Refused& refused) { refused.now.emplace(); })
      .def("__exit__", [](Refused& refused, const py::args&) {
        refused.tensors = refused.now->tensors();
        refused.now.reset();
      });
  py::class_<StepReplay>(m, "StepReplay")
      .def(py::init([](const std::vector<Event>& events) {
             return std::make_unique<StepReplay>(
                 std::vector<std::shared_ptr<const RecordedEvent>>(events.begin(), events.end()));
           }),
           "events"_a)
      .def("tensor", &StepReplay::tensor, "value"_a)
      .def(
          "set_outputs",
          [](StepReplay& r, const RecordedEvent& call,
             const std::vector<std::optional<at::Tensor>>& outputs) {
            std::vector<at::Tensor> tensors;
            for (const auto& output : outputs) tensors.push_back(output.value_or(at::Tensor()));
            r.set_outputs(call, tensors);
          },
          "call"_a, "outputs"_a)
      .def_static(
          "run",
          [](const RecordedEvent& call, const py::function& work) {
            py::object result;
            StepReplay::run(call, [&] { result = work(); });
            return result;
          },
          "call"_a, "work"_a)
      .def("execute", &StepReplay::execute, "operation"_a, ReleaseGil())
      .def("leave", &StepReplay::leave, "event"_a, ReleaseGil());
}

}  // namespace nanlocator
