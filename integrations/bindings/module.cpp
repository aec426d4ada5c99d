// The extension nanlocator._C: plain structs, the locator, the communicator. It has no logic of its
// own; every call that may wait or scan releases the GIL.
#include <torch/csrc/utils/pybind.h>

#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "agree/torch_versions.hpp"
#include "bindings.hpp"
#include "files/text.hpp"
#include "framework.hpp"
#include "nanlocator/agree/communicator.hpp"
#include "nanlocator/error.hpp"
#include "nanlocator/gradients/gradient_scanner.hpp"
#include "nanlocator/locate/locate.hpp"
#include "nanlocator/map/parameter_map.hpp"
#include "nanlocator/map/rank_coordinates.hpp"
#include "nanlocator/record/ledger.hpp"
#include "nanlocator/report/terminal.hpp"
#include "nanlocator/report/verdict_json.hpp"
#include "nanlocator/scan/cpu_scan.hpp"
#include "nanlocator/step/gradient_locator.hpp"
#include "nanlocator/tensor/scan_tensor.hpp"
#include "nanlocator/tensor/scan_work.hpp"
#include "report/words.hpp"
#include "step/rank_logs.hpp"

namespace py = pybind11;
using py::literals::operator""_a;

namespace nanlocator {
namespace {

using ReleaseGil = py::call_guard<py::gil_scoped_release>;

Activity activity_of(const std::string& name) {
  for (const auto activity : {Activity::training, Activity::forward_backward, Activity::agreement,
                              Activity::rerun, Activity::gathering, Activity::stopped}) {
    if (name == name_of(activity)) return activity;
  }
  throw UsageError("unknown activity '" + name + "'");
}

void bind_errors(py::module_& m) {
  static py::exception<Error> error(m, "Error", PyExc_RuntimeError);
  static py::exception<FormatError> format(m, "FormatError", error.ptr());
  static py::exception<UsageError> usage(m, "UsageError", error.ptr());
  static py::exception<UnsupportedError> unsupported(m, "UnsupportedError", error.ptr());
  static py::exception<AgreementError> agreement(m, "AgreementError", error.ptr());
  static py::exception<IoError> io(m, "IoError", error.ptr());
  static py::exception<CudaError> cuda(m, "CudaError", error.ptr());
  // Translators run in reverse order of registration; a single one keeps derived errors before the
  // base.
  py::register_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const FormatError& e) {
      py::set_error(format, e.what());
    } catch (const UsageError& e) {
      py::set_error(usage, e.what());
    } catch (const UnsupportedError& e) {
      py::set_error(unsupported, e.what());
    } catch (const AgreementError& e) {
      py::set_error(agreement, e.what());
    } catch (const IoError& e) {
      py::set_error(io, e.what());
    } catch (const CudaError& e) {
      py::set_error(cuda, e.what());
    } catch (const Error& e) {
      py::set_error(error, e.what());
    }
  });
}

void bind_scan(py::module_& m) {
  py::class_<TensorStats>(m, "TensorStats")
      .def_readonly("numel", &TensorStats::numel)
      .def_readonly("nan", &TensorStats::nan)
      .def_readonly("pos_inf", &TensorStats::pos_inf)
      .def_readonly("neg_inf", &TensorStats::neg_inf)
      .def_readonly("zeros", &TensorStats::zeros)
      .def_readonly("first_bad", &TensorStats::first_bad)
      .def_readonly("finite_min", &TensorStats::finite_min)
      .def_readonly("finite_max", &TensorStats::finite_max)
      .def_readonly("absmin", &TensorStats::absmin)
      .def_readonly("absmax", &TensorStats::absmax)
      .def_readonly("sum_of_squares", &TensorStats::sum_of_squares)
      .def_readonly("fingerprint", &TensorStats::fingerprint)
      .def_property_readonly("is_finite", &TensorStats::is_finite)
      .def("__eq__", [](const TensorStats& a, const TensorStats& b) { return a == b; });
  m.def("scan", &scan_tensors, "tensors"_a, "threads"_a = 1, ReleaseGil(),
        "Stats of each tensor (host memory).");
  m.def(
      "scan_work",
      [] {
        const ScanWork work = scan_work();
        return py::dict("launches"_a = work.launches, "tensors"_a = work.tensors,
                        "bytes"_a = work.bytes, "plans"_a = work.plans, "waits"_a = work.waits);
      },
      "What this process's scans have cost so far (nanlocator/tensor/scan_work.hpp).");
  m.def("active_instruction_set", [] { return std::string(name_of(active_instruction_set())); });
}

