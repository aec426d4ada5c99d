// The verdict for people: one line per rank, the table of collectives, what was found, what to do.
#pragma once

#include <string>
#include <string_view>

namespace nanlocator::netcheck {

struct TextStyle {
  bool colour = false;  // ANSI colours: for a terminal only
};

/// `verdict`: what make_verdict gave. Names of hosts and texts of errors are made printable.
[[nodiscard]] std::string format_verdict(std::string_view verdict, const TextStyle& style = {});

}  // namespace nanlocator::netcheck
