// Numbers and lists as text. printable.hpp handles text from other programs.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace nanlocator::inline files_room {

/// Appends `item` to `list`, after a separator unless it is the first.
inline void append_item(std::string& list, std::string_view item,
                        std::string_view separator = ", ") {
  if (!list.empty()) list += separator;
  list += item;
}

/// A shape or an index: "[4, 8]"; "[]" for a scalar.
[[nodiscard]] std::string describe_shape(std::span<const std::int64_t> shape);

/// printf's %g, but "NaN" without a sign.
[[nodiscard]] std::string number_text(double number, int digits = 4);

/// "17 B", "1.5 KiB", "2 GiB".
[[nodiscard]] std::string size_text(double bytes);

}  // namespace nanlocator::inline files_room
