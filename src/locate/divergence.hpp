// Training that diverges overflows in the end; the place of the overflow is not its cause.
#pragma once

#include <vector>

#include "locate/evidence.hpp"
#include "nanlocator/locate/verdict.hpp"

namespace nanlocator::inline locate_room {

/// Last pass over the origins: an overflow before which the largest gradients had climbed for
/// several steps becomes `divergence`, with its place and its confidence; of one that came in a
/// single jump the evidence says so. docs/causes.md, "Divergence".
void judge_divergence(const Incident& incident, std::vector<Origin>& origins);

}  // namespace nanlocator::inline locate_room
