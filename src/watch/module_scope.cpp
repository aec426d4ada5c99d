#include "nanlocator/watch/module_scope.hpp"

#include <mutex>
#include <unordered_set>
#include <vector>

namespace nanlocator::inline watch_room {
namespace {

std::vector<ModulePath>& stack() {
  thread_local std::vector<ModulePath> modules;
  return modules;
}

}  // namespace

ModulePath intern_module_path(std::string_view path) {
  // Never destroyed: autograd's threads may ask for a name while the process ends.
  static auto& mutex = *new std::mutex;
  static auto& paths = *new std::unordered_set<std::string>;  // its elements never move
  const std::lock_guard lock(mutex);
  return &*paths.emplace(path).first;
}

std::size_t enter_module(ModulePath path) {
  const auto depth = stack().size();
  stack().push_back(path);
  return depth;
}

std::size_t module_depth() noexcept {
  return stack().size();
}

void leave_modules(std::size_t depth) noexcept {
  if (depth < stack().size()) stack().resize(depth);
}

ModulePath current_module() noexcept {
  return stack().empty() ? nullptr : stack().back();
}

}  // namespace nanlocator::inline watch_room
