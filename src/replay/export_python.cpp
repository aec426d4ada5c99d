#include "nanlocator/replay/export_python.hpp"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/jit/frontend/function_schema_parser.h>

#include <array>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string_view>

#include "nanlocator/error.hpp"
#include "nanlocator/replay/capture.hpp"
#include "tensor/dtypes.hpp"

namespace nanlocator::inline replay_room {
namespace {

constexpr std::size_t kMostArgumentLines = 6;
/// The program that was run, imported: not "__main__", so that it does not run again.
constexpr const char* kProgramModule = "nanlocator_program";

std::string python_text(const std::string& text) {  // JSON's escapes are Python's
  return nlohmann::json(text).dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
}

/// In a comment or a longer text: one line, without quotes that could end it.
std::string within_text(const std::string& text) {
  const auto quoted = python_text(text);
  return quoted.substr(1, quoted.size() - 2);
}

std::string real(double value) {
  if (std::isnan(value)) return "float('nan')";
  if (std::isinf(value)) return value > 0 ? "float('inf')" : "float('-inf')";
  std::array<char, 40> text{};
  std::snprintf(text.data(), text.size(), "%.17g", value);
  std::string result = text.data();
  if (result.find_first_of(".e") == std::string::npos) result += ".0";
  return result;
}

std::string tuple_of(const std::vector<std::int64_t>& values) {
  std::string text = "(";
  for (const auto value : values) text += std::to_string(value) + ", ";
  return text + ")";
}

std::string view_of(const BundleTensor& tensor) {
  std::string text = "view(" + python_text(tensor.storage) + ", torch." + tensor.dtype + ", " +
                     tuple_of(tensor.sizes) + ", " + tuple_of(tensor.strides) + ", " +
                     std::to_string(tensor.offset) + ")";
  if (tensor.is_wrapped_number) return text + ".item()";
  if (tensor.is_conjugate) text += ".conj()";
  if (tensor.is_negative) text += "._neg_view()";
  const bool was_on_device = tensor.device.rfind("cpu", 0) != 0;
  return was_on_device ? text + ".cuda()" : text;
}

/// A value that is no tensor, no text and holds no others; nullopt for those that are or do.
std::optional<std::string> plain_value(const BundleValue& value) {
  switch (value.kind) {
    case BundleValueKind::none:
    case BundleValueKind::undefined_tensor:
      return "None";
    case BundleValueKind::boolean:
      return value.boolean ? "True" : "False";
    case BundleValueKind::integer:
      return std::to_string(value.integer);
    case BundleValueKind::real:
      return real(value.real);
    case BundleValueKind::complex:
      return "complex(" + real(value.real) + ", " + real(value.imaginary) + ")";
    default:
      return std::nullopt;
  }
}

std::string argument(const BundleOperatorCall& call, const BundleValue& value, std::size_t i) {
  if (const auto plain = plain_value(value)) return *plain;
  switch (value.kind) {
    case BundleValueKind::tensor:
      return view_of(value.tensor);
    case BundleValueKind::text:
      // A dtype is kept by its name; no operator of Torch takes such a word as a text.
      return scalar_type_from(value.text) ? "torch." + value.text : python_text(value.text);
    case BundleValueKind::device:
      return "torch.device(" + python_text(value.text) + ")";
    case BundleValueKind::generator:
      return "torch.Generator().set_state(" +
             view_of(call.generator_states.at("argument." + std::to_string(i))) + ")";
    case BundleValueKind::list:
    case BundleValueKind::tuple: {
      std::string text = "[";
      for (const auto& item : value.items) text += argument(call, item, i) + ", ";
      return text + "]";
    }
    default:
      throw UnsupportedError("argument " + std::to_string(i) + " of " + call.op +
                             " could not be kept: " + value.text);
  }
}

/// "torch.ops.aten.div.Tensor"
std::string python_name(const c10::OperatorName& name) {
  const auto colons = name.name.find("::");
  const auto packet =
      "torch.ops." + name.name.substr(0, colons) + "." + name.name.substr(colons + 2);
  // The one overload of Torch that is a word of Python: aten::random_.from.
  if (name.overload_name == "from") return "getattr(" + packet + ", \"from\")";
  return packet + "." + (name.overload_name.empty() ? "default" : name.overload_name);
}

/// "cpu bfloat16" -> "torch.autocast('cpu', torch.bfloat16)"
std::string autocast_of(const Bundle& bundle) {
  const auto setting = bundle.settings.find("autocast");
  if (setting == bundle.settings.end() || setting->second == "off") return {};
  const auto device_end = setting->second.find(' ');
  if (device_end == std::string::npos) return {};
  const auto dtype_end = setting->second.find(' ', device_end + 1);
  const auto dtype = setting->second.substr(device_end + 1, dtype_end - device_end - 1);
  if (!scalar_type_from(dtype)) return {};  // a bundle may come from anywhere
  return "torch.autocast(" + python_text(setting->second.substr(0, device_end)) + ", torch." +
         dtype + ")";
}

/// Its name is what `op` says and made of identifiers: the script has both as code.
c10::FunctionSchema schema_of(const BundleOperatorCall& call) {
  const auto name = operator_name_of(call.op);
  if (const auto handle = c10::Dispatcher::singleton().findSchema(name)) return handle->schema();
  if (call.registered_by.empty()) return call_facts(name).handle.schema();  // which says so
  try {
    auto schema = torch::jit::parseSchema(call.schema);
    if (schema.operator_name() == name) return schema;
  } catch (const c10::Error&) {  // said below
  }
  throw UnsupportedError(call.op + " is not registered here, and its recorded schema, " +
                         call.schema + ", cannot be read");
}

// ---- what registers a custom operator ----

/// Imports a module by its name, else from the first of the files that is there.
constexpr const char* kModuleFunction =
    "\n\ndef module(name, *files):\n"
    "    try:\n        return importlib.import_module(name)\n"
    "    except ImportError:\n"
    "        file = next(filter(os.path.isfile, files), None)\n"
    "        if file is None:\n            raise\n"
    "        spec = importlib.util.spec_from_file_location(name, file)\n"
    "        made = sys.modules[name] = importlib.util.module_from_spec(spec)\n"
    "        spec.loader.exec_module(made)\n        return made\n\n\n";

/// Whether `module` is the program that was run: "__main__".
bool is_program(const std::string& module) {
  return module.starts_with("__");
}

/// A line that lets Python find `module` in `file`, and what lies beside it: of "a.b" and
/// "/x/a/b.py" for "/x". Empty where that is no place for it: of a library in a package.
std::string search_path(const std::string& module, const std::filesystem::path& file) {
  if (module.empty() || file.empty()) return {};
  auto place = file.parent_path();
  if (!is_program(module)) {
    auto name = file.filename().string();
    name.resize(std::min(name.find('.'), name.size()));  // b.cpython-311-x86_64-linux-gnu.so
    if (name != "__init__") place /= name;
    std::string rest = module;
    while (!rest.empty()) {
      const auto begin = rest.rfind('.') + 1;  // npos + 1: 0
      if (place.filename() != rest.substr(begin)) return {};
      place = place.parent_path();
      rest.resize(begin == 0 ? 0 : begin - 1);
    }
  }
  return "sys.path.append(" + python_text(place.string()) + ")\n";
}

/// For the script's docstring: what has to be there when it runs.
std::string needed(const BundleOperatorCall& call) {
  std::string text;
  for (const auto& each : call.registered_by) {
    text += "\n" + call.op + " is registered by ";
    const bool has_module = !each.module.empty() && !is_program(each.module);
    if (is_program(each.module)) {
      text += within_text(each.source) + " of the bundle, from the program that was run.";
    } else if (has_module) {
      text += "the module " + each.module + ", which must be importable";
      if (!each.file.empty()) text += ": it was " + within_text(each.file);
      if (!each.source.empty()) text += ". Else by " + within_text(each.source) + " of the bundle";
      text += ".";
    } else {
      text += "the library " + within_text(each.file) + ", which must be there.";
    }
  }
  return text;
}

/// The lines that make the operator known to Torch; `folder` is a variable of the script.
std::string registration(const BundleOperatorCall& call) {
  std::string script = kModuleFunction;
  for (const auto& each : call.registered_by) {
    const auto file = ", " + python_text(each.file);
    const auto source = each.source.empty()
                            ? std::string()
                            : ", os.path.join(folder, " + python_text(each.source) + ")";
    const auto library = "torch.ops.load_library(" + python_text(each.file) + ")\n";
    const auto path = search_path(each.module, each.file);
    script += path;
    const auto imported = "module(" + python_text(each.module);
    if (is_program(each.module)) {
      if (each.source.empty()) {
        throw UnsupportedError(call.op + " was registered by the program that was run, " +
                               each.file +
                               ", by statements that do not stand alone: move its "
                               "registration into a module");
      }
      script += "module(" + python_text(kProgramModule) + source + ")\n";
    } else if (each.module.empty()) {
      script += library;
    } else if (each.file.empty() || each.file.ends_with(".py")) {
      script += imported + (path.empty() && !each.file.empty() ? file : "") + source + ")\n";
    } else if (!path.empty()) {
      script += imported + file + ")\n";
    } else {
      script += "try:\n    " + imported + ")\nexcept ImportError:\n    " + library;
    }
  }
  return script;
}

// ---- calls of kernels ----

/// As Python writes it; `where` for the error.
std::string kernel_value(const BundleValue& value, const std::string& where) {
  const auto items = [&](const char* begin, const char* end) {
    std::string text = begin;
    for (const auto& item : value.items) text += kernel_value(item, where) + ", ";
    return text + end;
  };
  if (const auto plain = plain_value(value)) return *plain;
  switch (value.kind) {
    case BundleValueKind::tensor: {
      BundleTensor on_host = value.tensor;  // `memory` lies on the device already
      on_host.device = "cpu";
      return view_of(on_host);
    }
    case BundleValueKind::text:
      return python_text(value.text);
    case BundleValueKind::list:
      return items("[", "]");
    case BundleValueKind::tuple:
      return items("(", ")");
    case BundleValueKind::dictionary: {
      std::string text = "{";
      for (std::size_t i = 0; i < value.items.size(); ++i) {
        text += python_text(value.names.at(i)) + ": " + kernel_value(value.items[i], where) + ", ";
      }
      return text + "}";
    }
    case BundleValueKind::object:  // nanlocator.kernel_calls.Imported
      if (value.names == std::vector<std::string>{"module", "name"}) {
        const std::string& name = value.items[1].text;
        constexpr std::string_view kDevice = "device:";
        return name.starts_with(kDevice)
                   ? "torch.device(" + python_text(name.substr(kDevice.size())) + ")"
                   : "attribute(importlib.import_module(" + python_text(value.items[0].text) +
                         "), " + python_text(name) + ")";
      }
      [[fallthrough]];
    default:
      throw UnsupportedError(where + " could not be kept: " + value.text);
  }
}

/// The names of the storages that were on a device.
std::string storages_on_device(Bundle bundle) {
  std::set<std::string> names;
  for_each_bundle_tensor(bundle, [&](const BundleTensor& tensor) {
    if (tensor.device.rfind("cpu", 0) != 0) names.insert(tensor.storage);
  });
  std::string text;
  for (const auto& name : names) text += python_text(name) + ", ";
  return text.empty() ? "" : "{" + text + "}";
}

std::string kernel_script(const OpenBundle& bundle) {
  const BundleKernelCall& call = *bundle.bundle().kernel_call;
  if (!call.why_not_replayed.empty()) {
    throw UnsupportedError(call.name + " cannot be called again: " + call.why_not_replayed);
  }
  const auto folder = std::filesystem::absolute(bundle.path());
  const bool is_from_source = !call.source.empty();
  const std::string entry = call.entry.substr(is_from_source ? call.entry.rfind('.') + 1 : 0);
  std::string title = call.name + " as it was called in training";
  for (const auto& [package, version] : bundle.bundle().versions) {
    if (package == "torch" || package == "triton" || package == call.module) {
      title += ", " + package + " " + version;
    }
  }
  std::string script = "# " + within_text(title);
  script +=
      "; written by nanlocator.\nimport importlib\nimport importlib.util\nimport os\n"
      "import sys\n\n";
  for (const auto& [name, value] : call.environment) {
    script += "os.environ.setdefault(" + python_text(name) + ", " + python_text(value) + ")\n";
  }
  script +=
      "import torch\nfrom safetensors.torch import load_file\n\n"
      "folder = sys.argv[1] if len(sys.argv) > 1 else " +
      python_text(folder.string()) +
      "\n"
      "memory = {n: t.reshape(-1).view(torch.uint8).clone() for n, t in\n"
      "          load_file(os.path.join(folder, \"tensors.safetensors\")).items()}\n";
  if (const auto names = storages_on_device(bundle.bundle()); !names.empty()) {
    script += "for name in " + names + ":\n    memory[name] = memory[name].cuda()\n";
  }
  script +=
      "\n\ndef view(name, dtype, sizes, strides, offset):\n"
      "    return memory[name].view(dtype).as_strided(sizes, strides, offset)\n\n\n"
      "def attribute(owner, path):\n"
      "    for name in path.split(\".\"):\n        owner = getattr(owner, name)\n"
      "    return owner\n";
  script += kModuleFunction;
  if (!is_from_source) script += search_path(call.module, call.file);
  script += is_from_source
                ? "kernel = attribute(module(\"nanlocator_kernel\", os.path.join(folder, " +
                      python_text(call.source) + ")), " + python_text(entry) + ")\n"
                : "kernel = attribute(module(" +
                      python_text(is_program(call.module) ? kProgramModule : call.module) + ", " +
                      python_text(call.file) + "), " + python_text(entry) + ")\n";
  script += "arguments = {\n";
  for (std::size_t i = 0; i < call.arguments.size(); ++i) {
    const std::string name =
        i < call.names.size() ? call.names[i] : "argument[" + std::to_string(i) + "]";
    script += "    " + python_text(name) + ": " + kernel_value(call.arguments[i], name) + ",\n";
  }
  script += "}\nkeywords = {\n";
  for (const auto& [name, value] : call.keywords) {
    script += "    " + python_text(name) + ": " + kernel_value(value, name) + ",\n";
  }
  script += "}\n";
  if (call.launcher == "triton") {
    if (!is_from_source) {  // autotuners and heuristics stand before what was launched
      script +=
          "while type(kernel).__name__ not in (\"JITFunction\", \"InterpretedFunction\"):\n"
          "    kernel = kernel.fn\n";
    }
    std::string grid;
    for (const auto& size : call.launch) grid += kernel_value(size, "the grid") + ", ";
    script += "result = kernel[(" + grid + ")](*arguments.values(), **keywords)\n";
  } else {
    script += "result = kernel(*arguments.values(), **keywords)\n";
  }
  return script +
         "results = result if isinstance(result, (tuple, list)) else (result,)\n"
         "for name, value in [*arguments.items(), *keywords.items(),\n"
         "                    *((f\"output[{i}]\", r) for i, r in enumerate(results))]:\n"
         "    if isinstance(value, torch.Tensor) and value.is_floating_point():\n"
         "        bad = (~torch.isfinite(value.float())).nonzero().tolist()\n"
         "        print(name, tuple(value.shape), len(bad), \"NaN or Inf, first at\", bad[:1])\n";
}

}  // namespace

std::string python_script(const OpenBundle& bundle) {
  const auto& recorded = bundle.bundle().operator_call;
  if (!recorded && bundle.bundle().kernel_call) return kernel_script(bundle);
  if (!recorded) {
    throw UsageError(bundle.path().string() + " holds no operator or kernel call to export");
  }
  const auto folder = std::filesystem::absolute(bundle.path());
  const auto tensors = python_text((folder / "tensors.safetensors").string());
  const auto torch = bundle.bundle().versions.find("torch");
  const auto schema = schema_of(*recorded);
  const std::string title =
      recorded->op + " as it was called in training" +
      (torch == bundle.bundle().versions.end() ? std::string()
                                               : " with torch " + within_text(torch->second)) +
      "; written by nanlocator.\n";
  std::string script;
  if (recorded->registered_by.empty()) {
    script = "# " + title +
             "import sys\nimport torch\nfrom safetensors.torch import load_file\n\n"
             "tensors = load_file(sys.argv[1] if len(sys.argv) > 1 else " +
             tensors + ")\n";
  } else {
    script = "\"\"\"" + title + needed(*recorded) +
             "\n\"\"\"\n\nimport importlib\nimport importlib.util\nimport os\nimport sys\n\n"
             "import torch\nfrom safetensors.torch import load_file\n\n"
             "path = sys.argv[1] if len(sys.argv) > 1 else " +
             tensors + "\nfolder = os.path.dirname(path)\ntensors = load_file(path)\n" +
             registration(*recorded) + "\n\n";
  }
  script +=
      "def view(name, dtype, sizes, strides, offset):\n"
      "    data = tensors[name].reshape(-1).view(torch.uint8).clone().view(dtype)\n"
      "    return data.as_strided(sizes, strides, offset)\n";
  if (schema.arguments().size() != recorded->arguments.size()) {
    throw UnsupportedError(recorded->op + " takes other arguments here than where it was recorded");
  }
  std::vector<std::string> positional;
  std::string keywords;
  for (std::size_t i = 0; i < recorded->arguments.size(); ++i) {
    const auto text = argument(*recorded, recorded->arguments[i], i);
    if (schema.arguments()[i].kwarg_only()) {
      keywords += ", " + schema.arguments()[i].name() + "=" + text;
    } else {
      positional.push_back(text);
    }
  }
  script += "arguments = [\n";
  const auto lines = std::min(positional.size(), kMostArgumentLines);
  for (std::size_t line = 0; line < lines; ++line) {
    script += "    ";
    const auto end =
        line + 1 == lines ? positional.size() : line + 1;  // the last line takes the rest
    for (auto i = line; i < end; ++i) script += positional[i] + (i + 1 == end ? ",\n" : ", ");
  }
  script += "]\n";
  const auto& states = recorded->generator_states;
  if (const auto cpu = states.find("cpu"); cpu != states.end()) {
    script += "torch.set_rng_state(" + view_of(cpu->second) + ")\n";
  }
  const auto call =
      "print(" + python_name(operator_name_of(recorded->op)) + "(*arguments" + keywords + "))\n";
  const auto autocast = autocast_of(bundle.bundle());
  return script + (autocast.empty() ? call : "with " + autocast + ":\n    " + call);
}

}  // namespace nanlocator::inline replay_room
