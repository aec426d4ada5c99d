// Equal devices with equal versions give equal bits. A rank that differs from the majority is
// faulty; without a majority no single rank is blamed.
#pragma once

#include <string>
#include <vector>

#include "netcheck/rank_result.hpp"

namespace nanlocator::netcheck {

/// Operators whose results differ between ranks that compute with the same device and versions.
struct OtherBits {
  std::string computes_with;
  std::vector<int> ranks;  // that differ from most; all of them if there is no majority
  std::vector<int> most;   // that agree with each other; empty without a majority
  std::vector<std::string> operators;
};

/// One entry for all operators with the same finding on the same ranks.
[[nodiscard]] std::vector<OtherBits> compare_bits(const std::vector<RankResult>& ranks);

}  // namespace nanlocator::netcheck
