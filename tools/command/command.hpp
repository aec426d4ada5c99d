// The commands of `nanlocator`. One file each: its table of options with its help, and what it
// does. A new one is a file here and a line in main.cpp.
#pragma once

#include <string>
#include <vector>

#include "arguments.hpp"

namespace nanlocator::command {

inline constexpr int kClean = 0;
inline constexpr int kFindings = 1;  // something was found that a script should stop for
inline constexpr int kWrongUse = 2;  // wrong arguments, or input that cannot be read

/// Becomes `python -m module arguments...`, with the Python beside this program (an environment's
/// bin/), else the one on PATH. Throws UsageError where there is none. Where that Python cannot
/// import the module, it says what to install and exits with kWrongUse.
[[noreturn]] void run_python_module(const std::string& module,
                                    const std::vector<std::string>& arguments);

/// What they run returns the exit code and throws nanlocator::Error; main turns that into one line
/// on stderr and kWrongUse.
Command bundle_command();
Command history_command();
Command map_command();
Command netcheck_command();
Command replay_command();
Command report_command();
Command version_command();

}  // namespace nanlocator::command
