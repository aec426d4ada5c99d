#include "nanlocator/replay/operator_call.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/empty.h>

#include <cstring>
#include <map>
#include <sstream>

#include "nanlocator/error.hpp"
#include "nanlocator/replay/capture.hpp"
#include "replay/storage_ranges.hpp"
#include "replay/values.hpp"
#include "tensor/dtypes.hpp"
#include "tensor/own_work.hpp"

namespace nanlocator::inline replay_room {
namespace {

std::string schema_text(const c10::FunctionSchema& schema) {
  std::ostringstream text;
  text << schema;
  return text.str();
}

std::string generator_key(std::size_t argument) {
  return "argument." + std::to_string(argument);
}

std::string quoted(const std::string& text) {
  return "'" + text + "'";
}

at::Device device_from(const std::string& text, const std::string& where) {
  try {
    return at::Device(text);
  } catch (const c10::Error&) {
    throw UnsupportedError(where + " was on device " + quoted(text) +
                           ", which this build of Torch does not know.");
  }
}

}  // namespace

c10::OperatorName operator_name_of(const std::string& op) {
  const auto dot = op.find('.');
  if (dot == std::string::npos) return {op, ""};
  return {op.substr(0, dot), op.substr(dot + 1)};
}

void add_to_bundle(const OperatorCall& call, Bundle& bundle, StorageCollector& storages) {
  const auto& facts = call_facts(call.name);
  const auto& schema = facts.handle.schema();
  storages.note(call.came_from);
  BundleOperatorCall kept;
  kept.op = c10::toString(call.name);
  kept.schema = schema_text(schema);
  const auto keep_state = [&](const std::string& key, const at::Tensor& state) {
    kept.generator_states[key] = storages.add(state, "generator." + key).tensor;
  };
  for (std::size_t i = 0; i < call.arguments.size(); ++i) {
    const auto& argument = schema.arguments().at(i);
    const auto name = generator_key(i) + "." + argument.name();
    auto value = storages.add(call.arguments[i], name);
    if (is_dtype(argument) && value.kind == BundleValueKind::integer) {
      value.kind = BundleValueKind::text;
      value.text = torch_name(static_cast<at::ScalarType>(value.integer));
      value.integer = 0;
    }
    if (call.arguments[i].isGenerator()) {
      keep_state(generator_key(i), call.arguments[i].toGenerator().get_state());
    }
    kept.arguments.push_back(std::move(value));
  }
  for (std::size_t i = 0; i < call.outputs.size(); ++i) {
    kept.outputs.push_back(storages.add(call.outputs[i], "output." + std::to_string(i)));
  }
  for (const auto& [device, state] : call.generator_states) keep_state(device, state);
  bundle.operator_call = std::move(kept);
  bundle.settings = call.settings;
  bundle.versions = current_versions();
}

struct BundleTensors::Impl {
  const OpenBundle& bundle;
  at::Device device;
  bool was_on_host_only = true;
  std::map<std::string, at::Tensor> ranges;  // bytes, by storage name

  Impl(const OpenBundle& opened, at::Device to) : bundle(opened), device(to) {
    auto copy = bundle.bundle();
    for_each_bundle_tensor(copy, [&](const BundleTensor& tensor) {
      if (tensor.device.rfind("cpu", 0) != 0) was_on_host_only = false;
    });
  }

