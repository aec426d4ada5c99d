// Merges the ledgers of one step into one verdict. Pure: reads no file and no clock, and ignores
// order of arrival.
//
// The gradients of a data-parallel replica (all tensor- and pipeline-parallel ranks of one dp rank,
// joined over an expert-parallel group) are computed without the other replicas until the
// data-parallel collective. So the earliest bad phase separates a fault within a replica from one
// in the collective or after it. Within a replica, backward order separates a gradient that is bad
// on its own from one that received its NaN from the layers after it. docs/causes.md has the rules.
// Cost: linear in the ledgers' total size.
#pragma once

#include <span>

#include "nanlocator/record/ledger.hpp"
#include "nanlocator/verdict/verdict.hpp"

namespace nanlocator::inline locate_room {

/// `ledgers`: at most one per rank, all of one iteration, in any order; ranks without one are
/// silent. `world_size`: the job's number of ranks. The result does not depend on the ledgers'
/// order. Throws UsageError for two ledgers of one rank or a rank outside the world, AgreementError
/// for ledgers of different runs, iterations or parallel sizes.
[[nodiscard]] Verdict locate(std::span<const Ledger> ledgers, int world_size);

}  // namespace nanlocator::inline locate_room
