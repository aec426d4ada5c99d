// RankCoordinates as JSON, the same in every file: docs/formats.md, "Coordinates".
#pragma once

#include <tuple>

#include "files/json_fields.hpp"
#include "nanlocator/map/rank_coordinates.hpp"

namespace nanlocator::inline map_room {

constexpr auto json_fields(const AxisCoordinate*) {
  return std::tuple(JsonField("rank", &AxisCoordinate::rank),
                    JsonField("size", &AxisCoordinate::size, 1));
}

constexpr auto json_fields(const RankCoordinates*) {
  using C = RankCoordinates;
  return std::tuple(JsonField("rank", &C::rank), JsonField("world_size", &C::world_size, 1),
                    JsonField("tp", &C::tp), JsonField("pp", &C::pp), JsonField("dp", &C::dp),
                    JsonField("cp", &C::cp), JsonField("ep", &C::ep), JsonField("host", &C::host),
                    JsonField("local_rank", &C::local_rank), JsonField("device", &C::device));
}

/// Also throws FormatError for a rank that is not below its size.
void read_fields(const JsonObject& object, RankCoordinates& coordinates);

/// Checks coordinates that a caller filled in. Throws UsageError for a rank that is not below its
/// size, or text that is not UTF-8.
void check_coordinates(const RankCoordinates& coordinates);

}  // namespace nanlocator::inline map_room
