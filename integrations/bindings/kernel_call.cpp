#include "kernel_call.hpp"

#include <pybind11/stl.h>

#include <memory>
#include <utility>

#include "bindings.hpp"
#include "interrupted.hpp"
#include "nanlocator/error.hpp"
#include "nanlocator/operators/kernel_call.hpp"
#include "nanlocator/replay/export_python.hpp"
#include "nanlocator/report/kernel_replay_text.hpp"
#include "python_values.hpp"
#include "record/bundle_json.hpp"
#include "replay/host_memory.hpp"
#include "replay/storage_ranges.hpp"

namespace py = pybind11;
using py::literals::operator""_a;

namespace nanlocator {
namespace {

using Tensors = std::vector<at::Tensor>;

/// A Python object that may be dropped without the GIL.
std::shared_ptr<py::object> shared(const py::object& object) {
  return {new py::object(object), [](py::object* dropped) {
            const py::gil_scoped_acquire gil;
            delete dropped;
          }};
}

/// A Python exception becomes an Error with its first line; an interrupt ends the re-run.
Tensors call_with(const std::shared_ptr<py::object>& function, const Tensors& tensors) {
  const py::gil_scoped_acquire gil;
  try {
    return (*function)(tensors).cast<Tensors>();
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) throw Interrupted{std::move(error)};
    const std::string text = error.what();
    throw Error(text.substr(0, text.find('\n')));
  }
}

RecordedKernelCall recorded_of(const py::object& record) {
  RecordedKernelCall recorded;
  recorded.name = record.attr("name").cast<std::string>();
  recorded.names = record.attr("tensor_names").cast<std::vector<std::string>>();
  recorded.before = record.attr("before").cast<Tensors>();
  recorded.after = record.attr("after").cast<Tensors>();
  recorded.results = record.attr("results").cast<Tensors>();
  for (const auto& beside : record.attr("beside").cast<std::vector<std::string>>()) {
    recorded.beside.push_back(value_named<Beside>(beside).value_or(Beside::finite));
  }
  recorded.beside.resize(recorded.before.size(), Beside::finite);
  recorded.settings = record.attr("settings").cast<std::map<std::string, std::string>>();
  for (const auto& [copy, device] :
       record.attr("came_from").cast<std::vector<std::pair<at::Tensor, std::string>>>()) {
    recorded.came_from.insert_or_assign(copy.storage().unsafeGetStorageImpl(), at::Device(device));
  }
  return recorded;
}

std::vector<KernelReference> references_of(const py::object& record) {
  std::vector<KernelReference> references;
  for (const auto& each : record.attr("references")()) {
    const auto [family, function] = each.cast<std::pair<std::string, py::object>>();
    references.push_back({family, [function = shared(function)](const Tensors& tensors) {
                            return call_with(function, tensors);
                          }});
  }
  return references;
}

void add_to_bundle(const py::object& record, Bundle& bundle, StorageCollector& storages,
                   BundleContents& contents) {
  const auto text = [&](const char* name) { return record.attr(name).cast<std::string>(); };
  const RecordedKernelCall recorded = recorded_of(record);
  storages.note(recorded.came_from);
  ValueConverter converter(storages);
  BundleKernelCall call;
  call.name = recorded.name;
  call.launcher = text("launcher");
  call.module = text("module");
  call.entry = text("entry");
  call.file = plain_path_or_none(text("file"));
  call.why_not_replayed = text("why_not_replayed");
  call.names = record.attr("names").cast<std::vector<std::string>>();
  call.arguments = converter.values(record.attr("arguments"), "kernel.argument");
  for (const auto& [key, value] : record.attr("keywords").cast<py::dict>()) {
    const auto keyword = py::cast<std::string>(key);
    call.keywords.emplace_back(keyword, converter.value(value, "kernel.argument." + keyword));
  }
  call.launch = converter.values(record.attr("launch"), "kernel.launch");
  call.beside = recorded.beside;
  call.environment = record.attr("environment").cast<std::map<std::string, std::string>>();
  for (std::size_t i = 0; i < recorded.after.size(); ++i) {
    call.arguments_after.push_back(
        storages.add(recorded.after[i], "kernel.after." + recorded.names[i]));
  }
  for (std::size_t i = 0; i < recorded.results.size(); ++i) {
    call.results.push_back(storages.add(recorded.results[i], "kernel.output." + std::to_string(i)));
  }
  if (const auto source = text("source"); !source.empty()) {
    call.source = text("source_file");
    contents.files.emplace_back(call.source, source);
  }
  bundle.kernel_call = std::move(call);
  if (bundle.settings.empty()) bundle.settings = recorded.settings;
  if (bundle.versions.empty()) bundle.versions = current_versions();
  for (const auto& [package, version] :
       record.attr("versions").cast<std::map<std::string, std::string>>()) {
    bundle.versions.emplace(package, version);
  }
}

/// Host copies, which share memory as the originals do, and the devices of those that were
/// elsewhere. Throws UnsupportedError if they would take more than half of the free memory.
std::pair<Tensors, std::vector<std::pair<at::Tensor, std::string>>> copies_on_host(
    const Tensors& tensors, std::uint64_t most) {
  const auto bytes = bytes_of(tensors);
  if (bytes > std::min(most, free_host_memory() / 2)) {
    throw UnsupportedError("copies of its tensors would take " + std::to_string(bytes) + " bytes");
  }
  CameFrom came_from;
  auto copies = copy_together(tensors, &came_from);
  std::vector<std::pair<at::Tensor, std::string>> devices;
  for (const auto& copy : copies) {
    if (!copy.has_storage()) continue;
    const auto found = came_from.find(copy.storage().unsafeGetStorageImpl());
    if (found != came_from.end()) devices.emplace_back(copy, found->second.str());
  }
  return {std::move(copies), std::move(devices)};
}

KernelReplay replay_record(const py::object& record, int repeats, const std::string& role) {
  const KeptKernelCall kept = kept_kernel_call(record);
  if (!kept.why_not_replayed.empty()) throw UnsupportedError(kept.why_not_replayed);
  return released([&] {
    return replay_kernel(
        kept.recorded, kept.execute, kept.references,
        {.repeats = repeats, .role = role, .seconds = std::nullopt, .bytes = std::nullopt});
  });
}

}  // namespace

