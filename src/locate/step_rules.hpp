// Rules for a step's ends: parameters before and after it, the norm, the loss. docs/causes.md has
// them.
#pragma once

#include "locate/findings.hpp"

namespace nanlocator::inline locate_room {

/// Judges phase params_before.
void judge_weights(Findings& findings);
/// Judges phase params_after, if every gradient is finite.
void judge_updated_parameters(Findings& findings);
/// Judges a non-finite norm of finite gradients.
void judge_norm_value(Findings& findings);
/// Judges a bad loss with finite gradients; runs last, if nothing else was found.
void judge_losses(Findings& findings);

}  // namespace nanlocator::inline locate_room
