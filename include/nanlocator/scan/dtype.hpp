// The element types that the scan classifies by their bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace nanlocator::inline scan_room {

enum class DType : std::uint8_t {
  float64,
  float32,
  float16,
  bfloat16,
  float8_e4m3fn,  // no infinities; NaN is S.1111.111 (OCP OFP8, "fn" = finite + NaN)
  float8_e5m2,    // IEEE-like: infinities and NaN
};
inline constexpr int kDTypeCount = 6;

/// Bytes of one element.
[[nodiscard]] constexpr std::size_t size_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::float64:
      return 8;
    case DType::float32:
      return 4;
    case DType::float16:
    case DType::bfloat16:
      return 2;
    case DType::float8_e4m3fn:
    case DType::float8_e5m2:
      return 1;
  }
  return 0;
}

/// PyTorch's spelling without the "torch." prefix: "bfloat16", "float8_e4m3fn".
[[nodiscard]] constexpr std::string_view name_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::float64:
      return "float64";
    case DType::float32:
      return "float32";
    case DType::float16:
      return "float16";
    case DType::bfloat16:
      return "bfloat16";
    case DType::float8_e4m3fn:
      return "float8_e4m3fn";
    case DType::float8_e5m2:
      return "float8_e5m2";
  }
  return "unknown";
}

/// The largest finite number of the dtype with this spelling; for a complex dtype, that of its
/// parts. Empty for integers and unknown dtypes.
[[nodiscard]] std::optional<double> largest_finite(std::string_view dtype) noexcept;

}  // namespace nanlocator::inline scan_room
