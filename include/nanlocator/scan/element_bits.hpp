// Class and value of one element from its bits, without a floating-point operation.
//
// In: the raw bits of an element, as the unsigned integer of its size. Out: its class (finite, NaN,
// +Inf, -Inf) and its exact value as a double. Plain constexpr functions for host and device,
// C++17, shared by the CPU kernels, the CUDA kernels and the reports.
//
// With m = bits & abs_mask, integers order magnitudes as the values do. So `m >= first_bad` is the
// whole test for NaN or Inf, and a maximum over m applies it to a block for the price of absmax.
#pragma once

#include <cstdint>

#include "nanlocator/scan/dtype.hpp"

#if defined(__CUDACC__)
#define NANLOCATOR_HOST_DEVICE __host__ __device__
#else
#define NANLOCATOR_HOST_DEVICE
#endif

namespace nanlocator {
inline namespace scan_room {

enum class ElementClass : std::uint8_t { finite, nan, pos_inf, neg_inf };

/// The layout of a sign-exponent-mantissa format in a word of its size.
///   abs_mask    all bits but the sign
///   first_bad   the smallest non-finite magnitude: Inf if the format has it, else NaN
///   infinity    the magnitude of Inf; above every magnitude if the format has none
template <class WordType, int exponent_bits_, int mantissa_bits_, int exponent_bias_,
          bool has_infinity_>
struct FloatingPointLayout {
  using Word = WordType;
  static constexpr int exponent_bits = exponent_bits_;
  static constexpr int mantissa_bits = mantissa_bits_;
  static constexpr int exponent_bias = exponent_bias_;
  static constexpr bool has_infinity = has_infinity_;
  static constexpr int sign_shift = exponent_bits + mantissa_bits;
  static constexpr Word sign_mask = static_cast<Word>(Word{1} << sign_shift);
  static constexpr Word abs_mask = static_cast<Word>(sign_mask - 1);
  static constexpr Word mantissa_mask = static_cast<Word>((Word{1} << mantissa_bits) - 1);
  static constexpr Word exponent_mask = static_cast<Word>(abs_mask & ~mantissa_mask);
  static constexpr Word first_bad = has_infinity ? exponent_mask : abs_mask;
  static constexpr Word infinity = has_infinity ? exponent_mask : sign_mask;
};

/// Formats: IEEE 754 binary64, binary32, binary16; bfloat16 is the upper half of binary32;
/// float8 after "OCP 8-bit Floating Point Specification (OFP8)": e5m2 is IEEE-like, e4m3fn uses the
/// top exponent for numbers (up to 448) and keeps only S.1111.111 for NaN.
template <DType dtype>
struct ElementBits;
template <>
struct ElementBits<DType::float64> : FloatingPointLayout<std::uint64_t, 11, 52, 1023, true> {};
template <>
struct ElementBits<DType::float32> : FloatingPointLayout<std::uint32_t, 8, 23, 127, true> {};
template <>
struct ElementBits<DType::float16> : FloatingPointLayout<std::uint16_t, 5, 10, 15, true> {};
template <>
struct ElementBits<DType::bfloat16> : FloatingPointLayout<std::uint16_t, 8, 7, 127, true> {};
template <>
struct ElementBits<DType::float8_e4m3fn> : FloatingPointLayout<std::uint8_t, 4, 3, 7, false> {};
template <>
struct ElementBits<DType::float8_e5m2> : FloatingPointLayout<std::uint8_t, 5, 2, 15, true> {};

/// The unsigned integer that holds one element.
template <DType dtype>
using ElementWord = typename ElementBits<dtype>::Word;

/// |x| as bits.
template <DType dtype>
[[nodiscard]] NANLOCATOR_HOST_DEVICE constexpr ElementWord<dtype> magnitude(
    ElementWord<dtype> bits) noexcept {
  return static_cast<ElementWord<dtype>>(bits & ElementBits<dtype>::abs_mask);
}

template <DType dtype>
[[nodiscard]] NANLOCATOR_HOST_DEVICE constexpr bool is_negative(ElementWord<dtype> bits) noexcept {
  return (bits & ElementBits<dtype>::sign_mask) != 0;
}

/// +0 and -0.
template <DType dtype>
[[nodiscard]] NANLOCATOR_HOST_DEVICE constexpr bool is_zero(ElementWord<dtype> bits) noexcept {
  return magnitude<dtype>(bits) == 0;
}

template <DType dtype>
[[nodiscard]] NANLOCATOR_HOST_DEVICE constexpr bool is_finite(ElementWord<dtype> bits) noexcept {
  return magnitude<dtype>(bits) < ElementBits<dtype>::first_bad;
}

template <DType dtype>
[[nodiscard]] NANLOCATOR_HOST_DEVICE constexpr ElementClass classify(
    ElementWord<dtype> bits) noexcept {
  if (is_finite<dtype>(bits)) return ElementClass::finite;
  if (magnitude<dtype>(bits) != ElementBits<dtype>::infinity) return ElementClass::nan;
  return is_negative<dtype>(bits) ? ElementClass::neg_inf : ElementClass::pos_inf;
}

/// The exact value: every value of the six formats is a double. -0 stays -0; every NaN becomes the
/// quiet NaN of its sign. __builtin_bit_cast is constexpr in GCC 11+, Clang 9+ and nvcc, unlike
/// memcpy; std::bit_cast is C++20.
template <DType dtype>
[[nodiscard]] NANLOCATOR_HOST_DEVICE constexpr double value_as_double(
    ElementWord<dtype> bits) noexcept {
  using Bits = ElementBits<dtype>;
  using Double = ElementBits<DType::float64>;
  const std::uint64_t sign = static_cast<std::uint64_t>(bits >> Bits::sign_shift)
                             << Double::sign_shift;
  const std::uint64_t exponent = magnitude<dtype>(bits) >> Bits::mantissa_bits;
  const std::uint64_t mantissa = bits & Bits::mantissa_mask;
  std::uint64_t result = 0;
  if (!is_finite<dtype>(bits)) {
    const bool is_nan = classify<dtype>(bits) == ElementClass::nan;
    result = Double::infinity | (is_nan ? std::uint64_t{1} << (Double::mantissa_bits - 1) : 0);
  } else if constexpr (dtype == DType::float64) {
    result = magnitude<dtype>(bits);
  } else if (exponent != 0) {
    result = ((exponent + (Double::exponent_bias - Bits::exponent_bias)) << Double::mantissa_bits) |
             (mantissa << (Double::mantissa_bits - Bits::mantissa_bits));
  } else {
    // mantissa * 2^(1 - bias - mantissa_bits): the value of a subnormal, as a normal double.
    constexpr std::uint64_t unit_exponent =
        Double::exponent_bias + 1 - Bits::exponent_bias - Bits::mantissa_bits;
    constexpr double unit = __builtin_bit_cast(double, unit_exponent << Double::mantissa_bits);
    const double value = static_cast<double>(mantissa) * unit;
    result = __builtin_bit_cast(std::uint64_t, value);
  }
  return __builtin_bit_cast(double, sign | result);
}

}  // namespace scan_room
}  // namespace nanlocator
