// Births that came out of a collective of the re-run.
#pragma once

#include "incident/incident.hpp"
#include "locate/birth_facts.hpp"

namespace nanlocator::inline locate_room {

/// True if the first pass judges the result that this rank received: it scanned crossings of the
/// group, or the group is unknown. False for an all-gather into which every member put finite
/// values, and whose result the first pass did not see.
[[nodiscard]] bool is_judged_in_first_pass(const Incident& incident, const Root& receipt);

}  // namespace nanlocator::inline locate_room
