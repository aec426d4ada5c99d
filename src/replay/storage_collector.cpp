// StorageCollector: which bytes go into tensors.safetensors, and their names.

#include <set>
#include <string>

#include "files/text.hpp"
#include "nanlocator/replay/operator_call.hpp"
#include "replay/storage_ranges.hpp"
#include "replay/values.hpp"
#include "tensor/dtypes.hpp"
#include "tensor/own_work.hpp"
#include "tensor/tensor_access.hpp"

namespace nanlocator::inline replay_room {
namespace {

// Until `finish` knows the ranges, a BundleTensor names its tensor by its position.
constexpr char kPlaceholder = '#';

BundleValue unsupported(std::string what) {
  BundleValue value;
  value.kind = BundleValueKind::unsupported;
  value.text = std::move(what);
  return value;
}

std::string described(const at::Tensor& tensor) {
  std::string text = "tensor " + std::string(torch_name(tensor.scalar_type()));
  if (tensor.is_nested()) return text;
  return text + " " + describe_shape(tensor.sizes());
}

bool is_row_major_range(const at::Tensor& tensor, const ByteRange& range) {
  return tensor.is_contiguous() &&
         range.end - range.begin ==
             tensor.numel() * static_cast<std::int64_t>(tensor.element_size());
}

}  // namespace

struct StorageCollector::Impl {
  std::vector<at::Tensor> tensors;
  std::vector<std::string> names;
  std::vector<at::Tensor> host_copies;  // bytes of device memory
  CameFrom came_from;
  std::vector<StorageRange> ranges;  // keep alive the host memory of the contents

  BundleTensor placeholder(const at::Tensor& tensor, std::string_view name) {
    BundleTensor result;
    result.storage = kPlaceholder + std::to_string(tensors.size());
    result.dtype = torch_name(tensor.scalar_type());
    result.sizes = tensor.sizes().vec();
    result.strides = tensor.strides().vec();
    const auto origin = came_from.find(tensor.storage().unsafeGetStorageImpl());
    result.device = (origin == came_from.end() ? tensor.device() : origin->second).str();
    result.is_wrapped_number = tensor.unsafeGetTensorImpl()->is_wrapped_number();
    result.is_conjugate = tensor.is_conj();
    result.is_negative = tensor.is_neg();
    result.requires_grad = tensor.requires_grad();
    tensors.push_back(tensor);
    names.emplace_back(name);
    return result;
  }

  std::string unique_name(const std::string& wanted, std::set<std::string>& taken) const {
    auto name = wanted;
    for (int n = 2; !taken.insert(name).second; ++n) name = wanted + "." + std::to_string(n);
    return name;
  }

  std::span<const std::byte> host_bytes(const StorageRange& range) {
    const auto size = static_cast<std::size_t>(range.bytes.end - range.bytes.begin);
    if (size == 0) return {};
    const OwnWork guard;
    auto bytes = bytes_of(range);
    if (!bytes.is_cpu()) {
      bytes = bytes.cpu();
      host_copies.push_back(bytes);
    }
    return {static_cast<const std::byte*>(bytes.const_data_ptr()), size};
  }

