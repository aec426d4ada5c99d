#include "nanlocator/scan/dtype.hpp"

#include <limits>
#include <utility>

namespace nanlocator::inline scan_room {

std::optional<double> largest_finite(std::string_view dtype) noexcept {
  constexpr std::pair<std::string_view, double> kLargest[] = {
      {"float64", std::numeric_limits<double>::max()},
      {"complex128", std::numeric_limits<double>::max()},
      {"float32", std::numeric_limits<float>::max()},
      {"complex64", std::numeric_limits<float>::max()},
      {"bfloat16", 0x1.FEp127},
      {"float16", 65504},
      {"complex32", 65504},
      {"float8_e4m3fn", 448},
      {"float8_e5m2", 57344},
  };
  for (const auto& [name, largest] : kLargest) {
    if (name == dtype) return largest;
  }
  return std::nullopt;
}

}  // namespace nanlocator::inline scan_room
