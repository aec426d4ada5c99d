// StepDriver and what it calls in Python: the functions of an adapter, and of a pass.
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <tuple>
#include <utility>

#include "bindings.hpp"
#include "interrupted.hpp"
#include "kernel_call.hpp"
#include "module_call.hpp"
#include "nanlocator/report/terminal.hpp"
#include "nanlocator/report/verdict_json.hpp"
#include "nanlocator/step/step_driver.hpp"
#include "nanlocator/trace/boundary_watch.hpp"
#include "nanlocator/trace/module_watch.hpp"
#include "operator_registration.hpp"

namespace py = pybind11;
using py::literals::operator""_a;

namespace nanlocator {
namespace {

using OptimizerTensors =
    std::vector<std::tuple<std::int64_t, std::string, at::Tensor, std::int64_t>>;
using Views = std::pair<std::vector<std::int64_t>, std::vector<at::Tensor>>;
using Microbatches = std::vector<std::tuple<int, std::optional<int>, std::vector<std::string>>>;
using Scale = std::optional<std::tuple<double, bool, bool>>;

std::vector<GradientView> views_of(const Views& views) {
  return gradient_views(views.first, views.second, {});
}

std::optional<LossScale> loss_scale_of(const Scale& scale) {
  if (!scale) return std::nullopt;
  return LossScale{std::get<0>(*scale), std::get<1>(*scale), std::get<2>(*scale)};
}

/// A function of Python that the engine may call, copy and drop without the GIL.
class Function {
 public:
  explicit Function(py::function function)
      : function_(new py::function(std::move(function)), [](py::function* dropped) {
          const py::gil_scoped_acquire gil;
          delete dropped;
        }) {}

  template <typename Result, typename... Arguments>
  Result call(const Arguments&... arguments) const {
    const py::gil_scoped_acquire gil;
    try {
      return (*function_)(arguments...).template cast<Result>();
    } catch (py::error_already_set& error) {
      if (error.matches(PyExc_Exception)) throw;
      throw Interrupted{std::move(error)};
    }
  }

