// An operator that used memory which a transfer between ranks was still reading or writing, or
// which another thread of the program uses: nobody had waited for it, so what either of them gets
// depends on who comes first.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "nanlocator/record/birth.hpp"
#include "nanlocator/record/sighting.hpp"

namespace nanlocator {

struct UnorderedAccess {
  bool is_write = false;  // by the operator; else it read what the transfer was to bring
  std::string transfer;   // "c10d::allreduce_"; the operator of the other thread
  /// Of another thread of the program; noted where the order of the two makes the outcome.
  bool is_threads = false;
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

}  // namespace nanlocator
