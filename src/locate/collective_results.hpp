// Whether collectives that give every member the same did, where something was born: in a pass of
// the re-run the members report what they got (PeerQuestion).
#pragma once

#include <vector>

#include "locate/evidence.hpp"
#include "nanlocator/locate/verdict.hpp"

namespace nanlocator::inline locate_room {

/// Adds to origins on one rank whether that rank got the same as the other members of its groups,
/// or the first collective of the microbatch in which it did not: where that one's values are far
/// apart it is the cause, and the operator only the first that its result made bad.
void compare_collective_results(const Incident& incident, std::vector<Origin>& origins);

}  // namespace nanlocator::inline locate_room
