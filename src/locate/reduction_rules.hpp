// Gradients after the data-parallel collective, and where the optimizer reads them: what was clean
// before. docs/causes.md has the rules.
#pragma once

#include "locate/findings.hpp"

namespace nanlocator::inline locate_room {

/// Phase grad_reduced; after judge_local_gradients.
void judge_reduced_gradients(Findings& findings);
/// Phase grad_norm; after judge_reduced_gradients.
void judge_norm_gradients(Findings& findings);

}  // namespace nanlocator::inline locate_room
