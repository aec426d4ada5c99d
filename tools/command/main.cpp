// The `nanlocator` command: reads what a run left behind. Exit code 0: clean, 1: findings, 2: wrong
// use or input that cannot be read, with one line on stderr that says what and where.
#include <signal.h>
#include <unistd.h>

#include <exception>
#include <iostream>
#include <new>
#include <string>
#include <string_view>

#include "command.hpp"
#include "console.hpp"
#include "files/printable.hpp"
#include "nanlocator/error.hpp"

namespace nanlocator::command {
namespace {

int fail(const std::string& message) {
  std::cerr << "nanlocator: " << printable(message) << '\n';
  return kWrongUse;
}

/// "nanlocator map show", as far as the command line got.
std::string name_as_typed(const CLI::App& app) {
  std::string name = "nanlocator";
  const CLI::App* innermost = &app;
  while (!innermost->get_subcommands().empty()) {
    innermost = innermost->get_subcommands().front();
    name += " " + innermost->get_name();
  }
  return name;
}

/// Bundles are mapped: one that another program truncates meanwhile ends in SIGBUS.
void report_truncated_files() {
  struct sigaction action {};
  action.sa_handler = [](int) {
    constexpr std::string_view kMessage = "nanlocator: a file was truncated while it was read\n";
    (void)!::write(STDERR_FILENO, kMessage.data(), kMessage.size());
    ::_exit(kWrongUse);
  };
  ::sigaction(SIGBUS, &action, nullptr);
}

int run(int argument_count, char** arguments) {
  CLI::App app("Finds where a NaN or Inf of a distributed training run was born", "nanlocator");
  app.footer(
      "Exit codes: 0 clean, 1 findings, 2 wrong use or unreadable input.\n"
      "Example:\n  nanlocator map show nanlocator_run/a0 --rank 0");
  // With at most one, a folder or a pattern that is called as a subcommand stays an argument.
  app.require_subcommand(1);

  report_truncated_files();
  Action action;
  for (const auto add_command :
       {add_bundle_command, add_history_command, add_map_command, add_netcheck_command,
        add_replay_command, add_report_command, add_version_command})
    add_command(app, action);

  try {
    app.parse(argument_count, arguments);
  } catch (const CLI::Success& success) {  // --help
    return app.exit(success);
  } catch (const CLI::ParseError& error) {
    std::string message = error.what();
    if (const auto unknown = app.remaining(true); !unknown.empty()) {
      message = "unknown argument \"" + unknown.front() + "\"";
    }
    return fail(message + "; see " + name_as_typed(app) + " --help");
  }
  try {
    const int code = action();
    std::cout.flush();
    return std::cout ? code : fail("cannot write the output");
  } catch (const std::bad_alloc&) {
    return fail("out of memory");
  } catch (const std::exception& error) {
    return fail(error.what());
  }
}

}  // namespace
}  // namespace nanlocator::command

int main(int argument_count, char** arguments) {
  return nanlocator::command::run(argument_count, arguments);
}
