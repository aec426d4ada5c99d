// "a, b, c"
#pragma once

#include <string>
#include <string_view>

namespace nanlocator {

/// Appends `item` to `list`, after a separator unless it is the first.
inline void append_item(std::string& list, std::string_view item,
                        std::string_view separator = ", ") {
  if (!list.empty()) list += separator;
  list += item;
}

}  // namespace nanlocator
