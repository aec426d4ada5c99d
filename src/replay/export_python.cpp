#include "nanlocator/replay/export_python.hpp"

#include <array>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "nanlocator/error.hpp"
#include "nanlocator/replay/capture.hpp"
#include "tensor/dtypes.hpp"

namespace nanlocator {
namespace {

constexpr std::size_t kMostArgumentLines = 6;

std::string python_text(const std::string& text) {  // JSON's escapes are Python's
  return nlohmann::json(text).dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
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

std::string argument(const BundleOperatorCall& call, const BundleValue& value, std::size_t i) {
  switch (value.kind) {
    case BundleValueKind::none:
    case BundleValueKind::undefined_tensor:
      return "None";
    case BundleValueKind::tensor:
      return view_of(value.tensor);
    case BundleValueKind::boolean:
      return value.boolean ? "True" : "False";
    case BundleValueKind::integer:
      return std::to_string(value.integer);
    case BundleValueKind::real:
      return real(value.real);
    case BundleValueKind::complex:
      return "complex(" + real(value.real) + ", " + real(value.imaginary) + ")";
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
  return "torch.autocast(" + python_text(setting->second.substr(0, device_end)) + ", torch." +
         setting->second.substr(device_end + 1, dtype_end - device_end - 1) + ")";
}

}  // namespace

std::string python_script(const OpenBundle& bundle) {
  const auto& recorded = bundle.bundle().operator_call;
  if (!recorded) {
    throw UsageError(bundle.path().string() + " holds no operator call to export");
  }
  const auto folder = std::filesystem::absolute(bundle.path());
  const auto torch = bundle.bundle().versions.find("torch");
  std::string script =
      "# " + recorded->op + " as it was called in training" +
      (torch == bundle.bundle().versions.end() ? std::string() : " with torch " + torch->second) +
      "; written by nanlocator.\n";
  script +=
      "import sys\nimport torch\nfrom safetensors.torch import load_file\n\n"
      "tensors = load_file(sys.argv[1] if len(sys.argv) > 1 else " +
      python_text((folder / "tensors.safetensors").string()) +
      ")\n"
      "def view(name, dtype, sizes, strides, offset):\n"
      "    data = tensors[name].reshape(-1).view(torch.uint8).clone().view(dtype)\n"
      "    return data.as_strided(sizes, strides, offset)\n";
  const auto& schema = call_facts(operator_name_of(recorded->op)).handle.schema();
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

}  // namespace nanlocator
