#include "nanlocator/map/rank_coordinates.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <string_view>
#include <system_error>

#include "files/text.hpp"
#include "nanlocator/error.hpp"

namespace nanlocator::inline map_room {
namespace {

/// POSIX allows longer names; Linux does not (HOST_NAME_MAX is 64).
std::string host_name() {
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0) return {};
  return name.data();
}

int local_rank_from_environment() {
  const char* const variable = std::getenv("LOCAL_RANK");
  if (variable == nullptr) return 0;
  const std::string_view text = variable;
  int local_rank = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), local_rank);
  if (error != std::errc() || end != text.data() + text.size() || local_rank < 0) {
    throw UsageError("the environment variable LOCAL_RANK is \"" + std::string(text) +
                     "\", expected a number of 0 or more as torchrun sets it");
  }
  return local_rank;
}

}  // namespace

std::string RankCoordinates::file_suffix() const {
  std::string suffix = "tp" + std::to_string(tp.rank) + "pp" + std::to_string(pp.rank) + "dp" +
                       std::to_string(dp.rank);
  if (cp.size > 1) suffix += "cp" + std::to_string(cp.rank);
  return suffix;
}

std::string RankCoordinates::describe_axes() const {
  std::string axes;
  const auto add_axis = [&](const char* name, const AxisCoordinate& axis) {
    if (axis.size > 1) append_item(axes, name + std::to_string(axis.rank), " ");
  };
  add_axis("tp", tp);
  add_axis("pp", pp);
  add_axis("dp", dp);
  add_axis("cp", cp);
  add_axis("ep", ep);
  return axes;
}

std::string RankCoordinates::describe() const {
  std::string place = describe_axes();
  if (!host.empty()) append_item(place, "host " + host);
  if (!device.empty()) append_item(place, device);
  const std::string name = "rank " + std::to_string(rank);
  return place.empty() ? name : name + " (" + place + ")";
}

RankCoordinates data_parallel_coordinates(int rank, int world_size) {
  if (world_size < 1 || rank < 0 || rank >= world_size) {
    throw UsageError("rank " + std::to_string(rank) + " of " + std::to_string(world_size) +
                     " ranks: expected a rank from 0 to one less than the number of ranks");
  }
  RankCoordinates coordinates;
  coordinates.rank = rank;
  coordinates.world_size = world_size;
  coordinates.dp = {.rank = rank, .size = world_size};
  coordinates.host = host_name();
  coordinates.local_rank = local_rank_from_environment();
  coordinates.device = "cpu";
  return coordinates;
}

std::string describe_ranks(std::vector<int> ranks) {
  std::ranges::sort(ranks);
  std::string text;
  for (std::size_t first = 0; first < ranks.size();) {
    std::size_t last = first;
    while (last + 1 < ranks.size() && ranks[last + 1] - ranks[last] <= 1) ++last;
    append_item(text, std::to_string(ranks[first]));
    if (ranks[last] != ranks[first]) text.append("-").append(std::to_string(ranks[last]));
    first = last + 1;
  }
  return text;
}

std::string ranks_text(const std::vector<int>& ranks) {
  return (ranks.size() == 1 ? "rank " : "ranks ") + describe_ranks(ranks);
}

}  // namespace nanlocator::inline map_room
