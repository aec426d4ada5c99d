// `nanlocator netcheck`: starts the network check with the Python that has Torch.
#include <string>
#include <vector>

#include "command.hpp"
#include "nanlocator/error.hpp"

namespace nanlocator::command {
namespace {

int start(const std::vector<std::string>& arguments) {
#ifndef NANLOCATOR_NETCHECK
  throw UsageError("built without the network check: configure with -DNANLOCATOR_NETCHECK=ON");
#endif
  run_python_module("nanlocator.netcheck", arguments);
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