KeptKernelCall kept_kernel_call(const py::object& record) {
  KeptKernelCall kept;
  kept.recorded = recorded_of(record);
  kept.why_not_replayed = record.attr("why_not_replayed").cast<std::string>();
  kept.execute = [execute = shared(record.attr("execute"))](const Tensors& tensors) {
    return call_with(execute, tensors);
  };
  kept.references = references_of(record);
  kept.add_to_bundle = [held = shared(record)](Bundle& bundle, StorageCollector& storages,
                                               BundleContents& contents) {
    const py::gil_scoped_acquire gil;
    add_to_bundle(*held, bundle, storages, contents);
  };
  return kept;
}

void bind_kernel_calls(py::module_& m) {
  py::list variables;
  for (const auto name : kKernelVariables) variables.append(name);
  m.attr("KERNEL_VARIABLES") = py::tuple(variables);
  m.def("count_kernel_calls_from_zero", &count_kernel_calls_from_zero);
  m.def("copies_on_host", &copies_on_host, "tensors"_a, "most_bytes"_a);
  m.def(
      "beside_of", [](const at::Tensor& tensor) { return std::string(name_of(beside_of(tensor))); },
      "tensor"_a);
  m.def("current_settings", &current_settings);
  py::class_<KernelReplay>(m, "KernelReplay")
      .def("to_json", [](const KernelReplay& replay) { return to_json(replay); })
      .def_property_readonly(
          "conclusion",
          [](const KernelReplay& replay) { return std::string(name_of(replay.conclusion)); })
      .def("sentences", &sentences_of, "kernel"_a);
  m.def("replay_kernel_record", &replay_record, "record"_a, "repeats"_a, "role"_a,
        "Executes a nanlocator.calls.kernel_calls.KernelCallRecord again, without limits.");
}

}  // namespace nanlocator
