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

#include "files/printable.hpp"
#include "nanlocator/error.hpp"
#include "nanlocator/replay/capture.hpp"
#include "tensor/dtypes.hpp"

namespace nanlocator::inline replay_room {
namespace {

constexpr std::size_t kMostArgumentLines = 6;

std::string python_text(const std::string& text) {  // JSON's escapes are Python's
  return nlohmann::json(text).dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
}

/// For a comment or a longer text: one line, without quotes that could end it.
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

/// A value that is neither a tensor nor text and contains no others; nullopt otherwise.
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
      // A dtype is stored by its name; no operator of Torch takes such a word as text.
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
  // The one overload of Torch whose name is a Python keyword: aten::random_.from.
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

/// Checks that the name equals `op` and consists of identifiers: the script uses both as code.
c10::FunctionSchema schema_of(const BundleOperatorCall& call) {
  const auto name = operator_name_of(call.op);
  if (const auto handle = c10::Dispatcher::singleton().findSchema(name)) return handle->schema();
  if (call.registered_by.empty())
    return call_facts(name).handle.schema();  // throws if it is not registered
  try {
    auto schema = torch::jit::parseSchema(call.schema);
    if (schema.operator_name() == name) return schema;
  } catch (const c10::Error&) {  // reported below
  }
  throw UnsupportedError(call.op + " is not registered here, and its recorded schema, " +
                         call.schema + ", cannot be read");
}

// ---- code that the bundle names ----

/// The beginning of a script that needs more than Torch. Like replay, it imports by name, and runs
/// code from the bundle only if the user says that they trust it. `argument` is the variable for
/// the script's other argument.
std::string foreign_start(const std::string& argument, const std::string& usual) {
  return "import importlib\nimport importlib.util\nimport os\nimport sys\n\n"
         "trust = \"--trust\" in sys.argv  # to load files and execute source that the bundle "
         "names\n" +
         argument + " = next((each for each in sys.argv[1:] if each != \"--trust\"), " +
         python_text(usual) + ")\n";
}

constexpr const char* kModuleFunction =
    "\n\ndef module(name, file, source=\"\"):\n"
    "    \"\"\"By its name. With --trust as the bundle's source, else by its file.\"\"\"\n"
    "    problem = \"it has no name to import it by\"\n"
    "    if name and not (trust and source):\n"
    "        try:\n            return importlib.import_module(name)\n"
    "        except ImportError as error:\n            problem = error\n"
    "    file = source or file\n"
    "    if not trust or not os.path.isfile(file):\n"
    "        way = f\"--trust loads {file!r}: if you trust where it is from\"\n"
    "        sys.exit(f\"{problem}. {way if file else ''}\")\n"
    "    name = name or \"nanlocator_program\"\n"
    "    spec = importlib.util.spec_from_file_location(name, file)\n"
    "    made = sys.modules[name] = importlib.util.module_from_spec(spec)\n"
    "    spec.loader.exec_module(made)\n    return made\n\n\n";

/// Whether `module` is the program itself: "__main__".
bool is_program(const std::string& module) {
  return module.starts_with("__");
}

/// The arguments of `module`; `folder` is a variable of the script.
std::string module_arguments(const std::string& module, const std::string& file,
                             const std::string& source) {
  return "(" + python_text(is_program(module) ? "" : module) + ", " + python_text(file) +
         (source.empty() ? "" : ", os.path.join(folder, " + python_text(source) + ")") + ")";
}

// ---- what registers a custom operator ----

/// For the script's docstring: its requirements.
std::string needed(const BundleOperatorCall& call) {
  std::string text;
  for (const auto& each : call.registered_by) {
    text += "\n" + call.op + " is registered by ";
    const bool has_module = !each.module.empty() && !is_program(each.module);
    if (is_program(each.module)) {
      text +=
          within_text(each.source) + " of the bundle, from the program itself: only with --trust.";
    } else if (has_module) {
      text += "the module " + each.module + ", which must be importable";
      if (!each.file.empty()) text += ": it was " + within_text(each.file);
      if (!each.source.empty()) {
        text += ". With --trust by " + within_text(each.source) + " of the bundle";
      }
      text += ".";
    } else {
      text += "the library " + within_text(each.file) + ", which is loaded only with --trust.";
    }
  }
  return text;
}

/// The lines that register the operator with Torch.
std::string registration(const BundleOperatorCall& call, const std::string& packet) {
  std::string script = kModuleFunction;
  for (const auto& each : call.registered_by) {
    const auto library = "torch.ops.load_library(" + python_text(each.file) + ")\n";
    if (is_program(each.module) && each.source.empty()) {
      throw UnsupportedError(call.op + " was registered by the program itself, " + each.file +
                             ", by statements that depend on the rest of it: move its "
                             "registration into a module");
    }
    if (each.module.empty()) {
      script += "if trust:\n    " + library;
    } else if (each.file.empty() || each.file.ends_with(".py") || !each.source.empty()) {
      script += "module" + module_arguments(each.module, each.file, each.source) + "\n";
    } else {  // an extension module, or the package that contains the library
      script += "try:\n    importlib.import_module(" + python_text(each.module) +
                ")\nexcept ImportError:\n    if trust:\n        " + library;
    }
  }
  return script + "if not hasattr(torch.ops." + packet.substr(0, packet.find("::")) + ", " +
         python_text(packet.substr(packet.find("::") + 2)) + "):\n    sys.exit(" +
         python_text(call.op +
                     " is not registered. --trust loads what registered it: if you trust where "
                     "the bundle is from") +
         ")\n";
}

// ---- calls of kernels ----

/// The value as Python source; `where` for the error.
std::string kernel_value(const BundleValue& value, const std::string& where) {
  const auto items = [&](const char* begin, const char* end) {
    std::string text = begin;
    for (const auto& item : value.items) text += kernel_value(item, where) + ", ";
    return text + end;
  };
  if (const auto plain = plain_value(value)) return *plain;
  switch (value.kind) {
    case BundleValueKind::tensor: {
      BundleTensor on_host = value.tensor;  // `memory` is already on the device
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

/// The lines that set `kernel` after checking that it is one: the bundle may name any function.
std::string kernel_lines(const BundleKernelCall& call) {
  const std::string last = call.entry.substr(call.entry.rfind('.') + 1);
  const std::string of_source = call.source.empty() ? "" : python_text(last) + " if trust else ";
  const std::string is_foreign = call.source.empty() ? "" : "not trust and ";
  std::string script = "owner = module" + module_arguments(call.module, call.file, call.source) +
                       "\nkernel = attribute(owner, " + of_source + python_text(call.entry) + ")\n";
  std::string kind;
  if (call.launcher == "triton") {  // autotuners and heuristics wrap the launched kernel
    kind = "kernel of Triton";
    script +=
        "kinds = (\"JITFunction\", \"InterpretedFunction\")\n"
        "while type(kernel).__name__ not in kinds and hasattr(kernel, \"fn\"):\n"
        "    kernel = kernel.fn\n"
        "if type(kernel).__name__ not in kinds or not "
        "type(kernel).__module__.startswith(\"triton.\"):\n";
  } else {  // the same check as in nanlocator's kernels.py
    kind = "function of an extension module of PyTorch's";
    script +=
        "file, root = str(getattr(owner, \"__file__\", \"\")), owner.__name__.split(\".\")[0]\n"
        "content = open(file, \"rb\").read() if file.endswith(\".so\") else b\"\"\n"
        "is_linked = b\"libc10.\" in content or b\"libtorch\" in content\n"
        "is_known = is_linked or content and root in (\"cudnn\", \"nvfuser\", \"cupy_backends\")\n"
        "is_known = is_known and root not in (\"torch\", \"functorch\", \"nanlocator\")\n"
        "if " +
        is_foreign + "not (is_known and kernel is vars(owner).get(" + python_text(call.entry) +
        ") and type(kernel) is type(len)):\n";
  }
  return script + "    sys.exit(" +
         python_text(printable(call.module + "." + call.entry) + " is no " + kind +
                     ": it was not called") +
         ")\n";
}

std::string kernel_script(const OpenBundle& bundle) {
  const BundleKernelCall& call = *bundle.bundle().kernel_call;
  if (!call.why_not_replayed.empty()) {
    throw UnsupportedError(call.name + " cannot be called again: " + call.why_not_replayed);
  }
  const auto folder = std::filesystem::absolute(bundle.path());
  std::string title = call.name + " as it was called in training";
  for (const auto& [package, version] : bundle.bundle().versions) {
    if (package == "torch" || package == "triton" || package == call.module) {
      title += ", " + package + " " + version;
    }
  }
  std::string script = "# " + within_text(title) + "; written by nanlocator.\n" +
                       foreign_start("folder", folder.string());
  std::string of_files;  // variables may name programs and folders, too
  for (const auto& [name, value] : call.environment) {
    const auto line =
        "os.environ.setdefault(" + python_text(name) + ", " + python_text(value) + ")\n";
    if (name == "TRITON_INTERPRET") {
      script += line;
    } else {
      of_files += "    " + line;
    }
  }
  if (!of_files.empty()) script += "if trust:\n" + of_files;
  script +=
      "\nimport torch\nfrom safetensors.torch import load_file\n\n"
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
  script += kModuleFunction + kernel_lines(call);
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
         "        print(repr(name)[1:-1], tuple(value.shape), len(bad), \"NaN or Inf, first at\", "
         "bad[:1])\n";
}

}  // namespace

std::string python_script(const OpenBundle& bundle) {
  const auto& recorded = bundle.bundle().operator_call;
  if (!recorded && bundle.bundle().kernel_call) return kernel_script(bundle);
  if (!recorded) {
    throw UsageError(bundle.path().string() + " holds no operator or kernel call to export");
  }
  const auto folder = std::filesystem::absolute(bundle.path());
  const auto tensors = folder / "tensors.safetensors";
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
             python_text(tensors.string()) + ")\n";
  } else {
    script = "\"\"\"" + title + needed(*recorded) + "\n\"\"\"\n\n" +
             foreign_start("path", tensors.string()) +
             "\nimport torch\nfrom safetensors.torch import load_file\n\n"
             "folder = os.path.dirname(path)\ntensors = load_file(path)\n" +
             registration(*recorded, operator_name_of(recorded->op).name) + "\n\n";
  }
  script +=
      "def view(name, dtype, sizes, strides, offset):\n"
      "    data = tensors[name].reshape(-1).view(torch.uint8).clone().view(dtype)\n"
      "    return data.as_strided(sizes, strides, offset)\n";
  if (schema.arguments().size() != recorded->arguments.size()) {
    throw UnsupportedError(recorded->op +
                           " takes different arguments here than when it was recorded");
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
