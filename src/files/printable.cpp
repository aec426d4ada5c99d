#include "files/printable.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <span>

#include "files/utf8.hpp"

namespace nanlocator::inline files_room {
namespace {

struct CodePoints {
  char32_t first;
  char32_t last;
};

// Unicode categories Cc, Cf (the invisible and reordering ones), Zl and Zp.
constexpr std::array kUnsafe = {
    CodePoints{0x00, 0x1f},     CodePoints{0x7f, 0x9f},      CodePoints{0xad, 0xad},
    CodePoints{0x061c, 0x061c}, CodePoints{0x180e, 0x180e},  CodePoints{0x200b, 0x200f},
    CodePoints{0x2028, 0x202e}, CodePoints{0x2060, 0x206f},  CodePoints{0xfeff, 0xfeff},
    CodePoints{0xfff0, 0xfffb}, CodePoints{0xe0000, 0xe0fff}};
// Ranges that UAX #11 calls wide or full-width, and emoji.
constexpr std::array kWide = {
    CodePoints{0x1100, 0x115f}, CodePoints{0x2e80, 0xa4cf},   CodePoints{0xac00, 0xd7a3},
    CodePoints{0xf900, 0xfaff}, CodePoints{0xfe30, 0xfe6f},   CodePoints{0xff00, 0xff60},
    CodePoints{0xffe0, 0xffe6}, CodePoints{0x1f300, 0x1faff}, CodePoints{0x20000, 0x3fffd}};
constexpr std::array kCombining = {CodePoints{0x0300, 0x036f}, CodePoints{0x1ab0, 0x1aff},
                                   CodePoints{0x20d0, 0x20ff}, CodePoints{0xfe00, 0xfe0f},
                                   CodePoints{0xfe20, 0xfe2f}};

bool is_in(std::span<const CodePoints> ranges, char32_t point) {
  return std::ranges::any_of(
      ranges, [&](CodePoints range) { return range.first <= point && point <= range.last; });
}

constexpr bool is_plain_in_a_shell(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
         std::string_view("_./=:@%+,-").find(c) != std::string_view::npos;
}

}  // namespace

std::string printable(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const std::string_view rest = text;
    const auto point = take_code_point(text);
    char escaped[16];
    if (!point) {
      std::snprintf(escaped, sizeof escaped, "\\x%02x", static_cast<unsigned char>(rest.front()));
      out += escaped;
      text.remove_prefix(1);
    } else if (is_in(kUnsafe, *point)) {
      std::snprintf(escaped, sizeof escaped, *point <= 0xff ? "\\x%02x" : "\\u%04x",
                    static_cast<unsigned>(*point));
      out += escaped;
    } else {
      out += rest.substr(0, rest.size() - text.size());
    }
  }
  return out;
}

int columns_of(std::string_view text) {
  int columns = 0;
  while (!text.empty()) {
    const auto point = take_code_point(text);
    if (!point) {
      text.remove_prefix(1);
      ++columns;
    } else if (!is_in(kCombining, *point)) {
      columns += is_in(kWide, *point) ? 2 : 1;
    }
  }
  return columns;
}

std::string shell_word(std::string_view text) {
  if (!text.empty() && text.front() != '-' && std::ranges::all_of(text, is_plain_in_a_shell))
    return std::string(text);
  std::string quoted = text.starts_with('-') ? "'./" : "'";
  for (const char c : text) {
    if (c == '\'') {
      quoted += "'\\''";
    } else {
      quoted += c;
    }
  }
  return quoted + "'";
}

std::string count_text(std::size_t count, std::string_view noun) {
  return std::to_string(count) + " " + std::string(noun) + (count == 1 ? "" : "s");
}

}  // namespace nanlocator::inline files_room
