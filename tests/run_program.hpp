// Runs a program as a person's shell would, and keeps what it printed.
#pragma once

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "temporary_folder.hpp"

namespace nanlocator::testing {

struct CommandResult {
  int exit_code = -1;  // -1: ended by a signal
  std::string out;
  std::string err;
};

/// `environment` is the whole environment; `stdout_path` replaces the file that `out` is read from.
inline CommandResult run_program(const std::string& program, std::vector<std::string> arguments,
                                 std::vector<std::string> environment = {},
                                 const std::string& stdout_path = {}) {
  const TemporaryFolder folder;
  const std::string out_path = stdout_path.empty() ? (folder / "out").string() : stdout_path;
  const std::string err_path = (folder / "err").string();
  arguments.insert(arguments.begin(), program);
  const auto pointers_of = [](std::vector<std::string>& texts) {
    std::vector<char*> pointers;
    for (auto& text : texts) pointers.push_back(text.data());
    pointers.push_back(nullptr);
    return pointers;
  };

  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  constexpr int kFlags = O_WRONLY | O_CREAT | O_TRUNC;
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, out_path.c_str(), kFlags, 0600);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, err_path.c_str(), kFlags, 0600);
  pid_t process = 0;
  const int error = ::posix_spawn(&process, program.c_str(), &actions, nullptr,
                                  pointers_of(arguments).data(), pointers_of(environment).data());
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) throw std::runtime_error("cannot start " + program);
  int status = 0;
  if (::waitpid(process, &status, 0) != process) throw std::runtime_error("waitpid failed");

  const auto bytes_of = [](const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  return {.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1,
          .out = stdout_path.empty() ? bytes_of(out_path) : std::string(),
          .err = bytes_of(err_path)};
}

}  // namespace nanlocator::testing
