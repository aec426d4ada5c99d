// Diverging training eventually overflows; the place of the overflow is not its cause.
#pragma once

#include <vector>

#include "locate/evidence.hpp"
#include "nanlocator/locate/verdict.hpp"

namespace nanlocator::inline locate_room {

/// Last pass over the origins. An overflow after several steps of climbing maxima of the gradients
/// becomes `divergence`, with its place and confidence. For an overflow after a single jump, the
/// evidence says so. docs/causes.md, "Divergence".
void judge_divergence(const Incident& incident, std::vector<Origin>& origins);

}  // namespace nanlocator::inline locate_room
