// Copies of data that a program may overwrite before the step that used them is executed again.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace nanlocator {

/// Bytes of its storage that a steady copy of `tensor` takes; 0 for what is not copied: weights and
/// whatever needs a gradient, wrappers, tensors without memory of their own, numbers of the
/// program.
[[nodiscard]] std::uint64_t steady_bytes(const at::Tensor& tensor);

/// The values of `tensor` as they are now on the current stream, in memory of its own, with the
/// same strides and alignment: kernels that depend on these compute the same bits. As work of our
/// own: no observer, dispatch mode or autograd sees it. `tensor` itself where it is not copied, or
/// no memory is left.
[[nodiscard]] at::Tensor steady_copy(const at::Tensor& tensor);

}  // namespace nanlocator
