// The plain scan against which the fast ones are tested: element by element, in logical order,
// values by ldexp from the formats' definitions, squares summed in long double. Host memory only;
// uses none of the scan room's arithmetic.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "nanlocator/scan/tensor_stats.hpp"
#include "nanlocator/scan/tensor_view.hpp"

namespace nanlocator::testing {

/// The number of a sign-exponent-mantissa format; NaN and infinities are those of double.
inline double decode_bits(std::uint64_t bits, int exponent_bits, int mantissa_bits,
                          bool has_infinity) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const bool negative = ((bits >> (exponent_bits + mantissa_bits)) & 1) != 0;
  const int exponent = static_cast<int>((bits >> mantissa_bits) & ((1u << exponent_bits) - 1));
  const auto mantissa = static_cast<double>(bits & ((std::uint64_t{1} << mantissa_bits) - 1));
  const double one = std::ldexp(1.0, mantissa_bits);
  double value = 0;
  if (exponent == (1 << exponent_bits) - 1 && has_infinity) {
    value = mantissa == 0 ? std::numeric_limits<double>::infinity()
                          : std::numeric_limits<double>::quiet_NaN();
  } else if (exponent == (1 << exponent_bits) - 1 && mantissa == one - 1) {
    value = std::numeric_limits<double>::quiet_NaN();  // a format without infinities
  } else if (exponent == 0) {
    value = std::ldexp(mantissa, 1 - bias - mantissa_bits);
  } else {
    value = std::ldexp(one + mantissa, exponent - bias - mantissa_bits);
  }
  return negative ? -value : value;
}

/// The bits of one element, zero-extended.
inline std::uint64_t bits_at(const void* element, DType dtype) {
  std::uint64_t bits = 0;  // little-endian, as all machines that run this
  std::memcpy(&bits, element, size_of(dtype));
  return bits;
}

inline double decode(std::uint64_t bits, DType dtype) {
  switch (dtype) {
    case DType::float64: {
      double value;
      std::memcpy(&value, &bits, sizeof value);
      return value;
    }
    case DType::float32: {
      float value;
      std::memcpy(&value, &bits, sizeof value);
      return static_cast<double>(value);
    }
    case DType::float16:
      return decode_bits(bits, 5, 10, true);
    case DType::bfloat16:
      return decode_bits(bits, 8, 7, true);
    case DType::float8_e4m3fn:
      return decode_bits(bits, 4, 3, false);
    case DType::float8_e5m2:
      return decode_bits(bits, 5, 2, true);
  }
  ADD_FAILURE() << "unknown dtype";
  return 0;
}

/// The view's elements in row-major order, contiguous.
inline std::vector<unsigned char> contiguous_copy(const TensorView& view) {
  const std::size_t size = size_of(view.dtype);
  const auto* data = static_cast<const unsigned char*>(view.data);
  std::vector<unsigned char> copy(static_cast<std::size_t>(view.numel) * size);
  std::vector<std::int64_t> index(view.sizes.size(), 0);
  for (std::size_t i = 0; i < static_cast<std::size_t>(view.numel); ++i) {
    std::int64_t offset = static_cast<std::int64_t>(i);
    if (!view.is_contiguous()) {
      offset = 0;
      for (std::size_t d = 0; d < index.size(); ++d) offset += index[d] * view.strides[d];
      for (std::size_t d = index.size(); d-- > 0;) {
        if (++index[d] < view.sizes[d]) break;
        index[d] = 0;
      }
    }
    std::memcpy(copy.data() + i * size, data + static_cast<std::size_t>(offset) * size, size);
  }
  return copy;
}

/// The stats of `view` by the definitions in tensor_stats.hpp and fingerprint.hpp.
inline TensorStats reference_scan(const TensorView& view) {
  const std::size_t size = size_of(view.dtype);
  const std::vector<unsigned char> bytes = contiguous_copy(view);
  TensorStats stats;
  stats.numel = view.numel;
  long double squares = 0;
  for (std::int64_t i = 0; i < view.numel; ++i) {
    const double value =
        decode(bits_at(bytes.data() + static_cast<std::size_t>(i) * size, view.dtype), view.dtype);
    if (!std::isfinite(value)) {
      if (stats.first_bad < 0) stats.first_bad = i;
      if (std::isnan(value)) {
        ++stats.nan;
      } else {
        ++(value > 0 ? stats.pos_inf : stats.neg_inf);
      }
      continue;
    }
    if (value == 0) ++stats.zeros;
    stats.finite_min = std::fmin(stats.finite_min, value);
    stats.finite_max = std::fmax(stats.finite_max, value);
    stats.absmin = std::fmin(stats.absmin, std::fabs(value));
    stats.absmax = std::fmax(stats.absmax, std::fabs(value));
    squares += static_cast<long double>(value) * static_cast<long double>(value);
  }
  stats.sum_of_squares = static_cast<double>(squares);

  std::uint64_t s0 = 0, s1 = 0;
  for (std::size_t word = 0; word * 4 < bytes.size(); ++word) {
    std::uint64_t w = 0;
    for (std::size_t byte = 0; byte < 4 && word * 4 + byte < bytes.size(); ++byte) {
      w |= std::uint64_t{bytes[word * 4 + byte]} << (8 * byte);
    }
    const std::uint64_t mixed = w ^ (w >> 16);
    s0 += mixed;
    s1 += word * mixed;
  }
  stats.fingerprint = (s1 << 32) | (s0 & 0xffffffffu);
  return stats;
}

/// The largest relative error of a sum of squares. Up to 2^13 squares are added into one fp64 lane
/// of a chunk, each addition rounding by 2^-53 at most; 8- and 16-bit formats add eight squares in
/// fp32 first (7 roundings of 2^-24).
inline double sum_tolerance(DType dtype) {
  return size_of(dtype) >= 4 ? 1e-12 : 7 * 0x1p-24;
}

/// Expects everything equal, and the sum of squares within the tolerance.
inline void expect_stats(const TensorStats& found, const TensorStats& expected, DType dtype) {
  EXPECT_EQ(found.numel, expected.numel);
  EXPECT_EQ(found.nan, expected.nan);
  EXPECT_EQ(found.pos_inf, expected.pos_inf);
  EXPECT_EQ(found.neg_inf, expected.neg_inf);
  EXPECT_EQ(found.zeros, expected.zeros);
  EXPECT_EQ(found.first_bad, expected.first_bad);
  EXPECT_EQ(found.finite_min, expected.finite_min);
  EXPECT_EQ(found.finite_max, expected.finite_max);
  EXPECT_EQ(found.absmin, expected.absmin);
  EXPECT_EQ(found.absmax, expected.absmax);
  EXPECT_EQ(found.fingerprint, expected.fingerprint);
  if (std::isinf(expected.sum_of_squares)) {
    EXPECT_EQ(found.sum_of_squares, expected.sum_of_squares);
  } else {
    EXPECT_NEAR(found.sum_of_squares, expected.sum_of_squares,
                expected.sum_of_squares * sum_tolerance(dtype));
  }
}

/// True if all bits are equal, those of the doubles included.
inline bool same_bits(const TensorStats& a, const TensorStats& b) {
  static_assert(sizeof(TensorStats) == 12 * 8, "no padding, so bytes can be compared");
  return std::memcmp(&a, &b, sizeof a) == 0;
}

}  // namespace nanlocator::testing
