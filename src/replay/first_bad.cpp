#include "replay/first_bad.hpp"

#include <utility>

#include "nanlocator/record/sighting.hpp"
#include "tensor/observed_tensor.hpp"

namespace nanlocator::inline replay_room {
namespace {

/// The index that broadcasts to `bad`; empty if the shapes do not broadcast.
std::optional<std::vector<std::int64_t>> broadcast_index(const at::Tensor& input,
                                                         const FirstBad& bad) {
  const auto dimensions = static_cast<std::size_t>(input.dim());
  if (dimensions > bad.index.size()) return std::nullopt;
  const std::size_t skipped = bad.index.size() - dimensions;
  std::vector<std::int64_t> index;
  for (std::size_t d = 0; d < dimensions; ++d) {
    const std::int64_t size = input.size(static_cast<std::int64_t>(d));
    if (size != 1 && size != bad.shape[skipped + d]) return std::nullopt;
    index.push_back(size == 1 ? 0 : bad.index[skipped + d]);
  }
  return index;
}

std::optional<std::vector<std::int64_t>> first_bad_index(const at::Tensor& input) {
  const at::Tensor values = values_of(input);
  if (!values.defined()) return std::nullopt;
  const TensorStats stats = stats_of(values, 1);
  if (stats.is_finite()) return std::nullopt;
  return unravel_index(stats.first_bad, values.sizes().vec());
}

}  // namespace

std::optional<InputElement> element_at_first_bad(const at::Tensor& input, const FirstBad& bad) {
  if (input.numel() == 0 || (input.is_complex() && !bad.is_pointwise)) return std::nullopt;
  auto index = bad.is_pointwise ? broadcast_index(input, bad) : first_bad_index(input);
  if (!index) return std::nullopt;
  at::Tensor element = input.detach();
  for (const std::int64_t position : *index) element = element.select(0, position);
  if (element.is_complex()) element = element.abs();
  return InputElement{std::move(*index), element.to(at::kDouble).item<double>()};
}

}  // namespace nanlocator::inline replay_room
