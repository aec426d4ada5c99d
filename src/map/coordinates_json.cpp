#include "map/coordinates_json.hpp"

#include <array>
#include <utility>

#include "files/utf8.hpp"
#include "nanlocator/error.hpp"

namespace nanlocator::inline map_room {
namespace {

constexpr std::array<std::pair<const char*, AxisCoordinate RankCoordinates::*>, 5> kAxes = {
    {{"tp", &RankCoordinates::tp},
     {"pp", &RankCoordinates::pp},
     {"dp", &RankCoordinates::dp},
     {"cp", &RankCoordinates::cp},
     {"ep", &RankCoordinates::ep}}};

void check_rank(const std::string& what, int rank, int size) {
  if (size < 1) {
    throw UsageError(what + " size " + std::to_string(size) + ": expected at least 1");
  }
  if (rank < 0 || rank >= size) {
    throw UsageError(what + " rank " + std::to_string(rank) + ": expected 0 to " +
                     std::to_string(size - 1) + ", as there are " + std::to_string(size));
  }
}

}  // namespace

void read_fields(const JsonObject& object, RankCoordinates& coordinates) {
  read_fields(object, coordinates, json_fields(&coordinates));
  try {
    check_coordinates(coordinates);
  } catch (const UsageError& error) {
    throw FormatError(object.where() + ": " + error.what());
  }
}

void check_coordinates(const RankCoordinates& coordinates) {
  check_rank("global", coordinates.rank, coordinates.world_size);
  for (const auto& [name, axis] : kAxes) {
    check_rank(name, (coordinates.*axis).rank, (coordinates.*axis).size);
  }
  if (coordinates.local_rank < 0) {
    throw UsageError("local rank " + std::to_string(coordinates.local_rank) +
                     ": expected 0 or more");
  }
  if (!is_utf8(coordinates.host)) throw UsageError("the host name is not UTF-8");
  if (!is_utf8(coordinates.device)) throw UsageError("the device name is not UTF-8");
}

}  // namespace nanlocator::inline map_room
