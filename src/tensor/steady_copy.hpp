// Copies of data that a program may overwrite before the step that used them is executed again.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace nanlocator::inline tensor_room {

/// Bytes of its storage that a steady copy of `tensor` takes; 0 for what is not copied: weights and
/// whatever needs a gradient, wrappers, tensors without memory of their own, numbers of the
/// program.
[[nodiscard]] std::uint64_t steady_bytes(const at::Tensor& tensor);

/// The values of `tensor` as they are now on the current stream, in memory of its own, with the
/// same strides and at the same place between two multiples of 64 bytes: kernels that depend on
/// these compute the same bits. As work of our
/// own: no observer, dispatch mode or autograd sees it. `tensor` itself where it is not copied, or
/// no memory is left.
[[nodiscard]] at::Tensor steady_copy(const at::Tensor& tensor);

/// `copy` of each, of the same tensor once; of different ones that share a storage none, as what is
/// written to one of them is to be seen in the other.
[[nodiscard]] std::vector<at::Tensor> steady_together(
    const std::vector<at::Tensor>& tensors,
    const std::function<at::Tensor(const at::Tensor&)>& copy);

/// Some of its elements, in memory of their own, for `has_content`: of what is too large for a
/// copy. Undefined where there is nothing to scan. Does not wait for the device.
[[nodiscard]] at::Tensor content_sample(const at::Tensor& tensor);
/// Whether these elements still hold the same bits; true where there is no sample.
[[nodiscard]] bool has_content(const at::Tensor& tensor, const at::Tensor& sample);

}  // namespace nanlocator::inline tensor_room
