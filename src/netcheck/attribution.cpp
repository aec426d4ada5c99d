#include "netcheck/attribution.hpp"

#include <algorithm>
#include <iterator>
#include <map>

namespace nanlocator::netcheck {
namespace {

using ByRank = std::map<int, const Position*>;

// True if the rank has not launched the step in which `place` waits.
bool is_missing_in(const Place& place, int rank, const ByRank& positions) {
  const auto found = positions.find(rank);
  if (found == positions.end()) return false;  // it has finished everything
  const auto& other = found->second->place;
  if (other.sequence != place.sequence) return other.sequence < place.sequence;
  return other.state == State::entered || other.launches < place.launches;
}

std::vector<int> waits_for(const Position& position, const ByRank& positions) {
  std::vector<int> missing;
  if (position.place.state != State::launched) return missing;
  for (const int rank : position.place.ranks) {
    if (rank != position.rank && is_missing_in(position.place, rank, positions)) {
      missing.push_back(rank);
    }
  }
  return missing;
}

// All ranks that wait for one of `culprits`, directly or through others.
std::vector<int> waiting_for(const std::vector<int>& culprits,
                             const std::map<int, std::vector<int>>& waits) {
  std::set<int> reached(culprits.begin(), culprits.end());
  for (bool has_grown = true; has_grown;) {
    has_grown = false;
    for (const auto& [rank, others] : waits) {
      const bool waits_on =
          std::ranges::any_of(others, [&](int other) { return reached.contains(other); });
      if (waits_on && reached.insert(rank).second) has_grown = true;
    }
  }
  for (const int culprit : culprits) reached.erase(culprit);
  return {reached.begin(), reached.end()};
}

}  // namespace

std::vector<Holdup> find_holdups(const std::vector<Position>& positions) {
  ByRank by_rank;
  for (const auto& position : positions) by_rank[position.rank] = &position;
  std::map<int, std::vector<int>> waits;
  std::vector<Holdup> holdups;
  std::map<int, Holdup> stuck_together;  // by the step's sequence number
  for (const auto& position : positions) {
    const auto missing = waits_for(position, by_rank);
    if (!position.is_alive) {
      holdups.push_back({{position.rank}, {}});
    } else if (!missing.empty()) {
      waits[position.rank] = missing;
    } else if (position.place.state == State::launched && !position.place.ranks.empty()) {
      stuck_together[position.place.sequence].ranks.push_back(position.rank);
    } else {
      holdups.push_back({{position.rank}, {}});
    }
  }
  for (auto& [sequence, holdup] : stuck_together) {
    // A dead rank explains the members that launched the same step and did not return.
    const auto& members = by_rank.at(holdup.ranks.front())->place.ranks;
    const auto gone = std::ranges::find_if(members, [&](int rank) {
      const auto found = by_rank.find(rank);
      return found != by_rank.end() && !found->second->is_alive;
    });
    if (gone == members.end()) {
      holdups.push_back(std::move(holdup));
    } else {
      for (const int rank : holdup.ranks) waits[rank] = {*gone};
    }
  }
  for (auto& holdup : holdups) holdup.waiting = waiting_for(holdup.ranks, waits);
  std::ranges::sort(holdups, {}, [](const Holdup& holdup) { return holdup.ranks.front(); });
  return holdups;
}

std::vector<Candidates> explain(const std::vector<Candidates>& observations) {
  std::vector<Candidates> faults;
  auto open = observations;
  while (!open.empty()) {
    std::map<int, int> explained;
    for (const auto& candidates : open) {
      for (const int rank : candidates) ++explained[rank];
    }
    if (explained.empty()) break;
    const int best =
        std::ranges::max_element(explained, {}, [](const auto& e) { return e.second; })->second;
    Candidates fault;
    // Of the ranks that explain most, those that explain the same observations as the first.
    const int first =
        std::ranges::find_if(explained, [&](const auto& e) { return e.second == best; })->first;
    for (const auto& candidates : open) {
      if (!candidates.contains(first)) continue;
      if (fault.empty()) {
        fault = candidates;
        continue;
      }
      Candidates common;
      std::ranges::set_intersection(fault, candidates, std::inserter(common, common.end()));
      fault = std::move(common);
    }
    std::erase_if(open, [&](const Candidates& candidates) { return candidates.contains(first); });
    faults.push_back(std::move(fault));
  }
  return faults;
}

std::vector<Candidates> suspects_of(const std::set<int>& senders, const std::set<int>& receivers,
                                    const std::set<int>& wrong) {
  std::set<int> others;
  std::ranges::set_difference(receivers, senders, std::inserter(others, others.end()));
  const bool all_others = std::ranges::includes(wrong, others);
  if (wrong.size() == receivers.size() && receivers.size() > 1) return {senders};
  if (all_others && others.size() > 1) return {senders};
  if (all_others && !others.empty()) {
    auto either = senders;
    either.insert(others.begin(), others.end());
    return {either};
  }
  std::vector<Candidates> each;
  for (const int rank : wrong) each.push_back({rank});
  return each;
}

}  // namespace nanlocator::netcheck