  SafetensorsEntry entry_for(const StorageRange& range, std::string name) {
    SafetensorsEntry entry;
    entry.name = std::move(name);
    entry.bytes = host_bytes(range);
    const auto& first = tensors[range.tensors.front()];
    bool have_one_dtype = true;
    for (const auto i : range.tensors) {
      have_one_dtype = have_one_dtype && tensors[i].scalar_type() == first.scalar_type();
    }
    if (have_one_dtype) entry.dtype = safetensors_dtype(torch_name(first.scalar_type()));
    if (entry.dtype.empty()) {
      entry.dtype = "U8";
      entry.shape = {static_cast<std::int64_t>(entry.bytes.size())};
    } else if (range.tensors.size() == 1 && is_row_major_range(first, range.bytes)) {
      entry.shape = first.sizes().vec();
    } else {
      entry.shape = {static_cast<std::int64_t>(entry.bytes.size() / first.element_size())};
    }
    return entry;
  }
};

StorageCollector::StorageCollector() : impl_(std::make_unique<Impl>()) {}
StorageCollector::~StorageCollector() = default;

void StorageCollector::note(const CameFrom& came_from) {
  impl_->came_from.insert(came_from.begin(), came_from.end());
}

BundleValue StorageCollector::add(const at::Tensor& tensor, std::string_view name) {
  BundleValue value;
  if (!tensor.defined()) {
    value.kind = BundleValueKind::undefined_tensor;
    return value;
  }
  if (const auto why = why_not_plain(tensor); !why.empty()) {
    return unsupported(described(tensor) + ": " + why);
  }
  if (torch_name(tensor.scalar_type()).empty()) {
    return unsupported(described(tensor) + ": its dtype cannot be kept");
  }
  if (!is_backed(tensor)) {
    return unsupported(described(tensor) + ": its memory has been freed");
  }
  value.kind = BundleValueKind::tensor;
  value.tensor = impl_->placeholder(tensor, name);
  return value;
}

BundleValue StorageCollector::add(const c10::IValue& value, std::string_view name) {
  BundleValue result;
  const auto of_kind = [&](BundleValueKind kind) -> BundleValue& {
    result.kind = kind;
    return result;
  };
  if (value.isNone()) return result;
  if (value.isTensor()) return add(value.toTensor(), name);
  if (value.isBool()) {
    of_kind(BundleValueKind::boolean).boolean = value.toBool();
  } else if (value.isInt()) {
    of_kind(BundleValueKind::integer).integer = value.toInt();
  } else if (value.isDouble()) {
    of_kind(BundleValueKind::real).real = value.toDouble();
  } else if (value.isComplexDouble()) {
    const auto number = value.toComplexDouble();
    of_kind(BundleValueKind::complex).real = number.real();
    result.imaginary = number.imag();
  } else if (value.isString()) {
    of_kind(BundleValueKind::text).text = value.toStringRef();
  } else if (value.isDevice()) {
    of_kind(BundleValueKind::device).text = value.toDevice().str();
  } else if (value.isGenerator()) {
    of_kind(BundleValueKind::generator);
  } else if (value.isList() || value.isTuple()) {
    of_kind(value.isList() ? BundleValueKind::list : BundleValueKind::tuple);
    const auto items = value.isList() ? value.toListRef()
                                      : c10::ArrayRef<c10::IValue>(value.toTupleRef().elements());
    for (std::size_t i = 0; i < items.size(); ++i) {
      result.items.push_back(add(items[i], std::string(name) + "." + std::to_string(i)));
    }
  } else {
    return unsupported("a value of the kind " + value.tagKind());
  }
  return result;
}

BundleContents StorageCollector::finish(Bundle& bundle) {
  auto [ranges, range_of] = storage_ranges(impl_->tensors);
  BundleContents contents;
  std::set<std::string> taken;
  for (const auto& range : ranges) {
    const auto& wanted = impl_->names[range.tensors.front()];
    contents.storages.push_back(impl_->entry_for(range, impl_->unique_name(wanted, taken)));
  }
  const auto complete = [&](BundleTensor& tensor) {
    if (tensor.storage.empty() || tensor.storage.front() != kPlaceholder) return;
    const auto i = static_cast<std::size_t>(std::stoul(tensor.storage.substr(1)));
    const auto& live = impl_->tensors.at(i);
    const auto& range = ranges[range_of[i]];
    const auto item = static_cast<std::int64_t>(live.element_size());
    tensor.storage = contents.storages[range_of[i]].name;
    tensor.offset = live.numel() == 0 ? 0 : live.storage_offset() - range.bytes.begin / item;
  };
  for_each_bundle_tensor(bundle, complete);
  impl_->ranges = std::move(ranges);
  // A device's bytes are now in host memory.
  std::erase_if(impl_->ranges,
                [](const StorageRange& range) { return !range.storage.device().is_cpu(); });
  impl_->tensors.clear();
  return contents;
}

void for_each_bundle_tensor(BundleValue& value, const std::function<void(BundleTensor&)>& visit) {
  if (value.kind == BundleValueKind::tensor) visit(value.tensor);
  for (auto& item : value.items) for_each_bundle_tensor(item, visit);
}

void for_each_bundle_tensor(Bundle& bundle, const std::function<void(BundleTensor&)>& visit) {
  const auto visit_all = [&](std::vector<BundleValue>& values) {
    for (auto& value : values) for_each_bundle_tensor(value, visit);
  };
  if (auto& call = bundle.operator_call) {
    visit_all(call->arguments);
    visit_all(call->outputs);
    for (auto& [_, state] : call->generator_states) visit(state);
  }
  if (auto& call = bundle.module_call) {
    visit_all(call->arguments);
    for (auto& [_, value] : call->keywords) for_each_bundle_tensor(value, visit);
    for_each_bundle_tensor(call->outputs, visit);
    for (auto& [_, weight] : call->weights) visit(weight);
    visit_all(call->grad_outputs);
    visit_all(call->grad_inputs);
  }
  if (auto& call = bundle.kernel_call) {
    visit_all(call->arguments);
    for (auto& [_, value] : call->keywords) for_each_bundle_tensor(value, visit);
    visit_all(call->launch);
    visit_all(call->arguments_after);
    visit_all(call->results);
  }
}

}  // namespace nanlocator::inline replay_room
