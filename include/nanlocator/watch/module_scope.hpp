// Which module is running on this thread: the stack that the trace and the watch read.
//
// Python's integration keeps it by wrapping nn.Module.__call__; a C++ program may keep it by hand:
//     nanlocator::ModuleScope scope("decoder.layers.3");
// Paths are interned for the life of the process. Every function works on the calling thread's own
// stack and takes no lock but for a path that is new.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace nanlocator::inline watch_room {

/// An interned path; valid for the life of the process. Two equal paths have one address.
using ModulePath = const std::string*;
[[nodiscard]] ModulePath intern_module_path(std::string_view path);

/// Pushes `path`; returns the depth before, for `leave_modules`.
std::size_t enter_module(ModulePath path);
[[nodiscard]] std::size_t module_depth() noexcept;
/// Back to `depth`, whatever was entered since (an exception may have left frames behind).
void leave_modules(std::size_t depth) noexcept;
/// The innermost module; nullptr outside any.
[[nodiscard]] ModulePath current_module() noexcept;

class ModuleScope {
 public:
  explicit ModuleScope(std::string_view path) : depth_(enter_module(intern_module_path(path))) {}
  ~ModuleScope() { leave_modules(depth_); }
  ModuleScope(const ModuleScope&) = delete;  // strictly nested
  ModuleScope& operator=(const ModuleScope&) = delete;

 private:
  std::size_t depth_;
};

}  // namespace nanlocator::inline watch_room
