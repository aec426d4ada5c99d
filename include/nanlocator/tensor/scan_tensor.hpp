// Synchronous stats of Torch tensors in host memory. For tests, benchmarks and one-off scans;
// training uses GradientScanner, which does not wait.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "nanlocator/scan/tensor_stats.hpp"
#include "nanlocator/scan/tensor_view.hpp"

namespace nanlocator::inline tensor_room {

/// The scan room's view of `tensor` (floating-point or complex, strided layout, any strides); a
/// complex tensor as its real view. Throws UnsupportedError for other dtypes and layouts. The
/// tensor must outlive the view.
[[nodiscard]] TensorView view_of(const at::Tensor& tensor);

/// `result[i]` belongs to `tensors[i]`; a complex tensor counts its real and imaginary parts as
/// elements. Also throws UnsupportedError if a tensor is not in host memory.
[[nodiscard]] std::vector<TensorStats> scan_tensors(const std::vector<at::Tensor>& tensors,
                                                    int threads = 1);

}  // namespace nanlocator::inline tensor_room
