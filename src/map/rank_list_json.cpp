#include "map/rank_list_json.hpp"

#include <cstdint>
#include <utility>
#include <vector>

#include "nanlocator/error.hpp"

namespace nanlocator::inline map_room {
namespace {

/// A list of a few bytes may describe as many ranks as an int can count.
constexpr int kLargestRank = (1 << 24) - 1;

}  // namespace

nlohmann::ordered_json value_to_json(const RankList& list) {
  auto json = nlohmann::ordered_json::array();
  for (const auto& [first, last, step] : list.runs()) {
    if ((last - first) / step >= 3) {
      json.push_back({first, last, step});
    } else {
      for (std::int64_t rank = first; rank <= last; rank += step) json.push_back(rank);
    }
  }
  return json;
}

void read_value(const JsonMember& from, JsonRange /*range*/, RankList& list) {
  if (!from.value().is_array()) from.throw_unexpected("an array of ranks");
  std::vector<RankRun> runs;
  std::vector<int> singles;  // since the last progression
  const auto close_singles = [&] {
    const RankList list_of_singles(std::exchange(singles, {}));
    runs.insert(runs.end(), list_of_singles.runs().begin(), list_of_singles.runs().end());
  };
  for (std::size_t i = 0; i < from.value().size(); ++i) {
    const JsonMember item = from.element(i);
    const auto rank_in = [](const JsonMember& member) {
      return static_cast<int>(member.integer(0, kLargestRank));
    };
    if (item.value().is_number()) {
      singles.push_back(rank_in(item));
      continue;
    }
    if (!item.value().is_array() || item.value().size() != 3) {
      item.throw_unexpected("a rank, or [first, last, step]");
    }
    close_singles();
    runs.push_back({rank_in(item.element(0)), rank_in(item.element(1)), rank_in(item.element(2))});
  }
  close_singles();
  try {
    list = RankList::of_runs(std::move(runs));
  } catch (const UsageError& error) {
    throw FormatError(from.where() + ": " + error.what());
  }
}

}  // namespace nanlocator::inline map_room
