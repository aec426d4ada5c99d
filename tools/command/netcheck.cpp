// `nanlocator netcheck`: starts the network check under torchrun, with the Python that has Torch.
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "command.hpp"
#include "nanlocator/error.hpp"

namespace nanlocator::command {
namespace {

// torchrun's own options, the ones that people use; everything else is the check's.
constexpr std::array<std::string_view, 12> kTorchrunOptions = {
    "nproc-per-node", "nnodes",      "node-rank",   "rdzv-backend", "rdzv-endpoint", "rdzv-id",
    "rdzv-conf",      "master-addr", "master-port", "local-addr",   "max-restarts",  "log-dir"};

/// nproc-per-node, however it is written: --nproc_per_node=8; "" where it is none of torchrun's.
std::string torchrun_option(std::string_view argument) {
  if (!argument.starts_with("--")) return "";
  std::string name(argument.substr(2, argument.find('=') - 2));
  for (char& c : name) c = c == '_' ? '-' : c;
  for (const auto known : kTorchrunOptions) {
    if (name == known) return name;
  }
  return "";
}

struct SplitArguments {
  std::vector<std::string> torchrun;
  std::vector<std::string> check;
};

SplitArguments split(const std::vector<std::string>& arguments) {
  SplitArguments result;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i] == "--standalone") {
      result.torchrun.push_back(arguments[i]);
    } else if (torchrun_option(arguments[i]).empty()) {
      result.check.push_back(arguments[i]);
    } else {
      result.torchrun.push_back(arguments[i]);
      const bool has_value = arguments[i].find('=') != std::string::npos;
      if (!has_value && i + 1 < arguments.size()) result.torchrun.push_back(arguments[++i]);
    }
  }
  return result;
}

/// Beside this program (an environment's bin/), else whatever PATH has.
std::string python() {
  std::error_code unreadable;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", unreadable);
  const auto beside = self.parent_path() / "python";
  return !unreadable && ::access(beside.c_str(), X_OK) == 0 ? beside.string() : "python";
}

bool needs_no_ranks(const std::vector<std::string>& arguments) {
  for (const auto& argument : arguments) {
    if (argument == "--help" || argument == "-h" || argument == "--slurm-template") return true;
  }
  return false;
}

int start(const std::vector<std::string>& arguments) {
  auto [torchrun, check] = split(arguments);
  std::vector<std::string> command = {python()};
  if (!needs_no_ranks(check)) {
    if (torchrun.empty()) {
      throw UsageError(
          "netcheck: how many ranks? One for each GPU of this host: nanlocator netcheck "
          "--nproc-per-node 8. Over several hosts give torchrun's --nnodes and --rdzv-endpoint, "
          "too, or take the script of nanlocator netcheck --slurm-template");
    }
    command.insert(command.end(), {"-m", "torch.distributed.run"});
    command.insert(command.end(), torchrun.begin(), torchrun.end());
  }
  command.insert(command.end(), {"-m", "nanlocator.netcheck"});
  command.insert(command.end(), check.begin(), check.end());
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
