#include "tensor/steady_copy.hpp"

#include <ATen/ops/clone.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/set.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <unordered_set>

#include "tensor/observed_tensor.hpp"
#include "tensor/own_work.hpp"
#include "tensor/tensor_access.hpp"

namespace nanlocator::inline tensor_room {
namespace {

constexpr std::int64_t kAlignment = 64;  // guaranteed by Torch's allocators

/// Its offset from a multiple of kAlignment; a separate allocation has offset 0.
std::int64_t misalignment_of(const at::Tensor& tensor) {
  return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()) %
                                   kAlignment);
}

struct Span {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

Span span_of(const at::Tensor& tensor) {
  const auto item = static_cast<std::int64_t>(tensor.element_size());
  return {tensor.storage_offset() * item, end_in_storage(tensor)};
}

at::Tensor over(const c10::Storage& storage, const at::Tensor& like, at::ScalarType dtype,
                std::int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  at::Tensor tensor = at::empty({0}, like.options().dtype(dtype).requires_grad(false));
  return tensor.set_(storage, offset, sizes, strides);
}

}  // namespace

std::uint64_t steady_bytes(const at::Tensor& tensor) {
  if (!has_own_memory(tensor) || tensor.requires_grad()) return 0;
  if (tensor.is_conj() || tensor.is_neg() || tensor.is_quantized()) return 0;
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number() || !is_backed(tensor)) return 0;
  if (!tensor.device().is_cpu() && !tensor.device().is_cuda()) return 0;
  const Span span = span_of(tensor);
  return static_cast<std::uint64_t>(span.end - span.begin);
}

at::Tensor steady_copy(const at::Tensor& tensor) {
  if (steady_bytes(tensor) == 0) return tensor;
  const OwnWork own_work;
  const auto [begin, end] = span_of(tensor);
  const auto item = static_cast<std::int64_t>(tensor.element_size());
  const std::int64_t before = misalignment_of(tensor) / item * item;
  try {
    const at::Tensor bytes =
        at::empty({before + end - begin}, tensor.options().dtype(at::kByte).requires_grad(false));
    if (tensor.device().is_cpu()) {
      std::memcpy(static_cast<std::byte*>(bytes.mutable_data_ptr()) + before,
                  static_cast<const std::byte*>(tensor.storage().data()) + begin,
                  static_cast<std::size_t>(end - begin));
    } else {
      over(bytes.storage(), tensor, at::kByte, before, {end - begin}, {1})
          .copy_(over(tensor.storage(), tensor, at::kByte, begin, {end - begin}, {1}));
    }
    return over(bytes.storage(), tensor, tensor.scalar_type(), before / item, tensor.sizes(),
                tensor.strides());
  } catch (const c10::Error&) {  // no memory
    return tensor;
  }
}

/// A view of the bytes of at most `kSampled` elements, evenly spaced in its memory.
static at::Tensor sampled_bytes(const at::Tensor& tensor) {
  constexpr std::int64_t kSampled = 64;
  const auto [begin, end] = span_of(tensor);
  const auto item = static_cast<std::int64_t>(tensor.element_size());
  const std::int64_t elements = (end - begin) / item;
  const std::int64_t count = std::min(elements, kSampled);
  const std::int64_t step = count < 2 ? 1 : (elements - 1) / (count - 1);
  return over(tensor.storage(), tensor, at::kByte, begin, {count, item}, {step * item, 1});
}

at::Tensor content_sample(const at::Tensor& tensor) {
  if (steady_bytes(tensor) == 0) return {};
  const OwnWork own_work;
  return sampled_bytes(tensor).clone();
}

bool has_content(const at::Tensor& tensor, const at::Tensor& sample) {
  if (!sample.defined() || steady_bytes(tensor) == 0) return true;
  const OwnWork own_work;
  return at::equal(sampled_bytes(tensor), sample);
}

std::vector<at::Tensor> steady_together(const std::vector<at::Tensor>& tensors,
                                        const std::function<at::Tensor(const at::Tensor&)>& copy) {
  std::unordered_map<const c10::StorageImpl*, std::size_t>
      first;  // the first tensor with this storage
  std::vector<at::Tensor> copies;
  std::unordered_set<const c10::StorageImpl*> shared;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (steady_bytes(tensors[i]) == 0) continue;
    const auto* storage = tensors[i].storage().unsafeGetStorageImpl();
    const auto [known, is_new] = first.emplace(storage, i);
    if (!is_new && !tensors[known->second].is_same(tensors[i])) shared.insert(storage);
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    const bool is_copied = steady_bytes(tensor) != 0;
    const auto* storage = is_copied ? tensor.storage().unsafeGetStorageImpl() : nullptr;
    if (!is_copied || shared.contains(storage)) {
      copies.push_back(tensor);
    } else if (first.at(storage) < i) {
      copies.push_back(copies[first.at(storage)]);
    } else {
      copies.push_back(copy(tensor));
    }
  }
  return copies;
}

}  // namespace nanlocator::inline tensor_room
