#include "tensor/steady_copy.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/set.h>
#include <c10/util/Exception.h>

#include <cstring>

#include "tensor/observed_tensor.hpp"
#include "tensor/own_work.hpp"
#include "tensor/tensor_access.hpp"

namespace nanlocator {
namespace {

constexpr std::int64_t kAlignment = 64;  // of what Torch's allocators hand out, at least

struct Span {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

/// From the last aligned byte before its first element.
Span span_of(const at::Tensor& tensor) {
  const auto item = static_cast<std::int64_t>(tensor.element_size());
  const std::int64_t begin = tensor.storage_offset() * item;
  return {begin - begin % kAlignment, end_in_storage(tensor)};
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
  try {
    const at::Tensor bytes =
        at::empty({end - begin}, tensor.options().dtype(at::kByte).requires_grad(false));
    if (tensor.device().is_cpu()) {
      std::memcpy(bytes.mutable_data_ptr(),
                  static_cast<const std::byte*>(tensor.storage().data()) + begin,
                  static_cast<std::size_t>(end - begin));
    } else {
      bytes.copy_(over(tensor.storage(), tensor, at::kByte, begin, {end - begin}, {1}));
    }
    const auto item = static_cast<std::int64_t>(tensor.element_size());
    return over(bytes.storage(), tensor, tensor.scalar_type(),
                tensor.storage_offset() - begin / item, tensor.sizes(), tensor.strides());
  } catch (const c10::Error&) {  // no memory
    return tensor;
  }
}

}  // namespace nanlocator
