// Of a weight that was bad before the step: what its copies on other ranks are like, what the
// optimizer keeps of it, and when it was last seen finite.
#pragma once

#include <vector>

#include "locate/findings.hpp"

namespace nanlocator::inline locate_room {

/// Adds to each origin that is a bad weight whether the copies (data-parallel ones, tensor-parallel
/// duplicates, tied embeddings) are clean, bad or not scanned, unless that is known already; and
/// what the update before it has to do with it.
void judge_bad_weights(const Findings& findings, std::vector<Origin>& origins);

}  // namespace nanlocator::inline locate_room
