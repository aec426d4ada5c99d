// `nanlocator netcheck`: starts the network check with the Python that has Torch.
#include "command.hpp"
#include "nanlocator/error.hpp"
#include "netcheck_options.hpp"

namespace nanlocator::command {
namespace {

int netcheck(const Arguments& given) {
#ifndef NANLOCATOR_NETCHECK
  throw UsageError("built without the network check: configure with -DNANLOCATOR_NETCHECK=ON");
#endif
  run_python_module("nanlocator.netcheck", given.words);
}

}  // namespace

Command netcheck_command() {
  Command command = kNetcheck;
  command.run = netcheck;
  return command;
}

}  // namespace nanlocator::command
