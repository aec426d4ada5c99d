// An origin's place: the ranks that it may be on, and what follows from them.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "incident/incident.hpp"
#include "nanlocator/verdict/verdict.hpp"

namespace nanlocator::inline locate_room {

/// `candidates`: ascending. Sets the coordinates if there is only one, and the replica if all share
/// it.
[[nodiscard]] Origin make_origin(const Incident& incident, Phase phase, Cause cause,
                                 Confidence confidence, const std::vector<int>& candidates);

/// Replaces the candidates and everything derived from them.
void set_candidates(Origin& origin, const Incident& incident, const std::vector<int>& candidates);

/// Names the parameter that was seen bad.
void set_parameter(Origin& origin, const std::string& name, const Sighting& sighting);

}  // namespace nanlocator::inline locate_room
