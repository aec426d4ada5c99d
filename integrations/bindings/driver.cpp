// StepDriver, for frameworks in Python (framework.hpp).
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <utility>

#include "bindings.hpp"
#include "framework.hpp"
#include "interrupted.hpp"
#include "nanlocator/step/checkpoint_files.hpp"
#include "nanlocator/step/step_driver.hpp"
#include "nanlocator/watch/boundary_watch.hpp"
#include "nanlocator/watch/module_watch.hpp"

namespace py = pybind11;
using py::literals::operator""_a;

namespace nanlocator {
namespace {

template <auto method>
auto without_gil() {
  return [](StepDriver& driver) { return released([&] { return (driver.*method)(); }); };
}

/// Releases the GIL, because the destructor waits for callbacks on other threads, which may need
/// it.
struct DeleteWithoutGil {
  void operator()(StepDriver* driver) const {
    const py::gil_scoped_release no_gil;
    delete driver;
  }
};
using OwnedDriver = std::unique_ptr<StepDriver, DeleteWithoutGil>;

void bind_step(py::class_<StepDriver, OwnedDriver>& driver) {
  driver
      .def(
          "begin",
          [](StepDriver& d, std::optional<std::int64_t> iteration) {
            released([&] { d.begin(iteration); });
          },
          "iteration"_a = std::nullopt)
      .def(
          "begin_pass",
          [](StepDriver& d, py::object step_pass, std::optional<std::int64_t> iteration) {
            auto pass = python_pass(std::move(step_pass));
            released([&] { d.begin_pass(std::move(pass), iteration); });
          },
          "step_pass"_a, "iteration"_a = std::nullopt)
      .def(
          "scan",
          [](StepDriver& d, const std::string& phase, std::uint64_t group, const std::string& role,
             const std::vector<std::int64_t>& parameters, const std::vector<at::Tensor>& tensors,
             const std::vector<std::int64_t>& offsets) {
            const auto views = gradient_views(parameters, tensors, offsets);
            released([&] { d.scan(choice<Phase>("phase", phase), group, role, views); });
          },
          "phase"_a, "group"_a, "role"_a, "parameters"_a, "tensors"_a,
          "offsets"_a = std::vector<std::int64_t>())
      .def("scan_gradients", without_gil<&StepDriver::scan_gradients>())
      .def("forget_gradients", &StepDriver::forget_gradients)
      .def("note_left_gradients", &StepDriver::note_left_gradients)
      .def("number_steps", &StepDriver::number_steps, "next"_a, "is_held"_a)
      .def_property_readonly("step_number", &StepDriver::step_number)
      .def("note_unrecorded_beginning", &StepDriver::note_unrecorded_beginning)
      .def("set_discarded", &StepDriver::set_discarded, "is_discarded"_a)
      .def(
          "set_gradient_norm",
          [](StepDriver& d, double norm) {
            return released([&] { return d.set_gradient_norm(norm); });
          },
          "norm"_a)
      .def("allow_going_on", &StepDriver::allow_going_on)
      .def(
          "may_go_on",
          [](StepDriver& d, const std::vector<LossView>& losses) {
            return released([&] { return d.may_go_on(losses); });
          },
          "losses"_a)
      .def(
          "end_pass",
          [](StepDriver& d, const std::vector<LossView>& losses) {
            return released([&] { return d.end_pass(losses); });
          },
          "losses"_a)
      .def("agree", without_gil<&StepDriver::agree>())
      .def("start_agreement", without_gil<&StepDriver::start_agreement>())
      .def(
          "finish_agreement",
          [](StepDriver& d, const PythonScale& overflow) {
            return released([&] { return d.finish_agreement(loss_scale_of(overflow)); });
          },
          "overflow"_a = std::nullopt)
      .def("scan_and_agree", without_gil<&StepDriver::scan_and_agree>())
      .def("begin_update", &StepDriver::begin_update)
      .def("end_update", &StepDriver::end_update)
      .def("end_step", without_gil<&StepDriver::end_step>())
      .def("abandon", without_gil<&StepDriver::abandon>())
      .def(
          "conclude_alone",
          [](StepDriver& d, const std::string& reason, bool is_of_peers,
             const std::vector<LossView>& losses) {
            const auto failure = is_of_peers ? Failure::of_peers : Failure::own;
            released([&] { d.conclude_alone(reason, failure, losses); });
          },
          "reason"_a, "is_of_peers"_a, "losses"_a = std::vector<LossView>())
      .def_property_readonly("updates", &StepDriver::updates)
      .def("forget_observations", without_gil<&StepDriver::forget_observations>());
}

}  // namespace

void bind_driver(py::module_& m) {
  m.def("note_loaded_checkpoint", &note_loaded_checkpoint, "path"_a);
  m.def("note_saved_checkpoint", &note_saved_checkpoint, "path"_a, "updates"_a);
  m.def("forget_saved_checkpoints", &forget_saved_checkpoints);
  py::enum_<Decision>(m, "Decision")
      .value("PROCEED", Decision::proceed)
      .value("RECOVERED", Decision::recovered)
      .value("SKIP", Decision::skip)
      .value("STOP", Decision::stop)
      // pybind11's own converts both to Python's integers, several times in each step.
      .def(
          "__eq__", [](Decision one, Decision other) { return one == other; }, py::prepend(),
          py::is_operator());
  py::class_<StepDriver, OwnedDriver> driver(m, "StepDriver");
  driver
      .def(py::init([](py::object adapter, LocatorOptions options,
                       std::shared_ptr<Communicator> communicator) {
             auto framework = python_framework(std::move(adapter));
             return released([&] {
               return OwnedDriver(new StepDriver(std::move(framework), std::move(options),
                                                 std::move(communicator)));
             });
           }),
           "adapter"_a, "options"_a, "communicator"_a)
      .def_property_readonly("locator", &StepDriver::locator,
                             py::return_value_policy::reference_internal)
      .def(
          "add_state",
          [](StepDriver& d, std::string name, py::object state) {
            const PythonObject kept(std::move(state));
            d.state().add(
                std::move(name), [kept] { kept.call<void>("save"); },
                [kept] {
                  try {
                    kept.call<void>("restore");
                  } catch (const py::error_already_set& error) {
                    const py::gil_scoped_acquire gil;
                    const std::string text = py::str(error.value());
                    if (error.type().ptr() != PyExc_RuntimeError || text.empty()) throw;
                    throw Error(text);  // its message, without type and traceback
                  }
                });
          },
          "name"_a, "state"_a)
      .def("take_parameters_again", without_gil<&StepDriver::take_parameters_again>())
      .def("watch", py::overload_cast<std::shared_ptr<ModuleWatch>>(&StepDriver::watch),
           "modules"_a)
      .def("watch", py::overload_cast<std::shared_ptr<BoundaryWatch>>(&StepDriver::watch),
           "boundaries"_a)
      .def("stop_observing", without_gil<&StepDriver::stop_observing>())
      .def("close", without_gil<&StepDriver::close>())
      .def_property_readonly("is_closed", &StepDriver::is_closed)
      .def_property_readonly("is_in_pass", &StepDriver::is_in_pass)
      .def_property_readonly("has_ended_pass", &StepDriver::has_ended_pass)
      .def_property_readonly("is_rerunning", &StepDriver::is_rerunning)
      .def_property_readonly("is_agreeing", &StepDriver::is_agreeing)
      .def_property_readonly("is_judged", &StepDriver::is_judged)
      .def_property_readonly("skips_update", &StepDriver::skips_update)
      .def_property_readonly("is_tracing", &StepDriver::is_tracing);
  bind_step(driver);
}

}  // namespace nanlocator
