// The worst value in a tensor, without counts.
#pragma once

#include <cstdint>

#include "nanlocator/scan/tensor_stats.hpp"
#include "nanlocator/scan/tensor_view.hpp"

namespace nanlocator::inline scan_room {

/// The worst class of value in a tensor; `inf` has either sign. Ordered, so that std::max combines
/// two tensors.
enum class Content : std::uint8_t { finite, inf, nan };

[[nodiscard]] constexpr Content content_of(const TensorStats& stats) noexcept {
  if (stats.nan > 0) return Content::nan;
  return stats.is_finite() ? Content::finite : Content::inf;
}

/// Scans host memory on the calling thread, like has_nonfinite, but reads on until it finds a NaN.
/// Throws UsageError or UnsupportedError for an unusable view.
[[nodiscard]] Content content_of(const TensorView& tensor);

}  // namespace nanlocator::inline scan_room