  const at::Tensor& range(const std::string& name, at::Device place) {
    if (const auto it = ranges.find(name); it != ranges.end()) return it->second;
    const auto bytes = bundle.tensors().at(name).bytes;
    auto range = at::empty({static_cast<std::int64_t>(bytes.size())}, at::kByte);
    if (!bytes.empty()) std::memcpy(range.mutable_data_ptr(), bytes.data(), bytes.size());
    if (!place.is_cpu()) range = range.to(place);
    return ranges.emplace(name, std::move(range)).first->second;
  }
};

BundleTensors::BundleTensors(const OpenBundle& bundle, at::Device device)
    : impl_(std::make_unique<Impl>(bundle, device)) {}
BundleTensors::~BundleTensors() = default;

at::Device BundleTensors::place_of(const std::string& recorded) const {
  if (impl_->device.is_cpu() || impl_->was_on_host_only) return impl_->device;
  const auto place = device_from(recorded, impl_->bundle.path().string() + ": a value");
  return place.is_cpu() ? place : impl_->device;
}

at::Tensor BundleTensors::tensor(const BundleTensor& tensor) {
  const OwnWork guard;
  const auto dtype = scalar_type_from(tensor.dtype);
  if (!dtype) {
    throw UnsupportedError(impl_->bundle.path().string() + ": " + tensor.storage + ": the dtype " +
                           quoted(tensor.dtype) + " is not one that this build of Torch knows.");
  }
  const auto place = place_of(tensor.device);
  const auto& bytes = impl_->range(tensor.storage, place);
  auto view = at::empty({0}, at::TensorOptions().device(place).dtype(*dtype));
  // The bundle lacks bytes by which set_ would enlarge the storage.
  std::int64_t last = tensor.offset;
  bool is_empty = false;
  for (std::size_t d = 0; d < tensor.sizes.size(); ++d) {
    is_empty = is_empty || tensor.sizes[d] == 0;
    last += (tensor.sizes[d] - 1) * tensor.strides[d];
  }
  if (!is_empty && (last + 1) * static_cast<std::int64_t>(view.element_size()) > bytes.numel()) {
    throw FormatError(impl_->bundle.path().string() + ": a view of " + quoted(tensor.storage) +
                      " reaches beyond its " + std::to_string(bytes.numel()) + " bytes.");
  }
  view.set_(bytes.storage(), is_empty ? 0 : tensor.offset, tensor.sizes, tensor.strides);
  if (tensor.is_conjugate) view._set_conj(true);
  if (tensor.is_negative) view._set_neg(true);
  if (tensor.is_wrapped_number) view.unsafeGetTensorImpl()->set_wrapped_number(true);
  if (tensor.requires_grad) view.set_requires_grad(true);
  return view;
}

namespace {

/// Converts the bundle's values to the schema's types.
class ValueReader {
 public:
  ValueReader(const OpenBundle& bundle, at::Device device)
      : device_(device), tensors_(bundle, device) {}

  c10::IValue value(const BundleValue& value, const c10::TypePtr& type, const std::string& where) {
    switch (value.kind) {
      case BundleValueKind::none:
        return {};
      case BundleValueKind::undefined_tensor:
        return at::Tensor();
      case BundleValueKind::tensor:
        return tensors_.tensor(value.tensor);
      case BundleValueKind::boolean:
        return value.boolean;
      case BundleValueKind::integer:
        return value.integer;
      case BundleValueKind::real:
        return value.real;
      case BundleValueKind::complex:
        return c10::complex<double>(value.real, value.imaginary);
      case BundleValueKind::text:
        return value.text;
      case BundleValueKind::device:
        return tensors_.place_of(value.text);
      case BundleValueKind::list:
        return list(value, type, where);
      case BundleValueKind::tuple: {
        std::vector<c10::IValue> items;
        for (std::size_t i = 0; i < value.items.size(); ++i) {
          items.push_back(this->value(value.items[i], c10::AnyType::get(), item_of(where, i)));
        }
        return c10::ivalue::Tuple::create(std::move(items));
      }
      case BundleValueKind::unsupported:
        throw UnsupportedError(where + " could not be kept (" + value.text +
                               "): this call cannot be executed again.");
      default:
        throw UnsupportedError(where + " is not a value that an operator accepts.");
    }
  }

  c10::IValue dtype(const BundleValue& value, const std::string& where) {
    if (value.kind != BundleValueKind::text) return this->value(value, c10::AnyType::get(), where);
    const auto type = scalar_type_from(value.text);
    if (!type) {
      throw UnsupportedError(where + ": this build of Torch has no dtype " + quoted(value.text));
    }
    return static_cast<std::int64_t>(*type);
  }

  /// "" for a device whose generator cannot be used here.
  std::string generator_device(const std::string& recorded) const {
    if (recorded == "cpu") return recorded;
    return device_.is_cuda() ? device_.str() : "";
  }

  at::Generator generator(const BundleTensor& state) {
    auto generator = state.device == "cpu" && device_.is_cpu()
                         ? at::detail::createCPUGenerator()
                         : at::globalContext().defaultGenerator(device_).clone();
    generator.set_state(tensors_.tensor(state).cpu());
    return generator;
  }

  at::Tensor tensor(const BundleTensor& tensor) { return tensors_.tensor(tensor); }

 private:
  static std::string item_of(const std::string& where, std::size_t i) {
    return where + "[" + std::to_string(i) + "]";
  }

