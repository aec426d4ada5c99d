// A verdict as text: the block for the engineer on call, and all evidence for whoever looks into
// it.
#pragma once

#include <string>

#include "nanlocator/verdict/verdict.hpp"

namespace nanlocator::inline report_room {

struct TerminalStyle {
  int width = 110;      // columns, at least 40; lines are wrapped at words, and names are never cut
  bool colour = false;  // ANSI colours
  std::string run_dir;  // prefix of bundles' paths in printed commands; "": paths as in the verdict
};

/// The block (narrative.hpp): about 16 lines. UTF-8, lines ending in '\n'. Control and direction
/// characters in names are escaped ("\x1b"), so that no module or host name can control the
/// terminal.
[[nodiscard]] std::string format_verdict(const Verdict& verdict, const TerminalStyle& style = {});

/// The origins with their evidence in at most 25 lines: at most four origins, with as much of their
/// evidence as fits. verdict.json has the rest.
[[nodiscard]] std::string format_evidence(const Verdict& verdict, const TerminalStyle& style = {});

}  // namespace nanlocator::inline report_room