void bind_map(py::module_& m) {
  py::class_<AxisCoordinate>(m, "AxisCoordinate")
      .def(py::init([](int rank, int size) {
             return AxisCoordinate{rank, size};
           }),
           "rank"_a = 0, "size"_a = 1)
      .def_readwrite("rank", &AxisCoordinate::rank)
      .def_readwrite("size", &AxisCoordinate::size);
  py::class_<RankCoordinates>(m, "RankCoordinates")
      .def(py::init<>())
      .def_readwrite("rank", &RankCoordinates::rank)
      .def_readwrite("world_size", &RankCoordinates::world_size)
      .def_readwrite("tp", &RankCoordinates::tp)
      .def_readwrite("pp", &RankCoordinates::pp)
      .def_readwrite("dp", &RankCoordinates::dp)
      .def_readwrite("cp", &RankCoordinates::cp)
      .def_readwrite("ep", &RankCoordinates::ep)
      .def_readwrite("host", &RankCoordinates::host)
      .def_readwrite("local_rank", &RankCoordinates::local_rank)
      .def_readwrite("device", &RankCoordinates::device)
      .def("describe", &RankCoordinates::describe);
  m.def("data_parallel_coordinates", &data_parallel_coordinates, "rank"_a, "world_size"_a);
  py::class_<ParameterInfo>(m, "ParameterInfo")
      .def(py::init<>())
      .def_readwrite("id", &ParameterInfo::id)
      .def_readwrite("name", &ParameterInfo::name)
      .def_readwrite("raw_name", &ParameterInfo::raw_name)
      .def_readwrite("shape", &ParameterInfo::shape)
      .def_readwrite("dtype", &ParameterInfo::dtype)
      .def_readwrite("layer", &ParameterInfo::layer)
      .def_readwrite("chunk", &ParameterInfo::chunk)
      .def_readwrite("bucket", &ParameterInfo::bucket)
      .def_readwrite("bucket_offset", &ParameterInfo::bucket_offset)
      .def_property(
          "shard",
          [](const ParameterInfo& p) -> std::optional<std::pair<std::int64_t, std::int64_t>> {
            if (!p.shard) return std::nullopt;
            return std::pair{p.shard->begin, p.shard->end};
          },
          [](ParameterInfo& p, std::optional<std::pair<std::int64_t, std::int64_t>> range) {
            p.shard.reset();
            if (range) p.shard = ElementRange{range->first, range->second};
          })
      .def_property(
          "shard_row", [](const ParameterInfo& p) { return p.shard ? p.shard->row : 0; },
          [](ParameterInfo& p, std::int64_t row) { p.shard.value().row = row; },
          "Of a shard of columns: elements of a row, in each of which `shard` is a range; else 0.")
      .def_property(
          "shard_group", [](const ParameterInfo& p) { return p.shard_group.ranks(); },
          [](ParameterInfo& p, std::vector<int> ranks) { p.shard_group = RankList(ranks); })
      .def_readwrite("reduce_dtype", &ParameterInfo::reduce_dtype)
      .def_readwrite("placements", &ParameterInfo::placements)
      .def_readwrite("is_expert", &ParameterInfo::is_expert)
      .def_readwrite("is_shared", &ParameterInfo::is_shared)
      .def_readwrite("is_tp_duplicate", &ParameterInfo::is_tp_duplicate)
      .def_readwrite("is_tied", &ParameterInfo::is_tied)
      .def_readwrite("may_be_untouched", &ParameterInfo::may_be_untouched);
  py::class_<ParameterMap>(m, "ParameterMap")
      .def(py::init<RankCoordinates, std::vector<ParameterInfo>, std::string>(), "coordinates"_a,
           "parameters"_a, "run_id"_a = "")
      .def_property_readonly("parameters", &ParameterMap::parameters)
      .def_property_readonly("coordinates", &ParameterMap::coordinates)
      .def("to_id_name_json", &ParameterMap::to_id_name_json)
      .def("__len__", &ParameterMap::size);
}

void bind_agree(py::module_& m) {
  m.def("is_failure_of_peers", &is_failure_of_peers, "error"_a);
  // A separate connection to the server of `store`, in every version of Torch.
  m.def("clone_store", &clone_of, py::arg("store").none(false), ReleaseGil());
  py::class_<Communicator, std::shared_ptr<Communicator>>(m, "Communicator")
      .def(py::init<c10::intrusive_ptr<c10d::ProcessGroup>, c10::intrusive_ptr<c10d::Store>,
                    std::string>(),
           "group"_a, "store"_a, "prefix"_a, ReleaseGil())
      .def_static("from_group_name", &Communicator::from_group_name, "name"_a, "store"_a,
                  "prefix"_a, ReleaseGil())
      .def(
          "leave",
          [](Communicator& c, const std::string& ended_by) {
            if (c.monitor()) c.monitor()->leave(ended_by);
          },
          "ended_by"_a = "", ReleaseGil(),
          "Tells the other ranks that this one ends; with the exception's text, that it is lost.")
      .def(
          "wait_for_loss",
          [](Communicator& c, std::chrono::milliseconds patience) {
            if (!c.monitor()) return;
            (void)c.monitor()->wait_for_loss(std::chrono::steady_clock::now() + patience);
          },
          "patience"_a, ReleaseGil(),
          "Until it is known that some rank is lost, and the files say so.")
      .def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("size", &Communicator::size);
}

