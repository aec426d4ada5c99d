// Starts Python for commands that need it.
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

namespace nanlocator::command {
namespace {

/// `python -m`, but with a clear message if nanlocator or Torch is missing. The current folder is
/// removed from the module path: a bundle may come from anywhere.
constexpr const char* kRunModule = R"(
import sys
sys.path[:] = filter(None, sys.path)
import importlib.util, runpy
module = sys.argv.pop(1)
try:
    found, problem = importlib.util.find_spec(module), f"it has no {module}"
except (ImportError, OSError) as error:
    found, problem = None, str(error).strip().partition("\n")[0]
if not found:
    print(f"nanlocator: this needs the Python package nanlocator, with Torch, in {sys.executable} ({problem}): "
          "install it there with pip (docs/install.md), or put another Python first on PATH", file=sys.stderr)
    sys.exit(2)
runpy.run_module(module, run_name="__main__", alter_sys=True)
)";

std::string python() {
  std::error_code unreadable;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", unreadable);
  const auto beside = self.parent_path() / "python";
  return !unreadable && ::access(beside.c_str(), X_OK) == 0 ? beside.string() : "python";
}

/// PYTHONPATH without the current folder, which an empty entry also means.
std::string import_path() {
  const char* variable = std::getenv("PYTHONPATH");
  std::string rest = variable == nullptr ? "" : variable;
  std::string kept;
  while (!rest.empty()) {
    const auto entry = rest.substr(0, rest.find(':'));
    std::error_code missing;
    if (!entry.empty() && !std::filesystem::equivalent(entry, ".", missing)) {
      kept += (kept.empty() ? "" : ":") + entry;
    }
    rest.erase(0, entry.size() + 1);
  }
  return kept;
}

}  // namespace

void run_python_module(const std::string& module, const std::vector<std::string>& arguments) {
  std::vector<std::string> command = {python(), "-c", kRunModule, module};
  command.insert(command.end(), arguments.begin(), arguments.end());
  std::vector<char*> pointers;
  for (auto& text : command) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  ::setenv("PYTHONPATH", import_path().c_str(), /*overwrite=*/1);
  ::setenv("PYTHONSAFEPATH", "1",
           /*overwrite=*/1);  // for the processes that it starts; from 3.11 on
  ::execvp(pointers[0], pointers.data());
  throw UsageError("cannot start " + command[0] + ": " + std::strerror(errno) +
                   ". Put the Python that has Torch and nanlocator on PATH.");
}

}  // namespace nanlocator::command
