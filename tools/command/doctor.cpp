// `nanlocator doctor`: checks an environment, with the Python that has Torch.
#include "command.hpp"

namespace nanlocator::command {
namespace {

int doctor(const Arguments& given) {
  run_python_module("nanlocator.doctor", given.words);
}

constexpr Option kOptionsOfDoctor[] = {
    {.name = "SCRIPT.py", .help = "Say what would attach to it; it is read, not run"},
    {.name = "--verbose", .help = "Print every point, not only those that are lost"},
    {.name = "--json", .help = "Print one JSON object"},
};

}  // namespace

Command doctor_command() {
  return {.name = "doctor",
          .summary =
              "Check this environment: versions, the points that nanlocator patches, disk, a "
              "self-test",
          .options = kOptionsOfDoctor,
          .exit_codes = "0 all is well, 1 something is wrong, 2 wrong use",
          .examples =
              "nanlocator doctor\n"
              "nanlocator doctor train.py\n"
              "nanlocator doctor --json > here.json",
          .run = doctor};
}

}  // namespace nanlocator::command
