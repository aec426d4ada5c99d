// The command that tells whether it was the machine: `nanlocator netcheck` on the ranks, hosts and
// layout of an incident.
#pragma once

#include <string>
#include <vector>

#include "locate/evidence.hpp"
#include "nanlocator/locate/verdict.hpp"

namespace nanlocator {

/// As a person types it, without a line end; "" where there are no two ranks to check.
[[nodiscard]] std::string machine_check_command(const std::vector<RankCoordinates>& ranks);

/// Ends the action of each origin whose cause may be the machine's with that command.
void add_machine_check(const Incident& incident, std::vector<Origin>& origins);

}  // namespace nanlocator
