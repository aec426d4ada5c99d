// The job's state after a finding, and the checkpoint from which it can continue.
#pragma once

#include <vector>

#include "incident/incident.hpp"
#include "nanlocator/verdict/verdict.hpp"

namespace nanlocator::inline locate_room {

/// The origins must be complete: cause and facts are final.
[[nodiscard]] JobState job_state_of(const Incident& incident, const std::vector<Origin>& origins,
                                    const RerunOutcome& rerun);

}  // namespace nanlocator::inline locate_room
