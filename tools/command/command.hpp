// The commands of `nanlocator`, one file each with its table of options, its help and its code; one
// that is a module of Python has only the table (*_options.hpp). A new one is a file here and a
// line in main.cpp.
#pragma once

#include <string>
#include <vector>

#include "arguments.hpp"

namespace nanlocator::command {

inline constexpr int kClean = 0;
inline constexpr int kFindings = 1;  // findings for which a script should stop
inline constexpr int kWrongUse = 2;  // wrong arguments, or unreadable input

/// Becomes `python -m module arguments...`, with the Python beside this program (an environment's
/// bin/), else the one on PATH. Throws UsageError if there is none. If that Python cannot import
/// the module, it says what to install and exits with kWrongUse.
[[noreturn]] void run_python_module(const std::string& module,
                                    const std::vector<std::string>& arguments);

/// Each command's `run` returns the exit code and throws nanlocator::Error, which main turns into
/// one line on stderr and kWrongUse.
Command bundle_command();
Command explain_command();
Command history_command();
Command map_command();
Command netcheck_command();
Command replay_command();
Command report_command();
Command version_command();

}  // namespace nanlocator::command
