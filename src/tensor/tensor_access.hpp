// What the scan can read of a Torch tensor, and how.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "nanlocator/scan/dtype.hpp"

namespace nanlocator::inline tensor_room {

/// The kernels' element type; empty for integers and floating-point types that they do not know.
[[nodiscard]] std::optional<DType> scanned_dtype(at::ScalarType type) noexcept;

/// "bfloat16", "int64"; Torch's own spelling ("QInt8") where a dtype has no Python name.
[[nodiscard]] std::string_view dtype_name(at::ScalarType type) noexcept;

/// False for meta tensors, wrapper subclasses (torch.Tensor._make_wrapper_subclass, as
/// TransformerEngine's QuantizedTensor), whose values lie elsewhere, and where the storage has been
/// freed under the tensor, as sharded data parallelism frees weights between their uses.
[[nodiscard]] bool has_memory(const at::Tensor& tensor);

/// Of a strided tensor with a storage: whether that holds all of its elements. Not so
/// where it was freed under it, as Megatron-Core frees the data of pipeline outputs that were sent.
[[nodiscard]] bool is_backed(const at::Tensor& tensor);

/// The byte of its storage behind the last element of a strided tensor.
[[nodiscard]] std::int64_t end_in_storage(const at::Tensor& tensor);

/// The device's current stream is being captured into a CUDA graph: what is enqueued runs at each
/// replay, and nothing may wait or allocate. Does not initialise a device.
[[nodiscard]] bool is_captured(at::Device device) noexcept;

/// Why the tensor cannot be scanned; nullptr where it can: strided or sparse COO, of floating point
/// or complex, and with memory.
[[nodiscard]] const char* why_not_scannable(const at::Tensor& tensor);

/// Throws UnsupportedError. `what` names the tensor: "the gradient of 'layers.0.weight'".
[[noreturn]] void refuse(const at::Tensor& tensor, const std::string& what, const char* reason);

/// A strided tensor's elements as real numbers (complex: one more dimension, of size 2). Shares the
/// memory, but for a pending conjugation or negation, which is carried out on a copy.
[[nodiscard]] at::Tensor as_real(const at::Tensor& tensor);

}  // namespace nanlocator::inline tensor_room
