// The kinds of facts about an operator that used memory concurrently with something else.
#pragma once

#include "nanlocator/record/unordered_access.hpp"
#include "nanlocator/verdict/fact.hpp"

namespace nanlocator::inline verdict_room {

/// For a write and for a read, by the concurrent user of the memory.
inline constexpr FactKind kUnordered[kNames<Concurrent>.size()][2] = {
    {FactKind::wrote_during_transfer, FactKind::read_during_transfer},
    {FactKind::wrote_beside_thread, FactKind::read_beside_thread},
    {FactKind::wrote_beside_stream, FactKind::read_beside_stream},
};

[[nodiscard]] constexpr FactKind unordered_kind(Concurrent other, bool is_write) {
  return kUnordered[static_cast<std::size_t>(other)][is_write ? 0 : 1];
}

/// The write, if there is one, else the read.
[[nodiscard]] inline const Fact* find_unordered(const Facts& facts, Concurrent other) noexcept {
  const Fact* const write = find_fact(facts, unordered_kind(other, true));
  return write != nullptr ? write : find_fact(facts, unordered_kind(other, false));
}

}  // namespace nanlocator::inline verdict_room
