#include <pybind11/stl.h>

#include <optional>

#include "bindings.hpp"
#include "files/printable.hpp"
#include "module_call.hpp"
#include "nanlocator/error.hpp"
#include "nanlocator/replay/export_python.hpp"
#include "nanlocator/replay/replay.hpp"

namespace py = pybind11;
using py::literals::operator""_a;

namespace nanlocator {
namespace {

using ReleaseGil = py::call_guard<py::gil_scoped_release>;

ReplayReport replay_bundle(const std::filesystem::path& path, const std::string& device,
                           int repeats, bool other_devices) {
  const OpenBundle bundle(path);
  return replay(operator_call_of(bundle, at::Device(device)),
                {repeats, other_devices, std::nullopt});
}

/// Converts a bundle's values to Python objects. `make_object(class name, fields)` and
/// `make_unsupported(text)` create replacements for values without a class here.
class PythonValues {
 public:
  PythonValues(BundleTensors& tensors, py::object make_object, py::object make_unsupported)
      : tensors_(tensors),
        make_object_(std::move(make_object)),
        make_unsupported_(std::move(make_unsupported)) {}

  py::object value(const BundleValue& value) const {
    switch (value.kind) {
      case BundleValueKind::none:
      case BundleValueKind::undefined_tensor:
        return py::none();
      case BundleValueKind::tensor:
        return py::cast(tensors_.tensor(value.tensor));
      case BundleValueKind::boolean:
        return py::bool_(value.boolean);
      case BundleValueKind::integer:
        return py::int_(value.integer);
      case BundleValueKind::real:
        return py::float_(value.real);
      case BundleValueKind::complex:
        return py::cast(std::complex<double>(value.real, value.imaginary));
      case BundleValueKind::text:
      case BundleValueKind::device:
        return py::str(value.text);
      case BundleValueKind::list:
        return values(value.items);
      case BundleValueKind::tuple:
        return py::tuple(values(value.items));
      case BundleValueKind::dictionary:
        return fields(value);
      case BundleValueKind::object:
        return make_object_(value.text, fields(value));
      case BundleValueKind::generator:
        return make_unsupported_("a torch.Generator");
      case BundleValueKind::unsupported:
        return make_unsupported_(value.text);
    }
    return py::none();
  }

  py::list values(const std::vector<BundleValue>& items) const {
    py::list list;
    for (const auto& item : items) list.append(value(item));
    return list;
  }

  py::dict values(const std::vector<std::pair<std::string, BundleValue>>& named) const {
    py::dict dict;
    for (const auto& [name, each] : named) dict[py::str(name)] = value(each);
    return dict;
  }

 private:
  py::dict fields(const BundleValue& value) const {
    py::dict dict;
    for (std::size_t i = 0; i < value.items.size(); ++i) {
      dict[py::str(value.names.at(i))] = this->value(value.items[i]);
    }
    return dict;
  }

