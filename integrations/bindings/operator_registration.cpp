#include "operator_registration.hpp"

#include <ATen/core/dispatch/Dispatcher.h>
#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <vector>

#include "bindings.hpp"
#include "nanlocator/replay/operator_call.hpp"
#include "path.hpp"
#include "record/bundle_json.hpp"

namespace py = pybind11;
using py::literals::operator""_a;

namespace nanlocator {
namespace {

using Registrations = std::vector<std::tuple<std::string, std::string, std::string>>;

/// "registration.py", "registration-2.py"
std::string source_file(std::size_t i) {
  return "registration" + (i == 0 ? std::string() : "-" + std::to_string(i + 1)) + ".py";
}

/// The operator's name and, for each registration of it, module, file and source file; None for a
/// bundle without an operator call.
py::object registration_of(const std::filesystem::path& path) {
  const OpenBundle bundle(path);
  const auto& call = bundle.bundle().operator_call;
  if (!call) return py::none();
  Registrations registrations;
  for (const auto& each : call->registered_by) {
    registrations.emplace_back(each.module, each.file,
                               each.source.empty() ? "" : (bundle.path() / each.source).string());
  }
  return py::make_tuple(call->op, registrations, bundle.path().string());
}

}  // namespace

void add_registration(Bundle& bundle, BundleContents& contents) {
  if (!bundle.operator_call) return;
  auto& call = *bundle.operator_call;
  if (call.op.starts_with("aten::") || call.op.starts_with("prims::")) return;
  try {
    const auto found = py::module_::import("nanlocator.calls.operator_registration")
                           .attr("registered_by")(call.op)
                           .cast<Registrations>();
    for (const auto& [module, file, source] : found) {
      BundleRegistration each{module, plain_path_or_none(file),
                              source.empty() ? "" : source_file(contents.files.size())};
      if (each.module.empty() && each.file.empty()) {
        bundle.notes.push_back(file + ", which registered " + call.op + ", cannot be named");
        continue;
      }
      if (!source.empty()) contents.files.emplace_back(each.source, source);
      call.registered_by.push_back(std::move(each));
    }
  } catch (const py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) throw;
    const std::string text = error.what();
    bundle.notes.push_back("What registered " + call.op +
                           " was not found: " + text.substr(0, text.find('\n')));
  } catch (const std::exception& error) {  // the path is not UTF-8
    bundle.notes.push_back("What registered " + call.op + " cannot be kept: " + error.what());
  }
}

void bind_operator_registration(py::module_& m) {
  m.def("registration_of", &registration_of, "bundle"_a);
  m.def(
      "is_registered",
      [](const std::string& op) {
        return c10::Dispatcher::singleton().findSchema(operator_name_of(op)).has_value();
      },
      "operator"_a);
}

}  // namespace nanlocator
