// tensors.safetensors and bundle.json, both any bytes: either a FormatError, or a bundle whose
// every view lies within its storage and which is written again as it was read.
//
// The input: four bytes for the size of the first file, little-endian, the first file, the second.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string_view>

#include "nanlocator/error.hpp"
#include "record/bundle_json.hpp"
#include "record/element_types.hpp"

namespace nanlocator {
namespace {

/// Reads the first and the last byte of the view.
void touch(const BundleTensor& tensor, const SafetensorsFile& tensors) {
  const auto bytes = tensors.at(tensor.storage).bytes;
  const auto size = static_cast<std::int64_t>(torch_element_size(tensor.dtype));
  std::int64_t last = tensor.offset;
  for (std::size_t axis = 0; axis < tensor.sizes.size(); ++axis) {
    if (tensor.sizes[axis] == 0) return;
    last += (tensor.sizes[axis] - 1) * tensor.strides[axis];
  }
  volatile std::byte seen = bytes.data()[tensor.offset * size];
  seen = bytes.data()[last * size + size - 1];
  if (seen != bytes[static_cast<std::size_t>(last * size + size - 1)]) std::abort();
}

void touch(const BundleValue& value, const SafetensorsFile& tensors) {
  if (value.kind == BundleValueKind::tensor) touch(value.tensor, tensors);
  for (const auto& item : value.items) touch(item, tensors);
}

void touch_all(const Bundle& bundle, const SafetensorsFile& tensors) {
  const auto touch_each = [&](const std::vector<BundleValue>& values) {
    for (const auto& value : values) touch(value, tensors);
  };
  if (bundle.operator_call) {
    touch_each(bundle.operator_call->arguments);
    touch_each(bundle.operator_call->outputs);
    for (const auto& [device, state] : bundle.operator_call->generator_states) {
      touch(state, tensors);
    }
  }
  if (!bundle.module_call) return;
  touch_each(bundle.module_call->arguments);
  for (const auto& [name, value] : bundle.module_call->keywords) touch(value, tensors);
  touch(bundle.module_call->outputs, tensors);
  for (const auto& [name, tensor] : bundle.module_call->weights) touch(tensor, tensors);
  touch_each(bundle.module_call->grad_outputs);
  touch_each(bundle.module_call->grad_inputs);
}

void read_and_write_again(std::span<const std::byte> tensor_bytes, std::string_view json) {
  const SafetensorsFile tensors(tensor_bytes, "tensors.safetensors");
  const BundleText read = read_bundle_json(json, "bundle.json", tensors);
  touch_all(read.bundle, tensors);
  BundleContents contents;
  contents.storages = tensors.entries();
  for (const auto& [name, checksum] : read.file_checksums) contents.files.emplace_back(name, "");
  const std::string once = bundle_to_json(read.bundle, contents);
  const std::string twice =
      bundle_to_json(read_bundle_json(once, "bundle.json", tensors).bundle, contents);
  if (once != twice) std::abort();
}

}  // namespace
}  // namespace nanlocator

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::uint32_t tensor_size = 0;
  if (size < sizeof tensor_size) return 0;
  std::memcpy(&tensor_size, data, sizeof tensor_size);
  const auto rest = std::span(data, size).subspan(sizeof tensor_size);
  if (tensor_size > rest.size()) return 0;
  const auto json = rest.subspan(tensor_size);
  try {
    nanlocator::read_and_write_again(std::as_bytes(rest.first(tensor_size)),
                                     {reinterpret_cast<const char*>(json.data()), json.size()});
  } catch (const nanlocator::FormatError&) {
  }
  return 0;
}
