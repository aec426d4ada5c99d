// An unordered access: an operator used memory that another part of the program used at the same
// time (a transfer between ranks that was still reading or writing, another thread, another stream
// of the device). Neither waited for the other, so the values depend on timing.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "nanlocator/files/names.hpp"
#include "nanlocator/record/birth.hpp"
#include "nanlocator/record/sighting.hpp"

namespace nanlocator::inline record_room {

/// Other users of memory while the operators of a step run.
enum class Concurrent : std::uint8_t {
  transfer,  // between ranks
  thread,    // of the program
  stream,    // of the device
};
[[nodiscard]] constexpr auto names_of(Concurrent) {
  return std::to_array<std::string_view>({"transfer", "thread", "stream"});
}

struct UnorderedAccess {
  bool is_write = false;  // by the operator; otherwise it read memory that the other was writing
  std::string transfer;   // "c10d::allreduce_"; or the operator of the other thread or stream
  /// For a thread: noted if the order of the two decides the outcome. For a stream: as reported by
  /// PyTorch's stream sanitizer.
  Concurrent other = Concurrent::transfer;
  std::string op;
  std::string module;  // of the operator; "" if unknown
  Phase phase = Phase::forward;
  std::optional<int> microbatch;
  std::string parameter;                  // the owner of that weight or gradient; "" if none
  std::optional<CodeLine> transfer_code;  // the program's line that began the transfer
  std::optional<CodeLine> code;           // the line that called the operator
  std::int64_t count = 1;                 // number of such accesses in the pass
  friend bool operator==(const UnorderedAccess&, const UnorderedAccess&) = default;
};

}  // namespace nanlocator::inline record_room
