#include "nanlocator/map/rank_list.hpp"

#include <algorithm>
#include <limits>
#include <string>

#include "nanlocator/error.hpp"

namespace nanlocator::inline map_room {
namespace {

/// The longest progression that begins at `begin`.
std::size_t end_of_run(const std::vector<int>& ranks, std::size_t begin) {
  if (begin + 1 == ranks.size()) return begin + 1;
  const int step = ranks[begin + 1] - ranks[begin];
  std::size_t end = begin + 2;
  while (end < ranks.size() && ranks[end] - ranks[end - 1] == step) ++end;
  return end;
}

void check(const RankRun& run, int lowest) {
  const bool is_right = run.first >= lowest && run.last >= run.first && run.step >= 1 &&
                        (run.last - run.first) % run.step == 0 &&
                        (run.last > run.first || run.step == 1);
  if (!is_right) {
    throw UsageError("ranks " + std::to_string(run.first) + " to " + std::to_string(run.last) +
                     " in steps of " + std::to_string(run.step) +
                     " are not an ascending progression that begins at " + std::to_string(lowest) +
                     " or above");
  }
}

}  // namespace

RankList::RankList(std::vector<int> ranks) {
  std::ranges::sort(ranks);
  ranks.erase(std::ranges::unique(ranks).begin(), ranks.end());
  if (!ranks.empty() && ranks.front() < 0) {
    throw UsageError("rank " + std::to_string(ranks.front()) + " is negative");
  }
  for (std::size_t begin = 0; begin < ranks.size();) {
    const std::size_t end = end_of_run(ranks, begin);
    const int step = end - begin > 1 ? ranks[begin + 1] - ranks[begin] : 1;
    runs_.push_back({ranks[begin], ranks[end - 1], step});
    begin = end;
  }
}

RankList RankList::of_runs(std::vector<RankRun> runs) {
  int lowest = 0;
  for (const RankRun& run : runs) {
    check(run, lowest);
    lowest = run.last == std::numeric_limits<int>::max() ? run.last : run.last + 1;
  }
  RankList list;
  list.runs_ = std::move(runs);
  return list;
}

std::vector<int> RankList::ranks() const {
  return ranks_below(std::numeric_limits<int>::max());
}

std::vector<int> RankList::ranks_below(int below) const {
  std::vector<int> ranks;
  for (const RankRun& run : runs_) {
    for (std::int64_t rank = run.first; rank <= run.last && rank < below; rank += run.step) {
      ranks.push_back(static_cast<int>(rank));
    }
  }
  return ranks;
}

}  // namespace nanlocator::inline map_room
