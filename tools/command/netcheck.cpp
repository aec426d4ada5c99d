// `nanlocator netcheck`: starts the network check with the Python that has Torch.
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

#include "command.hpp"
#include "nanlocator/error.hpp"

namespace nanlocator::command {
namespace {

/// Beside this program (an environment's bin/), else whatever PATH has.
std::string python() {
  std::error_code unreadable;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", unreadable);
  const auto beside = self.parent_path() / "python";
  return !unreadable && ::access(beside.c_str(), X_OK) == 0 ? beside.string() : "python";
}

int start(const std::vector<std::string>& arguments) {
#ifndef NANLOCATOR_NETCHECK
  throw UsageError("built without the network check: configure with -DNANLOCATOR_NETCHECK=ON");
#endif
  std::vector<std::string> command = {python(), "-m", "nanlocator.netcheck"};
  command.insert(command.end(), arguments.begin(), arguments.end());
  std::vector<char*> pointers;
  for (auto& text : command) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  ::execvp(pointers[0], pointers.data());
  throw UsageError("cannot start " + command[0] + ": " + std::strerror(errno) +
                   ". Put the Python that has Torch and nanlocator on PATH.");
}

}  // namespace

void add_netcheck_command(CLI::App& app, Action& action) {
  CLI::App* const netcheck = app.add_subcommand(
      "netcheck", "Is it the machine? Check what every rank computes and communicates");
  netcheck->set_help_flag();  // --help is the check's
  netcheck->prefix_command();
  netcheck->callback([&action, netcheck] {
    action = [arguments = netcheck->remaining()] { return start(arguments); };
  });
}

}  // namespace nanlocator::command
