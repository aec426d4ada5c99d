// The verdict as text in 25 lines of the usual width: at most four origins, with as much of their
// evidence as fits. verdict.json has the rest.
#pragma once

#include <string>

#include "nanlocator/locate/verdict.hpp"

namespace nanlocator::inline report_room {

struct TerminalStyle {
  int width = 100;      // columns, at least 40; lines are wrapped at words, and names are never cut
  bool colour = false;  // ANSI colours
  std::string run_dir;  // prefix of bundles' paths in printed commands; "": paths as in the verdict
};

/// UTF-8, lines ending in '\n'. Control and direction characters in names are escaped ("\x1b"), so
/// that no module or host name can control the terminal.
[[nodiscard]] std::string format_verdict(const Verdict& verdict, const TerminalStyle& style = {});

}  // namespace nanlocator::inline report_room
