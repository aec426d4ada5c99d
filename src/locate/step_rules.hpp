// What stands at a step's ends: parameters before it and after it, the norm, the loss.
// docs/causes.md has the rules.
#pragma once

#include "locate/findings.hpp"

namespace nanlocator::inline locate_room {

/// Phase params_before.
void judge_weights(Findings& findings);
/// Phase params_after, where every gradient is finite.
void judge_updated_parameters(Findings& findings);
/// A norm that is not finite, where every gradient is.
void judge_norm_value(Findings& findings);
/// A loss that is bad though no gradient is; last, where nothing else was found.
void judge_losses(Findings& findings);

}  // namespace nanlocator::inline locate_room
