// Re-runs of a bad step that deliberately change one thing, and their outcomes.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "nanlocator/files/names.hpp"

namespace nanlocator::inline record_room {

/// What a re-run deliberately changed.
enum class RerunVariant : std::uint8_t {
  eager,            // compiled parts were executed operator by operator
  compiled,         // after `eager` was finite: compiled as in the first pass
  constant_memory,  // memory that operators allocate was filled with 1
  nan_memory,       // the same with NaN
  serialised,       // each transfer between ranks was awaited where it began
  reordered,        // an operator ran after the one of another thread that it had preceded
  sanitised,        // under PyTorch's stream sanitizer, which observes each operator from Python
};
[[nodiscard]] constexpr auto names_of(RerunVariant) {
  return std::to_array<std::string_view>({"eager", "compiled", "constant_memory", "nan_memory",
                                          "serialised", "reordered", "sanitised"});
}

struct VariantOutcome {
  RerunVariant variant = RerunVariant::eager;
  bool is_bad = false;  // on any rank
  friend bool operator==(const VariantOutcome&, const VariantOutcome&) = default;
};

}  // namespace nanlocator::inline record_room
