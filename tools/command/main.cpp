// The `nanlocator` command: reads the files of a run. Exit code 0: clean, 1: findings, 2: wrong use
// or unreadable input, with one line on stderr that says what and where.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <iostream>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "check_checkpoint_options.hpp"
#include "command.hpp"
#include "doctor_options.hpp"
#include "files/printable.hpp"
#include "next_options.hpp"

namespace nanlocator::command {
namespace {

int fail(const std::string& message) {
  std::cerr << "nanlocator: " << printable(message) << '\n';
  return kWrongUse;
}

/// Bundles are mapped: if another program truncates one meanwhile, this process gets SIGBUS.
void report_truncated_files() {
  struct sigaction action {};
  action.sa_handler = [](int) {
    constexpr std::string_view kMessage = "nanlocator: a file was truncated while it was read\n";
    (void)!::write(STDERR_FILENO, kMessage.data(), kMessage.size());
    ::_exit(kWrongUse);
  };
  ::sigaction(SIGBUS, &action, nullptr);
}

/// `--version` and `help report`, as other programs have them.
std::vector<std::string> usual(std::vector<std::string> words) {
  if (words.empty()) return words;
  if (words.front() == "--version" || words.front() == "-V") words.front() = "version";
  if (words.front() == "help") {
    words.erase(words.begin());
    words.emplace_back("--help");
  }
  return words;
}

int run(const std::vector<std::string>& given_words) {
  report_truncated_files();
  const std::vector<std::string> words = usual(given_words);
  const Command commands[] = {
      bundle_command(), kCheckCheckpoint,   kDoctor, explain_command(), history_command(),
      map_command(),    netcheck_command(), kNext,   replay_command(),  report_command(),
      version_command()};
  const Command nanlocator = {
      .name = "nanlocator",
      .summary = "Finds where a NaN or Inf of a distributed training run was born",
      .exit_codes = "0 clean, 1 findings, 2 wrong use or unreadable input",
      .examples =
          "nanlocator report nanlocator_run\n"
          "nanlocator next\n"
          "nanlocator help report",
      .commands = commands};
  try {
    const Arguments given = parse(nanlocator, "nanlocator", words);
    int code = kClean;
    if (given.asks_for_help) {
      std::cout << help_of(*given.command, given.name, help_width());
    } else if (given.command->python_module != nullptr) {
      run_python_module(given.command->python_module, given.words);
    } else {
      code = given.command->run(given);
    }
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
  return nanlocator::command::run(
      {arguments + std::min(argument_count, 1), arguments + argument_count});
}
