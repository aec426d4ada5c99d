// The step's re-run as a whole: its outcome, and what that says about every origin.
#pragma once

#include "incident/incident.hpp"
#include "nanlocator/verdict/verdict.hpp"

namespace nanlocator::inline locate_room {

/// The step's re-run, merged over all ranks.
[[nodiscard]] RerunOutcome rerun_of(const Incident& incident);

/// Facts that apply to every origin; `outcome` is rerun_of(incident).
[[nodiscard]] Facts facts_of_rerun(const Incident& incident, const RerunOutcome& outcome);

}  // namespace nanlocator::inline locate_room