  c10::IValue list(const BundleValue& value, const c10::TypePtr& type, const std::string& where) {
    const auto list_type = without_optional(type)->cast<c10::ListType>();
    c10::TypePtr element = list_type ? list_type->getElementType() : c10::AnyType::get();
    if (element->kind() == c10::TypeKind::SymIntType) element = c10::IntType::get();
    c10::impl::GenericList items(element);
    for (std::size_t i = 0; i < value.items.size(); ++i) {
      items.push_back(this->value(value.items[i], element, item_of(where, i)));
    }
    return items;
  }

  at::Device device_;
  BundleTensors tensors_;
};

}  // namespace

OperatorCall operator_call_of(const OpenBundle& bundle, at::Device device) {
  const auto& recorded = bundle.bundle().operator_call;
  const auto file = bundle.path().string();
  if (!recorded) {
    throw UsageError(
        file + " holds no operator call, so there is nothing to execute. " +
        (bundle.bundle().kernel_call
             ? "It holds the call of a kernel: `python -m nanlocator.replay` executes it."
         : bundle.bundle().module_call
             ? "It holds a module call: nanlocator.replay.load in Python returns it."
             : "`nanlocator bundle show` prints its contents."));
  }
  OperatorCall call;
  call.name = operator_name_of(recorded->op);
  if (const auto& by = recorded->registered_by;
      !by.empty() && !c10::Dispatcher::singleton().findSchema(call.name)) {
    const auto& [module, library, source] = by.front();
    throw UnsupportedError(file + ": " + recorded->op + " is not registered in this process. " +
                           (module.empty() ? library : module) +
                           " registered it: `python -m nanlocator.replay` " +
                           (module.empty() || module.starts_with("__") ? "loads that with --trust."
                                                                       : "imports that."));
  }
  const auto& facts = call_facts(call.name);
  const auto& schema = facts.handle.schema();
  if (schema_text(schema) != recorded->schema) {
    throw UnsupportedError(file + ": " + recorded->op + " was recorded with the schema\n  " +
                           recorded->schema + "\nand is registered here with\n  " +
                           schema_text(schema) + "\nReplay it with the Torch that recorded it.");
  }
  if (recorded->arguments.size() != schema.arguments().size()) {
    throw FormatError(file + ": operator_call.arguments has " +
                      std::to_string(recorded->arguments.size()) + " values; " + recorded->op +
                      " takes " + std::to_string(schema.arguments().size()));
  }
  ValueReader reader(bundle, device);
  for (std::size_t i = 0; i < recorded->arguments.size(); ++i) {
    const auto& argument = schema.arguments()[i];
    const auto& value = recorded->arguments[i];
    const auto where = "argument " + quoted(argument.name()) + " of " + recorded->op;
    if (value.kind == BundleValueKind::generator) {
      const auto state = recorded->generator_states.find(generator_key(i));
      if (state == recorded->generator_states.end()) {
        throw FormatError(file + ": " + where + " is a generator, and its state is missing");
      }
      call.arguments.emplace_back(reader.generator(state->second));
    } else if (is_dtype(argument)) {
      call.arguments.push_back(reader.dtype(value, where));
    } else {
      call.arguments.push_back(reader.value(value, argument.type(), where));
    }
  }
  for (std::size_t i = 0; i < recorded->outputs.size(); ++i) {
    const auto& returns = schema.returns();
    const auto written = i - std::min(i, returns.size());
    const auto type = i < returns.size() ? returns[i].type()
                      : written < facts.written_unreturned.size()
                          ? schema.arguments()[facts.written_unreturned[written]].type()
                          : c10::TypePtr(c10::AnyType::get());
    const auto& output = recorded->outputs[i];
    // An output that could not be kept cannot be compared; the call can still be executed.
    call.outputs.push_back(
        output.kind == BundleValueKind::unsupported
            ? c10::IValue()
            : reader.value(output, type, "output " + std::to_string(i) + " of " + recorded->op));
  }
  for (const auto& [key, state] : recorded->generator_states) {
    if (key.rfind("argument.", 0) == 0) continue;
    if (const auto place = reader.generator_device(key); !place.empty()) {
      const OwnWork guard;
      call.generator_states[place] = reader.tensor(state).cpu();
    }
  }
  call.settings = bundle.bundle().settings;
  return call;
}

}  // namespace nanlocator::inline replay_room
