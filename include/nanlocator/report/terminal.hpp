// The verdict as text for people, in 25 lines of the usual width: at most four origins, and as much
// of their evidence as fits; the rest is in verdict.json.
#pragma once

#include <string>

#include "nanlocator/locate/verdict.hpp"

namespace nanlocator::inline report_room {

struct TerminalStyle {
  int width = 100;      // columns, at least 40; lines are wrapped on words, and names never cut
  bool colour = false;  // ANSI colours
  std::string
      run_dir;  // bundles are below it, in commands to be pasted; "": paths as in the verdict
};

/// UTF-8, lines ending in '\n'. Control and direction characters in names are escaped ("\x1b"): no
/// module or host name can write to the terminal.
[[nodiscard]] std::string format_verdict(const Verdict& verdict, const TerminalStyle& style = {});

}  // namespace nanlocator::inline report_room
