// Decides whether a step was bad because the program used memory that a transfer between ranks, or
// another of its threads, was still reading or writing.
#pragma once

#include <vector>

#include "locate/evidence.hpp"
#include "nanlocator/locate/verdict.hpp"

namespace nanlocator::inline locate_room {

/// All origins are a race if the step was bad in every re-run except those that waited for each
/// transfer at its start, or if the outcome changed, twice, with the order in which the step and a
/// thread used some memory. An origin that was gone in the re-run or came out of a collective is
/// one if an operator was seen to use its memory or collective too early. Other origins that may be
/// a race get such accesses as facts.
void judge_races(const Incident& incident, const RerunOutcome& rerun, std::vector<Origin>& origins);

}  // namespace nanlocator::inline locate_room
