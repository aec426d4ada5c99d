// Origins out of what crossed between ranks: the bad values that no earlier one explains.
#pragma once

#include <set>
#include <vector>

#include "locate/crossings.hpp"
#include "locate/found_origin.hpp"

namespace nanlocator::inline locate_room {

struct BoundaryOrigins {
  std::vector<FoundOrigin> origins;  // in the order of phase, microbatch and rank
  /// Replicas (Incident::replica_of) whose bad gradients these origins explain.
  std::set<int> replicas;
  std::set<int> badly_reduced;  // ranks whose gradients a reduction among the origins has spoiled
  Facts facts;                  // of the verdict as a whole
};

/// Empty where no rank scanned what crosses.
[[nodiscard]] BoundaryOrigins find_boundary_origins(const Incident& incident,
                                                    const Crossings& crossings);

}  // namespace nanlocator::inline locate_room
