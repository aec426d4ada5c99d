// `nanlocator check-checkpoint`: reads a checkpoint with the Python that has Torch.
#include "check_checkpoint_options.hpp"
#include "command.hpp"

namespace nanlocator::command {
namespace {

int check_checkpoint(const Arguments& given) {
  run_python_module("nanlocator.check_checkpoint", given.words);
}

}  // namespace

Command check_checkpoint_command() {
  Command command = kCheckCheckpoint;
  command.run = check_checkpoint;
  return command;
}

}  // namespace nanlocator::command
