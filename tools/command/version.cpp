// `nanlocator version`
#include <iostream>

#include "command.hpp"

namespace nanlocator::command {
namespace {

int version(const Arguments& given) {
  if (given.has("--json")) {
    std::cout << "{\"version\":\"" NANLOCATOR_VERSION "\"}\n";
  } else {
    std::cout << "nanlocator " NANLOCATOR_VERSION "\n";
  }
  return kClean;
}

constexpr Option kOptionsOfVersion[] = {
    {.name = "--json", .help = "Print JSON"},
};

}  // namespace

Command version_command() {
  return {.name = "version",
          .summary = "Print the version of this program",
          .options = kOptionsOfVersion,
          .examples = "nanlocator version --json",
          .run = version};
}

}  // namespace nanlocator::command
