// The result of every scan, on every backend: what one pass over a tensor's memory finds.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

namespace nanlocator::inline scan_room {

/// Statistics of one tensor. Additive: `merge` combines the stats of a tensor's parts.
///
/// Finite minima and maxima cover the finite elements, zeros included. Without a finite element
/// they keep their empty values (`has_finite()` is false).
struct TensorStats {
  std::int64_t numel = 0;
  std::int64_t nan = 0;
  std::int64_t pos_inf = 0;
  std::int64_t neg_inf = 0;
  std::int64_t zeros = 0;       // +0 and -0
  std::int64_t first_bad = -1;  // flat row-major index of the first NaN or Inf, or -1
  double finite_min = std::numeric_limits<double>::infinity();
  double finite_max = -std::numeric_limits<double>::infinity();
  double absmin = std::numeric_limits<double>::infinity();  // smallest |finite|
  double absmax = 0.0;                                      // largest |finite|
  double sum_of_squares = 0.0;  // of the finite elements, in fp64; the order of addition depends on
                                // numel and dtype only
  std::uint64_t fingerprint = 0;  // see fingerprint.hpp

  [[nodiscard]] constexpr std::int64_t nonfinite() const noexcept {
    return nan + pos_inf + neg_inf;
  }
  [[nodiscard]] constexpr bool is_finite() const noexcept { return nonfinite() == 0; }
  [[nodiscard]] constexpr bool has_finite() const noexcept { return numel > nonfinite(); }

  friend bool operator==(const TensorStats&, const TensorStats&) = default;
};

/// Row-major multi-dimensional index of a flat index; empty for a scalar.
[[nodiscard]] std::vector<std::int64_t> unravel_index(std::int64_t flat,
                                                      const std::vector<std::int64_t>& shape);

}  // namespace nanlocator::inline scan_room
