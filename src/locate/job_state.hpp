// What has become of the job, and from which checkpoint it can go on.
#pragma once

#include <vector>

#include "locate/evidence.hpp"
#include "nanlocator/locate/verdict.hpp"

namespace nanlocator::inline locate_room {

/// Of origins that are complete: cause and facts are final.
[[nodiscard]] JobState job_state_of(const Incident& incident, const std::vector<Origin>& origins,
                                    const RerunOutcome& rerun);

}  // namespace nanlocator::inline locate_room
