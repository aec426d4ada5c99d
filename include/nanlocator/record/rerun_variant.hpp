// Re-runs of a bad step that change one thing on purpose, and how they came out.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "nanlocator/files/names.hpp"

namespace nanlocator::inline record_room {

/// What a re-run changed on purpose.
enum class RerunVariant : std::uint8_t {
  eager,            // compiled parts were executed operator by operator
  compiled,         // after that one had come out finite: as in the first pass
  constant_memory,  // what operators allocate held 1 until it was written
  nan_memory,       // the same, NaN
  serialised,       // each transfer between ranks was waited for where it began
  reordered,        // an operator came after the one of another thread that it had come before
  sanitised,        // under PyTorch's stream sanitizer, which looks at each operator from Python
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
