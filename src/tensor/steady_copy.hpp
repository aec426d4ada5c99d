// Copies of data that a program may overwrite before the step that used them is executed again.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace nanlocator::inline tensor_room {

/// Bytes of its storage that a steady copy of `tensor` takes. 0 for tensors that are not copied:
/// weights and whatever requires a gradient, wrappers, tensors without memory of their own, numbers
/// of the program.
[[nodiscard]] std::uint64_t steady_bytes(const at::Tensor& tensor);

/// The values of `tensor`, as of now on the current stream, in separate memory with the same
/// strides and the same address modulo 64 bytes, so that kernels that depend on these compute the
/// same bits. Hidden from observers, dispatch modes and autograd. Returns `tensor` itself if it is
/// not copied or no memory is left.
[[nodiscard]] at::Tensor steady_copy(const at::Tensor& tensor);

/// `copy` of each tensor, once per tensor. Different tensors that share a storage are not copied,
/// because a write to one must be visible in the other.
[[nodiscard]] std::vector<at::Tensor> steady_together(
    const std::vector<at::Tensor>& tensors,
    const std::function<at::Tensor(const at::Tensor&)>& copy);

/// A copy of some of its elements, for `has_content`, if it is too large to copy. Undefined if
/// there is nothing to scan. Does not wait for the device.
[[nodiscard]] at::Tensor content_sample(const at::Tensor& tensor);
/// Whether these elements still hold the same bits; true if there is no sample.
[[nodiscard]] bool has_content(const at::Tensor& tensor, const at::Tensor& sample);

}  // namespace nanlocator::inline tensor_room
