// `nanlocator replay`: runs nanlocator-replay with its arguments, which links Torch; of a bundle
// with the call of a kernel, which only Python can execute, or of a custom operator, which Python
// registers, `python -m nanlocator.replay`.
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

namespace nanlocator::command {
namespace {

constexpr const char* kProgram = "nanlocator-replay";

bool is_program(const std::filesystem::path& path) {
  return ::access(path.c_str(), X_OK) == 0 && std::filesystem::is_regular_file(path);
}

/// Beside this program, else on PATH; empty where there is none.
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

/// Whether one of them is a bundle whose call only Python can execute, to be executed.
bool asks_for_python(const std::vector<std::string>& arguments) {
  bool is_found = false;
  for (const auto& argument : arguments) {
    if (argument.starts_with("--export-python")) return false;
    std::error_code unreadable;
    const std::filesystem::path path(argument);
    const bool is_bundle = path.filename() == kBundleFile
                               ? std::filesystem::is_regular_file(path, unreadable)
                               : std::filesystem::exists(path / kBundleFile, unreadable);
    if (is_bundle) is_found = is_found || needs_python(OpenBundle(path).bundle());
  }
  return is_found;
}

int run_program(const std::vector<std::string>& arguments) {
  if (asks_for_python(arguments)) run_python_module("nanlocator.replay", arguments);
  const auto program = find_program();
  if (program.empty()) {
    throw UsageError(std::string(kProgram) +
                     " is neither beside this program nor on PATH. It comes with a nanlocator "
                     "built with Torch (-DNANLOCATOR_TORCH=ON, or pip install). In Python, "
                     "`python -m nanlocator.replay BUNDLE` does the same.");
  }
  auto texts = arguments;
  texts.insert(texts.begin(), program.string());
  std::vector<char*> pointers;
  for (auto& text : texts) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  ::execv(program.c_str(), pointers.data());
  throw UsageError("cannot start " + program.string() + ": " + std::strerror(errno));
}

}  // namespace

void add_replay_command(CLI::App& app, Action& action) {
  CLI::App* const replay = app.add_subcommand(
      "replay", "Execute a bundle's operator or kernel call again: does the fault come back?");
  replay->set_help_flag();  // --help is nanlocator-replay's
  replay->prefix_command();
  replay->callback([&action, replay] {
    action = [arguments = replay->remaining()] { return run_program(arguments); };
  });
}

}  // namespace nanlocator::command
