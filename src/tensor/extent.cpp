#include "tensor/extent.hpp"

#include <ATen/ops/any.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/lt.h>

#include <algorithm>
#include <vector>

#include "tensor/own_work.hpp"
#include "tensor/tensor_access.hpp"

namespace nanlocator::inline tensor_room {
namespace {

/// Elements per slice: masks and copies of them take about 2 MB.
constexpr std::int64_t kSlice = std::int64_t{1} << 18;
/// No extent is computed for larger tensors: this takes about a tenth of a second on one core.
constexpr std::int64_t kLargest = std::int64_t{1} << 26;

/// Calls `visit(slice, dimension, start)` for slices along the longest dimension.
template <typename Visit>
void for_each_slice(const at::Tensor& tensor, const Visit& visit) {
  const auto sizes = tensor.sizes();
  if (sizes.empty()) return visit(tensor, 0, 0);
  const auto longest = std::max_element(sizes.begin(), sizes.end()) - sizes.begin();
  const std::int64_t length = sizes[static_cast<std::size_t>(longest)];
  const std::int64_t step = std::max<std::int64_t>(1, kSlice / (tensor.numel() / length));
  for (std::int64_t start = 0; start < length; start += step) {
    visit(tensor.narrow(longest, start, std::min(step, length - start)), longest, start);
  }
}

/// 8-bit floats have no kernels that compare.
at::Tensor comparable(const at::Tensor& values) {
  return values.element_size() == 1 ? values.to(at::kFloat) : values;
}

/// The indices of `dimension` at which the mask has anything set, in host memory.
at::Tensor any_along(const at::Tensor& mask, std::int64_t dimension) {
  std::vector<std::int64_t> others;
  for (std::int64_t d = 0; d < mask.dim(); ++d) {
    if (d != dimension) others.push_back(d);
  }
  return (others.empty() ? mask : at::any(mask, others)).cpu().contiguous();
}

}  // namespace

std::optional<BadExtent> extent_of(const at::Tensor& observable, std::int64_t bad) {
  if (bad == 0 || observable.numel() == 0 || observable.numel() > kLargest) return std::nullopt;
  const OwnWork own_work;
  const at::Tensor values = as_real(observable.detach());
  const auto dimensions = static_cast<std::size_t>(values.dim());
  std::vector<std::vector<bool>> is_bad_at(dimensions);
  for (std::size_t d = 0; d < dimensions; ++d) {
    is_bad_at[d].resize(static_cast<std::size_t>(values.size(static_cast<std::int64_t>(d))));
  }
  for_each_slice(values, [&](const at::Tensor& slice, std::int64_t sliced, std::int64_t start) {
    const at::Tensor mask = at::isfinite(comparable(slice)).logical_not();
    for (std::int64_t d = 0; d < slice.dim(); ++d) {
      const at::Tensor any = any_along(mask, d);
      const bool* flags = any.const_data_ptr<bool>();
      const std::int64_t offset = d == sliced ? start : 0;
      auto& at_d = is_bad_at[static_cast<std::size_t>(d)];
      for (std::int64_t i = 0; i < any.numel(); ++i) {
        if (flags[i]) at_d[static_cast<std::size_t>(offset + i)] = true;
      }
    }
  });
  BadExtent extent;
  std::int64_t block = 1;
  for (const auto& at_d : is_bad_at) {
    const auto first = std::find(at_d.begin(), at_d.end(), true);
    if (first == at_d.end()) return std::nullopt;  // it has changed since it was counted
    const auto last = std::find(at_d.rbegin(), at_d.rend(), true);
    const auto count = std::count(at_d.begin(), at_d.end(), true);
    extent.dimensions.push_back(
        {.first = first - at_d.begin(), .last = at_d.rend() - last - 1, .count = count});
    block *= count;
  }
  extent.is_block = bad == block;
  return extent;
}

std::optional<std::int64_t> count_negatives(const at::Tensor& observable) {
  if (observable.numel() > kLargest || observable.is_complex()) return std::nullopt;
  const OwnWork own_work;
  std::int64_t negatives = 0;
  for_each_slice(observable.detach(), [&](const at::Tensor& slice, std::int64_t, std::int64_t) {
    negatives += at::lt(comparable(slice), 0).sum().item<std::int64_t>();
  });
  return negatives;
}

}  // namespace nanlocator::inline tensor_room
