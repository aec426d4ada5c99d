// Two scans of one step become one answer: what its first pass showed, and what its re-run (or the
// same pass, traced) saw being born.
//
// A birth is the sharper scan and takes the place of what it explains. What it does not explain
// stays: a second, independent fault, or one that happened once and was gone in the re-run.
#pragma once

#include <vector>

#include "locate/birth_origins.hpp"
#include "locate/found_origin.hpp"

namespace nanlocator::inline locate_room {

/// Earliest phase first, births before what they do not explain; each with what the re-run says of
/// it. `rerun` is rerun_of(incident).
[[nodiscard]] std::vector<Origin> merge_births(const Incident& incident,
                                               std::vector<FoundOrigin> found,
                                               std::vector<BornOrigin> born,
                                               const RerunOutcome& rerun);

}  // namespace nanlocator::inline locate_room