  BundleTensors& tensors_;
  py::object make_object_;
  py::object make_unsupported_;
};

py::dict module_call_of(const std::filesystem::path& path, const std::string& device,
                        py::object make_object, py::object make_unsupported) {
  const OpenBundle bundle(path);
  const auto& call = bundle.bundle().module_call;
  if (!call) {
    throw UsageError(path.string() +
                     " holds no module call. Where it holds an operator call, "
                     "nanlocator.replay.run executes that.");
  }
  BundleTensors tensors(bundle, at::Device(device));
  const PythonValues python(tensors, std::move(make_object), std::move(make_unsupported));
  py::dict result;
  result["name"] = call->name;
  result["class_name"] = call->class_name;
  result["is_training"] = call->is_training;
  result["arguments"] = py::tuple(python.values(call->arguments));
  result["keywords"] = python.values(call->keywords);
  result["outputs"] = python.value(call->outputs);
  py::dict weights;
  for (const auto& [name, weight] : call->weights) {
    weights[py::str(name)] = py::cast(tensors.tensor(weight));
  }
  result["weights"] = weights;
  result["grad_outputs"] = python.values(call->grad_outputs);
  result["grad_inputs"] = python.values(call->grad_inputs);
  result["settings"] = bundle.bundle().settings;
  result["folder"] = bundle.path().string();
  result["pickle"] = call->pickle;
  result["pickle_problem"] = call->pickle_problem;
  return result;
}

py::dict kernel_call_of(const std::filesystem::path& path, const std::string& device,
                        py::object make_object, py::object make_unsupported) {
  const OpenBundle bundle(path);
  const auto& call = bundle.bundle().kernel_call;
  if (!call) throw UsageError(path.string() + " holds no kernel call.");
  BundleTensors tensors(bundle, at::Device(device));
  const PythonValues python(tensors, std::move(make_object), std::move(make_unsupported));
  py::dict result;
  result["name"] = call->name;
  result["launcher"] = call->launcher;
  result["module"] = call->module;
  result["entry"] = call->entry;
  result["file"] = call->file;
  result["source_file"] = call->source;
  result["why_not_replayed"] = call->why_not_replayed;
  result["names"] = call->names;
  result["arguments"] = python.values(call->arguments);
  result["keywords"] = python.values(call->keywords);
  result["launch"] = python.values(call->launch);
  result["arguments_after"] = python.values(call->arguments_after);
  std::vector<std::string> beside;
  for (const Beside each : call->beside) beside.emplace_back(name_of(each));
  result["beside"] = beside;
  result["results"] = python.values(call->results);
  result["environment"] = call->environment;
  result["settings"] = bundle.bundle().settings;
  result["role"] = bundle.bundle().birth.sighting.role.text();
  return result;
}

/// True if `path` is a bundle with a kernel call.
bool has_kernel_call(const std::filesystem::path& path) {
  return OpenBundle(path).bundle().kernel_call.has_value();
}

/// Writes a bundle with only a module call.
std::string write_module_bundle(const PythonModuleCall& call, const std::filesystem::path& run_dir,
                                std::int64_t iteration) {
  Bundle bundle;
  bundle.birth.sighting.iteration = iteration;
  bundle.birth.sighting.phase = Phase::forward;
  bundle.birth.sighting.module = call.name;
  bundle.settings = current_settings();
  bundle.versions = current_versions();
  StorageCollector storages;
  BundleContents further;
  call.add_to(bundle, storages, further);
  auto contents = storages.finish(bundle);
  contents.files = std::move(further.files);
  const py::gil_scoped_release no_gil;
  return BundleStore(run_dir, {}).write(bundle, contents);
}

}  // namespace

void bind_replay(py::module_& m) {
  py::class_<ReplayReport>(m, "ReplayReport")
      .def("to_json", [](const ReplayReport& report) { return to_json(report); })
      .def(
          "format",
          [](const ReplayReport& report, int width, bool colour) {
            return format_replay(report, {width, colour});
          },
          "width"_a = 100, "colour"_a = false);
  m.def("replay_bundle", &replay_bundle, "path"_a, "device"_a, "repeats"_a, "other_devices"_a,
        ReleaseGil());
  m.def(
      "export_python",
      [](const std::filesystem::path& path) { return python_script(OpenBundle(path)); }, "path"_a);
  m.def("has_kernel_call", &has_kernel_call, "path"_a);
  m.def(
      "printable",
      [](const py::str& text) {  // may have surrogates, which UTF-8 lacks
        return printable(text.attr("encode")("utf-8", "backslashreplace").cast<std::string>());
      },
      "text"_a, "Safe for a terminal: a bundle's texts may hold its control characters.");
  m.def("kernel_call_of", &kernel_call_of, "path"_a, "device"_a, "make_object"_a,
        "make_unsupported"_a);
  m.def("module_call_of", &module_call_of, "path"_a, "device"_a, "make_object"_a,
        "make_unsupported"_a);

  py::class_<PythonModuleCall>(m, "ModuleCall")
      .def(py::init([](std::string name, std::string class_name, bool is_training,
                       py::tuple arguments, py::dict keywords, py::object outputs, py::dict weights,
                       py::object grad_outputs, py::object grad_inputs, const py::bytes& pickle,
                       std::string pickle_problem) {
             return PythonModuleCall{
                 std::move(name),      std::move(class_name),    is_training,
                 std::move(arguments), std::move(keywords),      std::move(outputs),
                 std::move(weights),   std::move(grad_outputs),  std::move(grad_inputs),
                 std::string(pickle),  std::move(pickle_problem)};
           }),
           "name"_a, "class_name"_a, "is_training"_a, "arguments"_a, "keywords"_a = py::dict(),
           "outputs"_a = py::none(), "weights"_a = py::dict(), "grad_outputs"_a = py::tuple(),
           "grad_inputs"_a = py::tuple(), "pickle"_a = py::bytes(), "pickle_problem"_a = "")
      .def_static(
          "left_out",
          [](std::string name, std::string why) {
            PythonModuleCall call;
            call.name = std::move(name);
            call.why_left_out = std::move(why);
            return call;
          },
          "name"_a, "why"_a, "Stands for a call that could not be kept.")
      .def(
          "note_device",
          [](PythonModuleCall& call, at::Tensor copy, std::string device) {
            call.came_from.emplace_back(std::move(copy), std::move(device));
          },
          "copy"_a, "device"_a, "A tensor of the call is a copy in host memory; where it was.")
      .def_readonly("name", &PythonModuleCall::name)
      .def_readonly("class_name", &PythonModuleCall::class_name)
      .def("write", &write_module_bundle, "run_dir"_a, "iteration"_a = 0,
           "Writes a bundle with this call alone; returns its folder below run_dir.");
}

}  // namespace nanlocator