 private:
  std::shared_ptr<py::function> function_;
};

std::optional<Function> if_callable(const py::object& adapter, const char* name) {
  const auto found = adapter.attr(name);
  if (found.is_none()) return std::nullopt;
  return Function(found.cast<py::function>());
}

void add_module_calls(StepAdapter& step, const Function& keep, const Function& module_call,
                      const Function& want_kernel_calls, const Function& kernel_call) {
  step.keep_module_calls = [keep, want_kernel_calls](const std::vector<Birth>& births,
                                                     const std::function<void()>& run) {
    const py::gil_scoped_acquire gil;
    std::vector<std::string> modules;
    std::vector<std::pair<std::string, std::int64_t>> kernels;
    for (const auto& birth : births) {
      modules.push_back(birth.sighting.module);
      if (birth.kernel_call) kernels.emplace_back(birth.sighting.op, *birth.kernel_call);
    }
    want_kernel_calls.call<py::object>(kernels);
    const py::cpp_function run_again([&run] { released(run); });
    keep.call<py::object>(modules, run_again);
  };
  step.add_module_call = [module_call](const Birth& birth, Bundle& bundle,
                                       StorageCollector& storages, BundleContents& contents) {
    const py::gil_scoped_acquire gil;
    add_registration(bundle, contents);
    const auto kept = module_call.call<py::object>(birth.sighting.module);
    if (!kept.is_none()) kept.cast<const PythonModuleCall&>().add_to(bundle, storages, contents);
  };
  step.take_kernel_call = [kernel_call](const Birth& birth) -> std::optional<KeptKernelCall> {
    const py::gil_scoped_acquire gil;
    const auto kept = kernel_call.call<py::object>(birth.sighting.op, birth.kernel_call);
    if (kept.is_none()) return std::nullopt;
    return kept_kernel_call(kept);
  };
}

std::optional<CodeLine> code_line(const py::handle& from) {
  if (from.is_none()) return std::nullopt;
  const auto [file, line, function, text] =
      from.cast<std::tuple<std::string, int, std::string, std::string>>();
  return CodeLine{file, line, function, text};
}

/// From a nanlocator.exchange.stream_sanitizer.StreamAccess.
UnorderedAccess stream_access(const py::handle& from) {
  UnorderedAccess access;
  access.is_write = from.attr("is_write").cast<bool>();
  access.transfer = from.attr("other_operator").cast<std::string>();
  access.other = Concurrent::stream;
  access.op = from.attr("operator").cast<std::string>();
  access.phase = from.attr("is_backward").cast<bool>() ? Phase::backward : Phase::forward;
  access.parameter = from.attr("parameter").cast<std::string>();
  access.transfer_code = code_line(from.attr("other_line"));
  access.code = code_line(from.attr("line"));
  return access;
}

/// From an object with the attributes of nanlocator.engine.driver.Adapter.
StepAdapter adapter_of(const py::object& from) {
  StepAdapter step;
  step.gradients = [f = Function(from.attr("gradients"))] { return views_of(f.call<Views>()); };
  step.weights = [f = Function(from.attr("weights"))] { return views_of(f.call<Views>()); };
  step.optimizer_state =
      [f = Function(from.attr("optimizer_state"))](const std::vector<std::int64_t>& ids) {
        std::vector<OptimizerTensor> tensors;
        for (auto& [id, name, tensor, offset] : f.call<OptimizerTensors>(ids)) {
          tensors.push_back({id, name, tensor, offset});
        }
        return tensors;
      };
  step.gradient_phase =
      choice<Phase>("gradient_phase", from.attr("gradient_phase").cast<std::string>());
  step.parameters = [f = Function(from.attr("parameters_now"))] {
    return named_tensors(f.call<NamedPairs>());
  };
  step.buffers = [f = Function(from.attr("buffers").attr("now"))] {
    return named_tensors(f.call<NamedPairs>());
  };
  step.program_code = python_code();
  step.why_no_pass = from.attr("why_no_pass").cast<std::string>();
  step.can_trace_later_steps = from.attr("can_trace_later_steps").cast<bool>();
  add_module_calls(step, Function(from.attr("keep_module_calls")),
                   Function(from.attr("module_call")), Function(from.attr("want_kernel_calls")),
                   Function(from.attr("kernel_call")));
  step.abort_collectives = [f = Function(from.attr("abort_collectives"))] {
    try {
      f.call<py::object>();
    } catch (...) {
      // What could not be aborted ends by its own time-out.
    }
  };
  step.has_compiled_parts = [f = Function(from.attr("has_compiled_parts"))] {
    return f.call<bool>();
  };
  step.set_eager = [f = Function(from.attr("set_eager"))](bool is_eager) {
    f.call<py::object>(is_eager);
  };
  step.set_serialised = [f = Function(from.attr("set_serialised"))](bool is_serialised) {
    f.call<py::object>(is_serialised);
  };
  step.has_streams = [f = Function(from.attr("has_streams"))] { return f.call<bool>(); };
  step.sanitise_streams =
      [f = Function(from.attr("sanitise_streams"))](const std::function<void()>& run) {
        const py::gil_scoped_acquire gil;
        const py::cpp_function run_again([&run] { released(run); });
        std::vector<UnorderedAccess> accesses;
        for (const auto& each : f.call<py::list>(run_again))
          accesses.push_back(stream_access(each));
        return accesses;
      };
  if (const auto loss_scale = if_callable(from, "loss_scale")) {
    step.loss_scale = [f = *loss_scale] { return loss_scale_of(f.call<Scale>()); };
  }
  step.skips_bad_updates = [f = Function(from.attr("skips_bad_updates"))] {
    return f.call<bool>();
  };
  step.model = [f = Function(from.attr("model_tensors"))] {
    const auto [parameters, buffers] = f.call<std::pair<NamedPairs, NamedPairs>>();
    return ModelTensors{named_tensors(parameters), named_tensors(buffers)};
  };
  step.on_verdict = [f = Function(from.attr("on_verdict"))](const Verdict& verdict) {
    f.call<py::object>(to_json(verdict));
  };
  return step;
}

/// From an object with the methods of nanlocator.engine.driver.Pass.
StepPass pass_of(const py::object& from) {
  StepPass pass;
  pass.run = [f = Function(from.attr("run_again"))] { return named_tensors(f.call<NamedPairs>()); };
  pass.clear_gradients = [f = Function(from.attr("clear_gradients"))] { f.call<py::object>(); };
  pass.changed_data = [f = Function(from.attr("changed_data"))] {
    return f.call<std::vector<std::string>>();
  };
  if (const auto obstacle = if_callable(from, "obstacle")) {
    pass.obstacle = [f = *obstacle] { return f.call<std::string>(); };
  }
  pass.microbatches = [f = Function(from.attr("microbatches"))] {
    std::vector<Microbatch> all;
    for (auto& [number, chunk, tensors] : f.call<Microbatches>()) {
      all.push_back({number, chunk, tensors});
    }
    return all;
  };
  return pass;
}

template <auto method>
auto without_gil() {
  return [](StepDriver& driver) { return released([&] { return (driver.*method)(); }); };
}

/// The destructor waits for callbacks on other threads, and they may wait for the GIL.
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
          [](StepDriver& d, const py::object& pass, std::optional<std::int64_t> iteration) {
            auto step = pass_of(pass);
            released([&] { d.begin_pass(std::move(step), iteration); });
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
      .def(
          "set_gradient_norm",
          [](StepDriver& d, double norm) {
            return released([&] { return d.set_gradient_norm(norm); });
          },
          "norm"_a)
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
          [](StepDriver& d, const Scale& overflow) {
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
          [](StepDriver& d, const std::string& reason, bool is_of_peers) {
            const auto failure = is_of_peers ? Failure::of_peers : Failure::own;
            released([&] { d.conclude_alone(reason, failure); });
          },
          "reason"_a, "is_of_peers"_a)
      .def("forget_observations", without_gil<&StepDriver::forget_observations>());
}

}  // namespace

void bind_driver(py::module_& m) {
  py::enum_<Decision>(m, "Decision")
      .value("PROCEED", Decision::proceed)
      .value("RECOVERED", Decision::recovered)
      .value("SKIP", Decision::skip)
      .value("STOP", Decision::stop);
  py::class_<StepDriver, OwnedDriver> driver(m, "StepDriver");
  driver
      .def(py::init([](ParameterMap map, LocatorOptions options,
                       std::shared_ptr<Communicator> communicator, const py::object& adapter) {
             auto step = adapter_of(adapter);
             return released([&] {
               return OwnedDriver(new StepDriver(std::move(map), std::move(options),
                                                 std::move(communicator), std::move(step)));
             });
           }),
           "map"_a, "options"_a, "communicator"_a, "adapter"_a)
      .def_property_readonly("locator", &StepDriver::locator,
                             py::return_value_policy::reference_internal)
      .def(
          "add_state",
          [](StepDriver& d, std::string name, py::function save, py::function restore) {
            d.state().add(
                std::move(name), [f = Function(std::move(save))] { f.call<py::object>(); },
                [f = Function(std::move(restore))] {
                  try {
                    f.call<py::object>();
                  } catch (const py::error_already_set& error) {
                    const py::gil_scoped_acquire gil;
                    const std::string text = py::str(error.value());
                    if (error.type().ptr() != PyExc_RuntimeError || text.empty()) throw;
                    throw Error(text);  // what is said there, without type and traceback
                  }
                });
          },
          "name"_a, "save"_a, "restore"_a)
      .def(
          "set_parameters",
          [](StepDriver& d, ParameterMap map, const py::object& adapter) {
            auto step = adapter_of(adapter);
            released([&] { d.set_parameters(std::move(map), std::move(step)); });
          },
          "map"_a, "adapter"_a)
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
