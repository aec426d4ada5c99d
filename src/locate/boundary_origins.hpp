// Origins from transfers between ranks: the bad values that no earlier one explains.
#pragma once

#include <set>
#include <vector>

#include "locate/crossings.hpp"
#include "locate/found_origin.hpp"

namespace nanlocator::inline locate_room {

struct BoundaryOrigins {
  std::vector<FoundOrigin> origins;  // ordered by phase, microbatch and rank
  /// Replicas (Incident::replica_of) whose bad gradients these origins explain.
  std::set<int> replicas;
  std::set<int> badly_reduced;  // ranks whose gradients a reduction among the origins spoiled
  Facts facts;                  // about the whole verdict
};

/// Empty if no rank scanned crossings.
[[nodiscard]] BoundaryOrigins find_boundary_origins(const Incident& incident,
                                                    const Crossings& crossings);

}  // namespace nanlocator::inline locate_room
