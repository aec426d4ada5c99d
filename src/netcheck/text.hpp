// The verdict as text: one line per rank, the table of collectives, the findings, the actions.
#pragma once

#include <string>
#include <string_view>

namespace nanlocator::netcheck {

struct TextStyle {
  bool colour = false;  // ANSI colours, for a terminal only
};

/// `verdict`: from make_verdict. Host names and error texts are made printable.
[[nodiscard]] std::string format_verdict(std::string_view verdict, const TextStyle& style = {});

}  // namespace nanlocator::netcheck
