// Equal devices with equal versions give equal bits. Who differs from the majority is faulty;
// without a majority nobody is accused alone.
#pragma once

#include <string>
#include <vector>

#include "netcheck/rank_result.hpp"

namespace nanlocator::netcheck {

/// Operators whose results have other bits on some ranks than on others that compute with the same.
struct OtherBits {
  std::string computes_with;
  std::vector<int> ranks;  // that differ from most; all of them where there is no majority
  std::vector<int> most;   // that agree with each other; empty: no majority
  std::vector<std::string> operators;
};

/// One entry for the operators with the same finding on the same ranks.
[[nodiscard]] std::vector<OtherBits> compare_bits(const std::vector<RankResult>& ranks);

}  // namespace nanlocator::netcheck
