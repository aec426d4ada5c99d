// An origin as the first pass over the step shows it, before the births of a re-run are merged in.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "locate/evidence.hpp"
#include "nanlocator/locate/verdict.hpp"

namespace nanlocator::inline locate_room {

/// What the origin was seen in: decides what may explain it or take its place.
enum class FoundIn : std::uint8_t {
  weight,    // a parameter before the pass
  sent,      // what a rank put into a collective or message, or its loss
  received,  // what came out of one, though everything put in was finite
  unseen,    // what came out of one into which a rank put what nobody knows
  flow,      // a stretch of gradients
  isolated,  // a gradient by itself
  late,      // a gradient that was clean on every holder when backward had ended
  other,     // the norm's value, the update, a loss
};

struct FoundOrigin {
  Origin origin;
  FoundIn found_in = FoundIn::other;
  std::set<int> microbatches;  // in which it was seen; empty: not known
  std::string
      first_bad_gradient;  // in backward order, of a fault in backward that was seen crossing
};

/// `candidates`: ascending. Sets the coordinates where there is one, and the replica they share.
[[nodiscard]] Origin make_origin(const Incident& incident, Phase phase, Cause cause,
                                 Confidence confidence, const std::vector<int>& candidates);

/// Replaces the candidates, and what follows from them.
void set_candidates(Origin& origin, const Incident& incident, const std::vector<int>& candidates);

}  // namespace nanlocator::inline locate_room
