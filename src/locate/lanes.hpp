// Arranges ranks as lanes: the stages that backward visits in sequence (backward_flow.hpp).
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "locate/backward_flow.hpp"
#include "locate/evidence.hpp"

namespace nanlocator::inline locate_room {

/// Selects the bad parameters of a lane; the others count as not scanned.
using BadFilter = std::function<bool(const RankEvidence&, const BadParameter&)>;

/// One lane per (dp, cp) among `places`, ascending. The places must outlive the lanes.
[[nodiscard]] std::vector<Lane> make_lanes(const Incident& incident,
                                           std::span<const Place* const> places, Phase phase);

/// All `places` as one lane. A parameter is bad if it is bad on some data-parallel rank, clean if a
/// rank that scanned it found it clean.
[[nodiscard]] Lane make_merged_lane(const Incident& incident, std::span<const Place* const> places,
                                    Phase phase, const BadFilter& keep);

}  // namespace nanlocator::inline locate_room
