// An origin as found in the step's first pass, before a re-run's births are merged in.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "locate/evidence.hpp"
#include "nanlocator/locate/verdict.hpp"

namespace nanlocator::inline locate_room {

/// Where the origin was seen: decides which origins may explain or replace it.
enum class FoundIn : std::uint8_t {
  weight,    // a parameter before the pass
  sent,      // a rank's input to a collective or message, or its loss
  received,  // the bad result of one with finite inputs
  unseen,    // the bad result of one with an unknown input
  flow,      // a stretch of gradients
  isolated,  // a single gradient
  late,      // a gradient that was clean on every holder at the end of backward
  other,     // the norm's value, the update, a loss
};

struct FoundOrigin {
  Origin origin;
  FoundIn found_in = FoundIn::other;
  std::set<int> microbatches;  // those of the sightings; empty: unknown
  /// Of the first sighting, alike on its ranks, which run in lockstep.
  std::optional<std::int64_t> position;
  std::string
      first_bad_gradient;  // in backward order, for a fault in backward that was seen in a crossing
};

/// `candidates`: ascending. Sets the coordinates if there is only one, and the replica if all share
/// it.
[[nodiscard]] Origin make_origin(const Incident& incident, Phase phase, Cause cause,
                                 Confidence confidence, const std::vector<int>& candidates);

/// Replaces the candidates and everything derived from them.
void set_candidates(Origin& origin, const Incident& incident, const std::vector<int>& candidates);

}  // namespace nanlocator::inline locate_room
