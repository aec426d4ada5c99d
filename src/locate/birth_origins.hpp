// Builds origins from the ledgers' births: births that the trace or the watch saw, ordered by cause
// and effect, each with its cause.
//
// A birth is local to its rank and found by rules in docs/causes.md. Here births are followed to
// their roots, and the same birth on several ranks becomes one origin. A bad result of a collective
// counts only if no rank saw a bad input to it.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "locate/evidence.hpp"
#include "nanlocator/locate/verdict.hpp"

namespace nanlocator::inline locate_room {

/// An origin whose birth was seen, with data that decides which other origins it explains.
struct BornOrigin {
  Origin origin;
  bool is_received = false;         // result of a collective
  bool is_opaque = false;           // computed off the dispatcher, as far as the trace could follow
  std::set<int> microbatches = {};  // those of the birth; empty: unknown
  std::set<std::string> reached = {};          // parameters whose gradients it made bad
  std::vector<int> receivers = {};             // ranks that received it from a collective
  std::map<int, std::int64_t> positions = {};  // of each rank's first such birth, where known
};

/// In the order of the ranks' ledgers; empty if no ledger has a birth. A collective's bad result is
/// an origin only if no rank saw another birth and `has_crossings` is false: scanned crossings show
/// more about a collective than its receivers do.
[[nodiscard]] std::vector<BornOrigin> origins_of_births(const Incident& incident,
                                                        bool has_crossings);

}  // namespace nanlocator::inline locate_room
