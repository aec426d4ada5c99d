// Checks collectives that should give every member the same result: in a pass of the re-run the
// members report their results (PeerQuestion).
#pragma once

#include <vector>

#include "locate/evidence.hpp"
#include "nanlocator/locate/verdict.hpp"

namespace nanlocator::inline locate_room {

/// Adds to origins on one rank whether that rank received the same as the other members of its
/// groups, or else the first collective of the microbatch whose result differed. If the values of
/// that one are far apart, it is the cause, and the operator was only the first that its result
/// made bad.
void compare_collective_results(const Incident& incident, std::vector<Origin>& origins);

}  // namespace nanlocator::inline locate_room
