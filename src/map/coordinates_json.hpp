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

/// Throws FormatError also for a rank that is not below its size.
void read_fields(const JsonObject& object, RankCoordinates& coordinates);

/// What is wrong with coordinates that were filled in by hand: a rank that is not below its size,
/// text that is not UTF-8. Throws UsageError.
void check_coordinates(const RankCoordinates& coordinates);

}  // namespace nanlocator::inline map_room
