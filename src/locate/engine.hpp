// The two ways in which a verdict's origins can be found, while one is to take the other's place.
#pragma once

#include <span>

#include "nanlocator/locate/verdict.hpp"
#include "nanlocator/record/ledger.hpp"

namespace nanlocator::inline locate_room {

enum class Engine {
  rules,   // locate()'s
  events,  // docs/adr/0009-events.md
};

/// Like locate().
[[nodiscard]] Verdict locate_by(Engine engine, std::span<const Ledger> ledgers, int world_size);

}  // namespace nanlocator::inline locate_room
