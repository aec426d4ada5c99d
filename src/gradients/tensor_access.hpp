// What the scan can read of a Torch tensor, and how.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <string_view>

#include "nanlocator/scan/dtype.hpp"

namespace nanlocator {

/// The kernels' element type; empty for integers and floating-point types that they do not know.
[[nodiscard]] std::optional<DType> scanned_dtype(at::ScalarType type) noexcept;

/// "bfloat16", "complex64"; Torch's own spelling ("Long") for what cannot be scanned.
[[nodiscard]] std::string_view dtype_name(at::ScalarType type) noexcept;

/// Throws UnsupportedError unless the tensor is strided or sparse COO, of floating point or
/// complex, and has memory. `what` names it in the message: "parameter 'layers.0.weight'".
void require_scannable(const at::Tensor& tensor, const std::string& what);

/// A strided tensor's elements as real numbers (complex: one more dimension, of size 2). Shares the
/// memory, but for a pending conjugation or negation, which is carried out on a copy.
[[nodiscard]] at::Tensor as_real(const at::Tensor& tensor);

}  // namespace nanlocator
