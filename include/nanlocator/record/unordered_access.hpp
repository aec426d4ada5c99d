// An operator that used memory which something else of the program uses at the same time: a
// transfer between ranks that was still reading or writing it, another thread, another stream of
// the device. Nobody had waited for it, so what either of them gets depends on who comes first.
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

/// What else uses memory while the operators of a step run.
enum class Concurrent : std::uint8_t {
  transfer,  // between ranks
  thread,    // of the program
  stream,    // of the device
};
[[nodiscard]] constexpr auto names_of(Concurrent) {
  return std::to_array<std::string_view>({"transfer", "thread", "stream"});
}

struct UnorderedAccess {
  bool is_write = false;  // by the operator; else it read what the other was to bring
  std::string transfer;   // "c10d::allreduce_"; the operator of the other thread or stream
  /// A thread's: noted where the order of the two makes the outcome. A stream's: as PyTorch's
  /// stream sanitizer reports it.
  Concurrent other = Concurrent::transfer;
  std::string op;
  std::string module;  // of the operator; "" where unknown
  Phase phase = Phase::forward;
  std::optional<int> microbatch;
  std::string parameter;                  // whose weight or gradient lies there; "" for none
  std::optional<CodeLine> transfer_code;  // the program's line that began the transfer
  std::optional<CodeLine> code;           // the one that called the operator
  std::int64_t count = 1;                 // such accesses in the pass
  friend bool operator==(const UnorderedAccess&, const UnorderedAccess&) = default;
};

}  // namespace nanlocator::inline record_room
