// Merges two scans of one step: the findings of its first pass, and the births seen in its re-run
// (or in the same pass, if traced).
//
// A birth is the more precise finding and replaces the findings that it explains. Others remain: a
// second, independent fault, or one that happened once and was gone in the re-run.
#pragma once

#include <vector>

#include "locate/birth_origins.hpp"
#include "locate/found_origin.hpp"

namespace nanlocator::inline locate_room {

/// Earliest phase first, births before findings that they do not explain; each with the re-run's
/// evidence. `rerun` is rerun_of(incident).
[[nodiscard]] std::vector<Origin> merge_births(const Incident& incident,
                                               std::vector<FoundOrigin> found,
                                               std::vector<BornOrigin> born,
                                               const RerunOutcome& rerun);

}  // namespace nanlocator::inline locate_room
