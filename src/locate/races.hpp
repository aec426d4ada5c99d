// Whether a step was bad because the program used memory that a transfer between ranks, or another
// of its threads, was still reading or writing.
#pragma once

#include <vector>

#include "locate/evidence.hpp"
#include "nanlocator/locate/verdict.hpp"

namespace nanlocator::inline locate_room {

/// Bad in every re-run but those in which each transfer was waited for where it began: all origins
/// are of a race. The same where the outcome changed, twice, with the order in which the step and a
/// thread used some memory. Gone in the re-run, or out of a collective: those are of one whose
/// memory or collective an operator was seen to use too early. To what else may be one, such
/// accesses are added as facts.
void judge_races(const Incident& incident, const RerunOutcome& rerun, std::vector<Origin>& origins);

}  // namespace nanlocator::inline locate_room
