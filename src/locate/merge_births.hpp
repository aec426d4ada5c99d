// Two looks at one step become one answer: what its first pass showed, and what its repeat (or the
// same pass, traced) saw being born.
//
// A birth is the sharper look and takes the place of what it explains. What it does not explain
// stays: a second, independent fault, or one that happened once and was gone in the repeat.
#pragma once

#include <vector>

#include "locate/birth_origins.hpp"
#include "locate/found_origin.hpp"

namespace nanlocator {

/// Earliest phase first, births before what they do not explain; each with what the repeat says of
/// it. `rerun` is rerun_of(incident).
[[nodiscard]] std::vector<Origin> merge_births(const Incident& incident,
                                               std::vector<FoundOrigin> found,
                                               std::vector<BornOrigin> born,
                                               const RerunOutcome& rerun);

}  // namespace nanlocator