/// A function of Python that the engine calls; None for none.
void set_on_finding(LocatorOptions& options, const py::object& function) {
  options.on_finding = nullptr;
  if (function.is_none()) return;
  options.on_finding = [called = PythonObject(function)](const std::filesystem::path& verdict) {
    called.call<void>("__call__", verdict);
  };
}

/// The same for LocatorOptions::read_checkpoint: called with path and seconds, it returns whether
/// all of it is finite (None: not known), what it has found, and the largest magnitude of a weight.
void set_read_checkpoint(LocatorOptions& options, const py::object& function) {
  options.read_checkpoint = [called = PythonObject(function)](const std::filesystem::path& path,
                                                              std::chrono::milliseconds limit,
                                                              CheckpointFile& file) {
    try {
      using Content = std::tuple<std::optional<bool>, std::string, std::optional<double>>;
      std::tie(file.is_finite, file.found, file.largest) =
          called.call<Content>("__call__", path, limit);
    } catch (const std::exception& error) {
      file.found = first_line(error);
    }
  };
}

/// Each field under its option's name. An enumeration appears as its value's name; `choices` has
/// them.
void bind_options(py::module_& m) {
  py::class_<LocatorOptions> options(m, "LocatorOptions");
  options.def(py::init<>())
      .def_readwrite("integration", &LocatorOptions::integration)
      .def_readwrite("not_covered", &LocatorOptions::not_covered)
      .def_property(
          "on_finding",
          [](const LocatorOptions& o) -> py::object {
            if (!o.on_finding) return py::none();
            return py::cpp_function(o.on_finding, "verdict"_a);
          },
          set_on_finding)
      .def("set_read_checkpoint", &set_read_checkpoint, "function"_a);
  py::dict choices;
  for_each_option([&]<typename Value>(const OptionField<Value>& option) {
    if constexpr (HasNames<Value>) {
      options.def_property(
          option.name,
          [option](const LocatorOptions& o) { return std::string(name_of(o.*option.field)); },
          [option](LocatorOptions& o, const std::string& name) {
            o.*option.field = choice<Value>(option.name, name);
          });
      choices[option.name] = std::vector<std::string>(kNames<Value>.begin(), kNames<Value>.end());
    } else {
      options.def_readwrite(option.name, option.field);
    }
  });
  options.attr("choices") = choices;
}

