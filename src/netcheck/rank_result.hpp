// The result that one rank wrote at the end of a network check.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "netcheck/attribution.hpp"

namespace nanlocator::netcheck {

struct RankResult {
  int rank = 0;
  std::string host;
  int local_rank = 0;
  bool has_answered = false;
  std::string process;  // if it wrote none: "ended", "stopped", or "" (unknown)
  std::string ended;
  std::string error;
  std::optional<Place> place;
  std::vector<std::string> device_failures;
  int memory_tests_cut = 0;                         // that did not cover all of the memory in time
  std::string computes_with;                        // device and versions; equal: equal results
  std::map<std::string, std::string> fingerprints;  // of the self-test's results, by operator
  std::optional<double> own_seconds;
};

/// From an entry of "ranks" (verdict.hpp). Throws nlohmann::json's errors, and std::out_of_range.
[[nodiscard]] RankResult rank_result_of(const nlohmann::ordered_json& json);

}  // namespace nanlocator::netcheck
