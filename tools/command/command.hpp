// The subcommands of `nanlocator`. One file each: it adds its options, its help with an example,
// and a callback that runs it. A new one is a file here and a line in main.cpp.
#pragma once

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace nanlocator::command {

/// What the parsed command line asks for; returns the exit code.
using Action = std::function<int()>;

inline constexpr const char* kJsonHelp = "Print JSON (docs/formats.md)";

/// Adds a subcommand with --json whose options live as long as the action that reads them.
template <typename Options>
std::pair<CLI::App*, std::shared_ptr<Options>> add_action(CLI::App& parent, const char* name,
                                                          const char* help, Action& action,
                                                          int (*run)(const Options&)) {
  CLI::App* const command = parent.add_subcommand(name, help);
  auto options = std::make_shared<Options>();
  command->add_flag("--json", options->json, kJsonHelp);
  command->callback([&action, options, run] { action = [options, run] { return run(*options); }; });
  return {command, options};
}

inline constexpr int kClean = 0;
inline constexpr int kFindings = 1;  // something was found that a script should stop for
inline constexpr int kWrongUse = 2;  // wrong arguments, or input that cannot be read

/// Becomes `python -m module arguments...`, with the Python beside this program (an environment's
/// bin/), else the one on PATH. Throws UsageError where there is none.
[[noreturn]] void run_python_module(const std::string& module,
                                    const std::vector<std::string>& arguments);

/// Each adds one subcommand that, when it was given, sets `action`. Actions throw
/// nanlocator::Error; main turns that into one line on stderr and kWrongUse.
void add_bundle_command(CLI::App& app, Action& action);
void add_history_command(CLI::App& app, Action& action);
void add_map_command(CLI::App& app, Action& action);
void add_netcheck_command(CLI::App& app, Action& action);
void add_replay_command(CLI::App& app, Action& action);
void add_report_command(CLI::App& app, Action& action);
void add_version_command(CLI::App& app, Action& action);

}  // namespace nanlocator::command
