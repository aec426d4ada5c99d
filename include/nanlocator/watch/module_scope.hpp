// The stack of modules running on this thread, read by the trace and the watch.
//
// The Python integration maintains it by wrapping nn.Module.__call__; a C++ program may do so by
// hand:
//     nanlocator::ModuleScope scope("decoder.layers.3");
// Paths are interned for the life of the process. Every function works on the calling thread's own
// stack; only interning takes a lock.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace nanlocator::inline watch_room {

/// An interned path; valid for the life of the process. Equal paths have the same address.
using ModulePath = const std::string*;
[[nodiscard]] ModulePath intern_module_path(std::string_view path);

/// Pushes `path`; returns the previous depth, for `leave_modules`.
std::size_t enter_module(ModulePath path);
[[nodiscard]] std::size_t module_depth() noexcept;
/// Pops down to `depth` (an exception may have left frames behind).
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
