// Ledgers of one step in, one verdict out. Pure: no file, no clock, no order of arrival.
//
// The gradients of a data-parallel replica (all tensor- and pipeline-parallel ranks of one dp rank,
// joined over an expert-parallel group) are computed without the other replicas until the
// data-parallel collective, so the earliest phase that is bad separates a replica's own fault from
// one in the collective or after it. Within a replica, backward order tells a gradient that is bad
// by itself from one that received its NaN from the layers after it. docs/causes.md has each rule.
// Cost: linear in the ledgers' total size.
#pragma once

#include <span>

#include "nanlocator/locate/verdict.hpp"
#include "nanlocator/record/ledger.hpp"

namespace nanlocator::inline locate_room {

/// `ledgers`: at most one per rank, all of one iteration, in any order; ranks without one are
/// silent. `world_size`: how many ranks there should be. The result does not depend on the ledgers'
/// order. Throws UsageError for two ledgers of one rank or a rank outside the world, AgreementError
/// for ledgers of different runs, iterations or parallel sizes.
[[nodiscard]] Verdict locate(std::span<const Ledger> ledgers, int world_size);

}  // namespace nanlocator::inline locate_room
