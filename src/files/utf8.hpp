// Strict UTF-8: names come from other programs and go into JSON and onto terminals.
#pragma once

#include <optional>
#include <string_view>

namespace nanlocator::inline files_room {

/// Removes the first code point from `text` and returns it. Empty, with `text` unchanged, if the
/// bytes are not UTF-8: truncated, overlong, a surrogate, or beyond U+10FFFF (RFC 3629). `text`
/// must not be empty.
[[nodiscard]] constexpr std::optional<char32_t> take_code_point(std::string_view& text) noexcept {
  const auto byte = [&](std::size_t index) { return static_cast<unsigned char>(text[index]); };
  const unsigned char first = byte(0);
  std::size_t length = 1;
  char32_t point = first;
  if (first >= 0x80) {
    if (first < 0xc2 || first > 0xf4) return std::nullopt;
    length = first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
    point = first & (0x7f >> length);
  }
  if (text.size() < length) return std::nullopt;
  for (std::size_t index = 1; index < length; ++index) {
    if ((byte(index) & 0xc0) != 0x80) return std::nullopt;
    point = (point << 6) | (byte(index) & 0x3f);
  }
  const bool is_overlong = (length == 3 && point < 0x800) || (length == 4 && point < 0x10000);
  const bool is_surrogate = point >= 0xd800 && point <= 0xdfff;
  if (is_overlong || is_surrogate || point > 0x10ffff) return std::nullopt;
  text.remove_prefix(length);
  return point;
}

[[nodiscard]] constexpr bool is_utf8(std::string_view text) noexcept {
  while (!text.empty()) {
    if (!take_code_point(text)) return false;
  }
  return true;
}

}  // namespace nanlocator::inline files_room
