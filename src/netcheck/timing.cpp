#include "netcheck/timing.hpp"

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <utility>

namespace nanlocator::netcheck {
namespace {

using Json = nlohmann::ordered_json;

// A rank or an edge is slow if its best time exceeds both limits; a busy host adds far less to a
// best time of many.
constexpr double kSlowFactor = 5;
constexpr double kSlowSeconds = 0.010;

struct Row {
  std::map<std::int64_t, std::map<int, double>> seconds;  // bytes, rank
  std::map<std::int64_t, double> bus_factor;
};

double median_over(const std::map<int, double>& values) {
  std::vector<double> all;
  for (const auto& [rank, value] : values) all.push_back(value);
  return median_of(std::move(all));
}

}  // namespace

double median_of(std::vector<double> values) {
  if (values.empty()) return 0;
  std::ranges::sort(values);
  return values[(values.size() - 1) / 2];
}

bool is_slow(double seconds, double median) {
  return seconds > kSlowFactor * median && seconds - median > kSlowSeconds;
}

Json timing_table(const Json& ranks) {
  std::map<std::vector<std::string>, Row> rows;
  std::vector<std::vector<std::string>> order;
  for (const auto& rank : ranks) {
    for (const auto& timing : rank.value("timings", Json::array())) {
      std::vector<std::string> key = {timing.at("collective"), timing.at("group_kind"),
                                      timing.at("dtype")};
      if (!rows.contains(key)) order.push_back(key);
      auto& row = rows[key];
      const std::int64_t bytes = timing.at("bytes");
      row.seconds[bytes][rank.at("rank")] = timing.at("seconds");
      row.bus_factor[bytes] = timing.at("bus_factor");
    }
  }
  auto table = Json::array();
  for (const auto& key : order) {
    const auto& row = rows.at(key);
    const auto& [smallest, small_seconds] = *row.seconds.begin();
    const auto& [largest, large_seconds] = *row.seconds.rbegin();
    const double latency = median_over(small_seconds);
    const double time = median_over(large_seconds);
    std::vector<int> outliers;
    for (const auto& [rank, seconds] : large_seconds) {
      if (is_slow(seconds, time)) outliers.push_back(rank);
    }
    table.push_back(
        {{"collective", key[0]},
         {"group", key[1]},
         {"dtype", key[2]},
         {"smallest_bytes", smallest},
         {"latency_seconds", latency},
         {"largest_bytes", largest},
         {"bus_bytes_per_second",
          time > 0 ? row.bus_factor.at(largest) * static_cast<double>(largest) / time : 0},
         {"outliers", outliers}});
  }
  return table;
}

}  // namespace nanlocator::netcheck
