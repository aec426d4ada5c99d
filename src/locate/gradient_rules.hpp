// Gradients before any data-parallel collective: a stretch that flowed through backward, or a bad
// gradient by itself. docs/causes.md has the rules.
#pragma once

#include <set>

#include "locate/findings.hpp"

namespace nanlocator::inline locate_room {

/// Replica by replica, phase grad_local.
void judge_local_gradients(Findings& findings);

/// `keys` are bad in `phase`, after the reduction, and not every rank said what it saw before: the
/// same is looked for in what all ranks have in common, with less confidence.
void judge_merged_gradients(Findings& findings, const std::set<ParameterKey>& keys, Phase phase);

}  // namespace nanlocator::inline locate_room
