#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <optional>
#include <utility>

#include "bindings.hpp"
#include "module_call.hpp"
#include "nanlocator/step/step_rerun.hpp"

namespace py = pybind11;
using py::literals::operator""_a;

namespace nanlocator {
namespace {

using Named = std::vector<std::pair<std::string, at::Tensor>>;
using Views = std::pair<std::vector<std::int64_t>, std::vector<at::Tensor>>;

/// KeyboardInterrupt and SystemExit end the repeat at once; the engine catches std::exception only.
struct Interrupted {
  py::error_already_set error;
};

std::vector<NamedTensor> named_tensors(const Named& pairs) {
  std::vector<NamedTensor> tensors;
  for (const auto& [name, tensor] : pairs) tensors.push_back({name, tensor});
  return tensors;
}

std::vector<GradientView> views_of(const Views& views) {
  std::vector<GradientView> result;
  for (std::size_t i = 0; i < views.first.size(); ++i) {
    result.push_back({views.first[i], views.second.at(i), 0});
  }
  return result;
}

template <typename Result, typename... Arguments>
Result call(const py::function& function, const Arguments&... arguments) {
  const py::gil_scoped_acquire gil;
  try {
    return function(arguments...).template cast<Result>();
  } catch (py::error_already_set& error) {
    if (error.matches(PyExc_Exception)) throw;
    throw Interrupted{std::move(error)};
  }
}

/// `work` without the GIL.
template <typename Work>
auto released(const Work& work) {
  try {
    const py::gil_scoped_release no_gil;
    return work();
  } catch (Interrupted& interrupted) {
    throw std::move(interrupted.error);
  }
}

RepeatableStep step_of(py::function run, py::function gradients, py::function clear_gradients,
                       const Named& parameters, const Named& buffers,
                       std::optional<py::function> run_and_keep_module_calls,
                       std::optional<py::function> module_call) {
  RepeatableStep step;
  step.run = [run = std::move(run)] { return named_tensors(call<Named>(run)); };
  step.gradients = [gradients = std::move(gradients)] { return views_of(call<Views>(gradients)); };
  step.clear_gradients = [clear = std::move(clear_gradients)] { call<py::object>(clear); };
  step.parameters = named_tensors(parameters);
  step.buffers = named_tensors(buffers);
  step.program_code = python_code();
  if (run_and_keep_module_calls && module_call) {
    step.run_and_keep_module_calls =
        [run = std::move(*run_and_keep_module_calls)](const std::vector<Birth>& births) {
          std::vector<std::string> modules;
          for (const auto& birth : births) modules.push_back(birth.sighting.module);
          call<py::object>(run, modules);
        };
    step.add_module_call = [module_call = std::move(*module_call)](
                               const Birth& birth, Bundle& bundle, StorageCollector& storages,
                               BundleContents& contents) {
      const py::gil_scoped_acquire gil;
      const auto kept = call<py::object>(module_call, birth.sighting.module);
      if (!kept.is_none()) kept.cast<const PythonModuleCall&>().add_to(bundle, storages, contents);
    };
  }
  return step;
}

}  // namespace

void bind_rerun(py::module_& m) {
  py::class_<StepRerun>(m, "StepRerun")
      .def(py::init<GradientLocator&>(), "locator"_a, py::keep_alive<1, 2>())
      .def(
          "set_step",
          [](StepRerun& r, py::function run, py::function gradients, py::function clear_gradients,
             const Named& parameters, const Named& buffers,
             std::optional<py::function> run_and_keep_module_calls,
             std::optional<py::function> module_call) {
            r.set_step(step_of(std::move(run), std::move(gradients), std::move(clear_gradients),
                               parameters, buffers, std::move(run_and_keep_module_calls),
                               std::move(module_call)));
          },
          "run"_a, "gradients"_a, "clear_gradients"_a, "parameters"_a, "buffers"_a,
          "run_and_keep_module_calls"_a = std::nullopt, "module_call"_a = std::nullopt)
      .def(
          "add_state",
          [](StepRerun& r, std::string name, py::function save, py::function restore) {
            r.state().add(
                std::move(name), [save = std::move(save)] { call<py::object>(save); },
                [restore = std::move(restore)] { call<py::object>(restore); });
          },
          "name"_a, "save"_a, "restore"_a)
      .def("save",
           [](StepRerun& r) {
             released([&] {
               r.save();
               return 0;
             });
           })
      .def(
          "find_births",
          [](StepRerun& r, bool can_repeat, const Views& results) {
            return released([&] {
              return r.find_births(can_repeat ? CanRepeat::yes : CanRepeat::no, views_of(results));
            });
          },
          "can_repeat"_a, "results"_a)
      .def_property_readonly("is_repeating", &StepRerun::is_repeating)
      .def(
          "scan",
          [](StepRerun& r, const std::string& phase, std::uint64_t group, const std::string& role,
             const std::vector<std::int64_t>& parameters, const std::vector<at::Tensor>& tensors,
             const std::vector<std::int64_t>& offsets) {
            const auto views = gradient_views(parameters, tensors, offsets);
            const py::gil_scoped_release release;
            r.scan(phase_of(phase), group, role, views);
          },
          "phase"_a, "group"_a, "role"_a, "parameters"_a, "tensors"_a,
          "offsets"_a = std::vector<std::int64_t>())
      .def("trace_from_now_on", &StepRerun::trace_from_now_on)
      .def("stop_tracing", &StepRerun::stop_tracing)
      .def_property_readonly("is_tracing", &StepRerun::is_tracing)
      .def("begin_pass", &StepRerun::begin_pass)
      .def("begin_update", &StepRerun::begin_update)
      .def("end_update", &StepRerun::end_update)
      .def("compare", [](StepRerun& r) { return released([&] { return r.compare(); }); });
}

}  // namespace nanlocator
