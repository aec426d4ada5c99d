// Rules for gradients that were clean before the data-parallel collective, or before the optimizer
// reads them. docs/causes.md has them.
#pragma once

#include "locate/findings.hpp"

namespace nanlocator::inline locate_room {

/// Judges phase grad_reduced; call after judge_local_gradients.
void judge_reduced_gradients(Findings& findings);
/// Judges phase grad_norm; call after judge_reduced_gradients.
void judge_norm_gradients(Findings& findings);

}  // namespace nanlocator::inline locate_room
