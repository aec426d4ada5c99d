// `nanlocator doctor`: checks an environment, with the Python that has Torch.
#include "command.hpp"
#include "doctor_options.hpp"

namespace nanlocator::command {
namespace {

int doctor(const Arguments& given) {
  run_python_module("nanlocator.doctor", given.words);
}

}  // namespace

Command doctor_command() {
  Command command = kDoctor;
  command.run = doctor;
  return command;
}

}  // namespace nanlocator::command
