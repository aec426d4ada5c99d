// `nanlocator replay`: runs nanlocator-replay, which links Torch, with the same arguments. For a
// kernel's call, which only Python can execute, or a custom operator, which Python registers, runs
// `python -m nanlocator.replay`.
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

#include "command.hpp"
#include "nanlocator/error.hpp"
#include "nanlocator/record/bundle.hpp"
#include "record/bundle_json.hpp"
#include "replay_options.hpp"

namespace nanlocator::command {
namespace {

constexpr const char* kProgram = "nanlocator-replay";

bool is_program(const std::filesystem::path& path) {
  return ::access(path.c_str(), X_OK) == 0 && std::filesystem::is_regular_file(path);
}

/// Beside this program, else on PATH; empty if there is none.
std::filesystem::path find_program() {
  std::error_code unreadable;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", unreadable);
  if (const auto beside = self.parent_path() / kProgram; !unreadable && is_program(beside)) {
    return beside;
  }
  const char* variable = std::getenv("PATH");
  std::string folders = variable == nullptr ? "" : variable;
  while (!folders.empty()) {
    const auto end = std::min(folders.find(':'), folders.size());
    const auto candidate = std::filesystem::path(folders.substr(0, end)) / kProgram;
    if (end > 0 && is_program(candidate)) return candidate;
    folders.erase(0, end + 1);
  }
  return {};
}

bool needs_python(const Bundle& bundle) {
  return bundle.kernel_call ||
         (bundle.operator_call && !bundle.operator_call->registered_by.empty());
}

/// Whether only Python can execute the call or implements the options.
bool asks_for_python(const Arguments& given) {
  if (!python_option(given).empty()) return true;
  if (given.has("--export-python")) return false;
  std::error_code unreadable;
  const std::filesystem::path path = given.text("BUNDLE");
  const bool is_bundle = path.filename() == kBundleFile
                             ? std::filesystem::is_regular_file(path, unreadable)
                             : std::filesystem::exists(path / kBundleFile, unreadable);
  return is_bundle && needs_python(OpenBundle(path).bundle());
}

int start_replay(const Arguments& given) {
  if (asks_for_python(given)) run_python_module("nanlocator.replay", given.words);
  const auto program = find_program();
  if (program.empty()) {
    throw UsageError(std::string(kProgram) +
                     " is neither beside this program nor on PATH. It comes with a nanlocator "
                     "built with Torch (-DNANLOCATOR_TORCH=ON, or pip install). In Python, "
                     "`python -m nanlocator.replay BUNDLE` does the same.");
  }
  auto words = given.words;
  words.insert(words.begin(), program.string());
  std::vector<char*> pointers;
  for (auto& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  ::execv(program.c_str(), pointers.data());
  throw UsageError("cannot start " + program.string() + ": " + std::strerror(errno));
}

}  // namespace

Command replay_command() {
  Command command = kReplay;
  command.run = start_replay;
  return command;
}

}  // namespace nanlocator::command
