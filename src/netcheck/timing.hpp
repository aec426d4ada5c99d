// Times, and outliers among them.
#pragma once

#include <nlohmann/json.hpp>
#include <vector>

namespace nanlocator::netcheck {

/// The lower of the two in the middle, because a slow rank makes two edges slow. 0 if empty.
[[nodiscard]] double median_of(std::vector<double> values);

/// Whether `seconds`, the best of several, is far above the median of the others.
[[nodiscard]] bool is_slow(double seconds, double median);

/// "collectives" of the verdict, from the "timings" of `ranks`: one row per collective, kind of
/// group and dtype, with the latency of its smallest size and the bus bandwidth of its largest,
/// medians over all ranks and groups, and the outliers.
[[nodiscard]] nlohmann::ordered_json timing_table(const nlohmann::ordered_json& ranks);

}  // namespace nanlocator::netcheck
