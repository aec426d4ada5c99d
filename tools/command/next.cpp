// `nanlocator next`: plans by a verdict and what is there now, with the Python that has Torch.
#include "command.hpp"
#include "next_options.hpp"

namespace nanlocator::command {
namespace {

int next(const Arguments& given) {
  run_python_module("nanlocator.next_steps", given.words);
}

}  // namespace

Command next_command() {
  Command command = kNext;
  command.run = next;
  return command;
}

}  // namespace nanlocator::command
