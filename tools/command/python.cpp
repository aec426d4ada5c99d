// Python where a command needs it.
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

#include "command.hpp"
#include "nanlocator/error.hpp"

namespace nanlocator::command {
namespace {

std::string python() {
  std::error_code unreadable;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", unreadable);
  const auto beside = self.parent_path() / "python";
  return !unreadable && ::access(beside.c_str(), X_OK) == 0 ? beside.string() : "python";
}

}  // namespace

void run_python_module(const std::string& module, const std::vector<std::string>& arguments) {
  std::vector<std::string> command = {python(), "-m", module};
  command.insert(command.end(), arguments.begin(), arguments.end());
  std::vector<char*> pointers;
  for (auto& text : command) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  // Not from the folder that the command was called in: a bundle may come from anywhere.
  ::setenv("PYTHONSAFEPATH", "1", /*overwrite=*/1);
  ::execvp(pointers[0], pointers.data());
  throw UsageError("cannot start " + command[0] + ": " + std::strerror(errno) +
                   ". Put the Python that has Torch and nanlocator on PATH.");
}

}  // namespace nanlocator::command
