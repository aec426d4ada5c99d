// Which Torch tensors the scan can read, and how.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "nanlocator/scan/dtype.hpp"

namespace nanlocator::inline tensor_room {

/// The kernels' element type; empty for integers and unknown floating-point types.
[[nodiscard]] std::optional<DType> scanned_dtype(at::ScalarType type) noexcept;

/// "bfloat16", "int64"; Torch's own spelling ("QInt8") if a dtype has no Python name.
[[nodiscard]] std::string_view dtype_name(at::ScalarType type) noexcept;

/// False for meta tensors, for wrapper subclasses (torch.Tensor._make_wrapper_subclass, as
/// TransformerEngine's QuantizedTensor), whose values are elsewhere, and if the storage has been
/// freed under the tensor, as sharded data parallelism frees weights between uses.
[[nodiscard]] bool has_memory(const at::Tensor& tensor);

/// For a strided tensor with a storage: whether that holds all of its elements. False if it was
/// freed under the tensor, as Megatron-Core frees the data of pipeline outputs that were sent.
[[nodiscard]] bool is_backed(const at::Tensor& tensor);

/// The number of writes to it; 0 for an inference tensor, whose writes are not counted.
[[nodiscard]] inline std::uint32_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : tensor._version();
}

/// The offset in its storage of the byte behind the last element of a strided tensor.
[[nodiscard]] std::int64_t end_in_storage(const at::Tensor& tensor);

/// The device's current stream is being captured into a CUDA graph: enqueued work runs at each
/// replay, and nothing may wait or allocate. Does not initialise a device.
[[nodiscard]] bool is_captured(at::Device device) noexcept;

/// Why the tensor cannot be scanned; nullptr if it can: strided or sparse COO, floating-point or
/// complex, and with memory.
[[nodiscard]] const char* why_not_scannable(const at::Tensor& tensor);

/// Throws UnsupportedError. `what` names the tensor: "the gradient of 'layers.0.weight'".
[[noreturn]] void refuse(const at::Tensor& tensor, const std::string& what, const char* reason);

/// A strided tensor's elements as real numbers (complex: one more dimension, of size 2). Shares the
/// memory, unless a pending conjugation or negation requires a copy.
[[nodiscard]] at::Tensor as_real(const at::Tensor& tensor);

}  // namespace nanlocator::inline tensor_room
