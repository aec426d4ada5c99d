#include "netcheck/fingerprints.hpp"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

namespace nanlocator::netcheck {
namespace {

using Ranks = std::vector<int>;
using RanksByFingerprint = std::map<std::string, Ranks>;

// {the ranks that differ, the majority} for one operator.
std::pair<Ranks, Ranks> split(const RanksByFingerprint& holders) {
  const auto& most = std::ranges::max_element(holders, {}, [](const auto& holder) {
                       return holder.second.size();
                     })->second;
  Ranks others;
  Ranks all;
  for (const auto& [fingerprint, ranks] : holders) {
    all.insert(all.end(), ranks.begin(), ranks.end());
    if (&ranks != &most) others.insert(others.end(), ranks.begin(), ranks.end());
  }
  std::ranges::sort(all);
  std::ranges::sort(others);
  if (2 * most.size() <= all.size()) return {all, {}};
  return {others, most};
}

}  // namespace

std::vector<OtherBits> compare_bits(const std::vector<RankResult>& ranks) {
  std::map<std::pair<std::string, std::string>, RanksByFingerprint> seen;
  for (const auto& rank : ranks) {
    for (const auto& [name, fingerprint] : rank.fingerprints) {
      seen[{rank.computes_with, name}][fingerprint].push_back(rank.rank);
    }
  }
  std::map<std::tuple<std::string, Ranks, Ranks>, std::vector<std::string>> operators;
  for (const auto& [what, holders] : seen) {
    if (holders.size() < 2) continue;
    auto [others, most] = split(holders);
    operators[{what.first, std::move(others), std::move(most)}].push_back(what.second);
  }
  std::vector<OtherBits> found;
  for (auto& [key, names] : operators) {
    const auto& [computes_with, others, most] = key;
    found.push_back({computes_with, others, most, std::move(names)});
  }
  return found;
}

}  // namespace nanlocator::netcheck
