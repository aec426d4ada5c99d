#include "files/text.hpp"

#include <array>
#include <cmath>
#include <cstdio>

namespace nanlocator::inline files_room {

std::string describe_shape(std::span<const std::int64_t> shape) {
  std::string text;
  for (const std::int64_t size : shape) append_item(text, std::to_string(size));
  return "[" + text + "]";
}

std::string number_text(double number, int digits) {
  if (std::isnan(number)) return "NaN";
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%.*g", digits, number);
  return text.data();
}

std::string size_text(double bytes) {
  const char* unit = "B";
  for (const char* larger : {"KiB", "MiB", "GiB", "TiB"}) {
    if (bytes < 1024) break;
    bytes /= 1024;
    unit = larger;
  }
  return number_text(bytes) + " " + unit;
}

}  // namespace nanlocator::inline files_room
