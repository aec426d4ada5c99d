// What is in a tensor, where its counts are not asked for.
#pragma once

#include <cstdint>

#include "nanlocator/scan/tensor_stats.hpp"
#include "nanlocator/scan/tensor_view.hpp"

namespace nanlocator::inline scan_room {

/// The worst that a tensor holds; `inf` is of either sign. Ordered: std::max is of both together.
enum class Content : std::uint8_t { finite, inf, nan };

[[nodiscard]] constexpr Content content_of(const TensorStats& stats) noexcept {
  if (stats.nan > 0) return Content::nan;
  return stats.is_finite() ? Content::finite : Content::inf;
}

/// Of host memory, on the calling thread: as has_nonfinite, but it reads on until it meets a NaN.
/// Throws UsageError or UnsupportedError for a view that cannot be used.
[[nodiscard]] Content content_of(const TensorView& tensor);

}  // namespace nanlocator::inline scan_room