void bind_gradients(py::module_& m) {
  bind_options(m);
  py::class_<LossView>(m, "LossView")
      .def(py::init([](at::Tensor tensor, std::optional<int> microbatch, std::optional<int> chunk,
                       std::optional<at::Tensor> valid_labels) {
             return LossView{std::move(tensor), microbatch, chunk,
                             valid_labels.value_or(at::Tensor())};
           }),
           "tensor"_a, "microbatch"_a = std::nullopt, "chunk"_a = std::nullopt,
           "valid_labels"_a = std::nullopt);
  // The layer below StepDriver, for calls outside steps.
  py::class_<GradientLocator>(m, "GradientLocator")
      .def_property_readonly("run_dir",
                             [](const GradientLocator& l) { return l.run_dir().string(); })
      .def_property_readonly("parameters",
                             [](const GradientLocator& l) { return l.map().parameters(); })
      .def_property_readonly("incidents", &GradientLocator::incidents)
      .def_property_readonly("dismissed", &GradientLocator::dismissed)
      .def("begin_step", &GradientLocator::begin_step, "iteration"_a)
      .def("gradient_is_ready", &GradientLocator::gradient_is_ready, "parameter"_a)
      .def(
          "scan_losses",
          [](GradientLocator& l, const std::vector<LossView>& losses) { l.scan_losses(losses); },
          "losses"_a, ReleaseGil())
      .def("set_loss_scale", &GradientLocator::set_loss_scale, "loss_scale"_a,
           "falls_on_overflow"_a)
      .def("start_agreement", &GradientLocator::start_agreement, ReleaseGil())
      .def("finish_agreement", &GradientLocator::finish_agreement, ReleaseGil())
      .def(
          "conclude_alone",
          [](GradientLocator& l, const std::string& reason,
             bool is_of_peers) -> std::optional<std::string> {
            const auto failure = is_of_peers ? Failure::of_peers : Failure::own;
            const Verdict* verdict = l.conclude_alone(reason, failure);
            if (!verdict) return std::nullopt;
            return to_json(*verdict);
          },
          "reason"_a, "is_of_peers"_a = false, ReleaseGil(),
          "The partial verdict as JSON, None where there is nothing to tell. is_of_peers: a "
          "collective has failed; waits until it is known which rank is lost.")
      .def("add_standing_note", &GradientLocator::add_standing_note, "note"_a,
           "A sentence for the ledgers of this step and of all later ones.")
      .def("add_not_covered", &GradientLocator::add_not_covered, "phrases"_a, ReleaseGil(),
           "Adds to not_covered of run.json.")
      .def(
          "now_in",
          [](GradientLocator& l, const std::string& activity) { l.now_in(activity_of(activity)); },
          "activity"_a, "Where this rank is, for the others should it fall silent: 'rerun', ...");
  m.def(
      "outcome_of",
      [](const std::string& on_bad, const std::string& verdict_json) {
        const auto verdict = verdict_from_json(verdict_json, "verdict");
        return std::string(outcome_of(choice<Policy>("on_bad", on_bad), verdict.rerun));
      },
      "on_bad"_a, "verdict_json"_a, "'stopped', 'reported', 'skipped' or 'recovered'.");
  m.def(
      "format_verdict",
      [](const std::string& json, const std::string& run_dir) {
        return format_verdict(verdict_from_json(json, "verdict"), {.run_dir = run_dir});
      },
      "json"_a, "run_dir"_a = "");
  m.def(
      "with_later_endings",
      [](const std::string& json, const std::string& attempt, const std::string& job_state) {
        Verdict verdict = verdict_from_json(json, "verdict");
        const bool is_new = add_later_endings(verdict, attempt, job_state);
        return is_new ? std::optional(to_json(verdict)) : std::nullopt;
      },
      "json"_a, "attempt"_a, "job_state"_a,
      "The verdict with what has become known of ranks that did not answer; None: nothing.");
  m.def("netcheck_command", &netcheck_command, "ranks_per_host"_a, "hosts"_a, "first_host"_a);
}

}  // namespace

namespace {

/// Dequantizes a wrapper subclass by its own method; empty for other tensors. Callable without the
/// GIL.
std::function<at::Tensor()> dequantize_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python)) {
    return {};
  }
  return [tensor] {
    const py::gil_scoped_acquire gil;
    try {
      return py::cast(tensor).attr("dequantize")().cast<at::Tensor>();
    } catch (py::error_already_set& error) {
      if (!error.matches(PyExc_Exception)) PyErr_SetInterrupt();  // raised after we return
      throw std::runtime_error(error.what());
    }
  };
}

}  // namespace

std::vector<GradientView> gradient_views(const std::vector<std::int64_t>& parameters,
                                         const std::vector<at::Tensor>& tensors,
                                         const std::vector<std::int64_t>& offsets) {
  if (parameters.size() != tensors.size() ||
      (!offsets.empty() && offsets.size() != tensors.size())) {
    throw UsageError("scan: " + std::to_string(parameters.size()) + " parameters, " +
                     std::to_string(tensors.size()) + " tensors and " +
                     std::to_string(offsets.size()) + " offsets; their numbers must be equal");
  }
  std::vector<GradientView> views(tensors.size());
  for (std::size_t i = 0; i < views.size(); ++i) {
    views[i] = {parameters[i], tensors[i], offsets.empty() ? 0 : offsets[i],
                dequantize_of(tensors[i])};
  }
  return views;
}

PYBIND11_MODULE(_C, m) {
  m.doc() = "nanlocator's engine";
  m.attr("__version__") = NANLOCATOR_VERSION;
  bind_errors(m);
  bind_scan(m);
  bind_map(m);
  bind_agree(m);
  bind_gradients(m);
  bind_driver(m);
  bind_arguments(m);
  bind_trace(m);
  bind_plain_containers(m);
  bind_surroundings(m);
  bind_recorder(m);
  bind_watch(m);
  bind_boundary(m);
  bind_scans(m);
  bind_replay(m);
  bind_operator_registration(m);
  bind_kernel_calls(m);
#ifdef NANLOCATOR_NETCHECK
  bind_netcheck(m);
  bind_device_check(m);
#endif
}

}  // namespace nanlocator
