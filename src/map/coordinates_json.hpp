// RankCoordinates as JSON, the same in every file: docs/formats.md, "Coordinates".
#pragma once

#include <nlohmann/json.hpp>

#include "files/strict_json.hpp"
#include "nanlocator/map/rank_coordinates.hpp"

namespace nanlocator {

/// {"rank", "world_size", "tp": {"rank", "size"}, "pp", "dp", "cp", "ep", "host", "local_rank",
/// "device"}.
[[nodiscard]] nlohmann::ordered_json coordinates_to_json(const RankCoordinates& coordinates);

/// Throws FormatError for a missing key, a wrong type, or a rank that is not below its size.
[[nodiscard]] RankCoordinates coordinates_from_json(const JsonObject& object);

/// What is wrong with coordinates that were filled in by hand: a rank that is not below its size,
/// text that is not UTF-8. Throws UsageError.
void check_coordinates(const RankCoordinates& coordinates);

}  // namespace nanlocator
