// `nanlocator version`
#include <iostream>
#include <string>
#include <string_view>

#include "command.hpp"

namespace nanlocator::command {
namespace {

constexpr std::string_view kTorch = NANLOCATOR_TORCH_VERSION;  // "": without
constexpr std::string_view kCudaCompiler = NANLOCATOR_CUDA_COMPILER_VERSION;

std::string json_text(std::string_view text) {
  return text.empty() ? "null" : '"' + std::string(text) + '"';
}

std::string built_for() {
  if (kTorch.empty()) return "built without torch";
  return "built for torch " + std::string(kTorch) + ", " +
         (kCudaCompiler.empty() ? std::string("without CUDA kernels")
                                : "CUDA kernels by nvcc " + std::string(kCudaCompiler));
}

int version(const Arguments& given) {
  if (given.has("--json")) {
    std::cout << "{\"version\":\"" NANLOCATOR_VERSION "\",\"torch\":" << json_text(kTorch)
              << ",\"cuda_compiler\":" << json_text(kCudaCompiler) << "}\n";
  } else {
    std::cout << "nanlocator " NANLOCATOR_VERSION << ", " << built_for() << '\n';
  }
  return kClean;
}

constexpr Option kOptionsOfVersion[] = {
    {.name = "--json", .help = "Print JSON"},
};

}  // namespace

Command version_command() {
  return {.name = "version",
          .summary = "Print the version of this program, and what it was built for",
          .options = kOptionsOfVersion,
          .examples = "nanlocator version --json",
          .run = version};
}

}  // namespace nanlocator::command
