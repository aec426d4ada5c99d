// Evidence on a weight that was bad before the step: its copies on other ranks, the optimizer's
// state for it, and when it was last seen finite.
#pragma once

#include <vector>

#include "locate/findings.hpp"

namespace nanlocator::inline locate_room {

/// Adds to each origin that is a bad weight whether its copies (data-parallel copies,
/// tensor-parallel duplicates, tied embeddings) are clean, bad or not scanned, unless already
/// known, and how the preceding update is involved.
void judge_bad_weights(const Findings& findings, std::vector<Origin>& origins);

}  // namespace nanlocator::inline locate_room
