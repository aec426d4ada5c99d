// Gradients that an earlier step left behind, and to which this one adds.
#pragma once

#include <vector>

#include "locate/evidence.hpp"
#include "nanlocator/locate/verdict.hpp"

namespace nanlocator::inline locate_room {

/// A step that adds to bad gradients of an earlier one has bad gradients, whatever it computes:
/// its origins of unknown cause among gradients, and those that read these gradients, become one
/// origin, `left_gradients`.
void judge_left_gradients(const Incident& incident, std::vector<Origin>& origins);

}  // namespace nanlocator::inline locate_room
