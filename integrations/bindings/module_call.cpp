#include "module_call.hpp"

#include "python_values.hpp"

namespace py = pybind11;

namespace nanlocator {
namespace {

constexpr const char* kPickleFile = "module.pickle";
/// A larger module is the model rather than the place of the fault, and would leave no budget for
/// the operator's own call.
constexpr std::size_t kMostWeightBytes = 512UL << 20;

std::size_t bytes_of(const py::dict& weights) {
  std::size_t bytes = 0;
  for (const auto& [name, weight] : weights) bytes += py::cast<at::Tensor>(weight).nbytes();
  return bytes;
}

}  // namespace

void PythonModuleCall::add_to(Bundle& bundle, StorageCollector& storages,
                              BundleContents& contents) const {
  if (!why_left_out.empty()) {
    bundle.notes.push_back("The call of the module " + name + " was not kept: " + why_left_out);
    return;
  }
  const py::gil_scoped_acquire gil;
  if (const auto bytes = bytes_of(weights); bytes > kMostWeightBytes) {
    bundle.notes.push_back("The call of the module " + name + " was not kept: its weights take " +
                           std::to_string(bytes >> 20) + " MiB");
    return;
  }
  for (const auto& [copy, device] : came_from) {
    storages.note({{copy.storage().unsafeGetStorageImpl(), at::Device(device)}});
  }
  ValueConverter converter(storages);
  BundleModuleCall call;
  call.name = name;
  call.class_name = class_name;
  call.is_training = is_training;
  call.arguments = converter.values(arguments, "module.argument");
  for (const auto& [key, value] : keywords) {
    const auto keyword = py::cast<std::string>(key);
    call.keywords.emplace_back(keyword, converter.value(value, "module.argument." + keyword));
  }
  call.outputs = converter.value(outputs, "module.output");
  for (const auto& [key, tensor] : weights) {
    const auto weight = py::cast<std::string>(key);
    auto value = storages.add(py::cast<at::Tensor>(tensor), "module.weight." + weight);
    if (value.kind == BundleValueKind::tensor) {
      call.weights.emplace_back(weight, std::move(value.tensor));
    } else {
      bundle.notes.push_back("The weight " + weight + " of " + name +
                             " could not be kept: " + value.text);
    }
  }
  call.grad_outputs = converter.values(grad_outputs, "module.grad_output");
  call.grad_inputs = converter.values(grad_inputs, "module.grad_input");
  call.pickle_problem = pickle_problem;
  if (!pickle.empty()) {
    call.pickle = kPickleFile;
    contents.files.emplace_back(kPickleFile, pickle);
  }
  bundle.module_call = std::move(call);
}

}  // namespace nanlocator
