// The verdict as text for people, at most about 25 lines.
#pragma once

#include <string>

#include "nanlocator/locate/verdict.hpp"

namespace nanlocator {

struct TerminalStyle {
  int width = 100;     // columns; lines are wrapped on words
  bool colour = false;  // ANSI colours
};

[[nodiscard]] std::string format_verdict(const Verdict& verdict, const TerminalStyle& style = {});

}  // namespace nanlocator
