// Rules for gradients before any data-parallel collective: a stretch that flowed through backward,
// or an isolated bad gradient. docs/causes.md has them.
#pragma once

#include <set>

#include "locate/findings.hpp"

namespace nanlocator::inline locate_room {

/// Judges phase grad_local, replica by replica.
void judge_local_gradients(Findings& findings);

/// `keys` are bad in `phase`, after the reduction, and not every rank reported the phase before.
/// Looks for the same in the state common to all ranks, with less confidence.
void judge_merged_gradients(Findings& findings, const std::set<ParameterKey>& keys, Phase phase);

}  // namespace nanlocator::inline locate_room
