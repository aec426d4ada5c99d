// The members of a process group. A group of a process grid is one arithmetic progression or a few,
// and is stored as such; otherwise each of 16,384 ranks would list 16,384 others.
#pragma once

#include <compare>
#include <cstdint>
#include <vector>

namespace nanlocator::inline map_room {

/// Ranks first, first + step, ..., last.
struct RankRun {
  int first = 0;
  int last = 0;  // >= first; last - first is a multiple of step
  int step = 1;  // >= 1; 1 if first == last
  friend auto operator<=>(const RankRun&, const RankRun&) = default;
};

/// Global ranks, ascending, without repetitions.
class RankList {
 public:
  RankList() = default;
  /// Ranks in any order, perhaps repeated. Throws UsageError if one is negative.
  RankList(std::vector<int> ranks);  // NOLINT(google-explicit-constructor): a list of ranks is one
  RankList(std::initializer_list<int> ranks) : RankList(std::vector(ranks)) {}
  /// Throws UsageError if a run breaks RankRun's rules or does not begin after the previous one.
  [[nodiscard]] static RankList of_runs(std::vector<RankRun> runs);

  [[nodiscard]] const std::vector<RankRun>& runs() const noexcept { return runs_; }
  /// All ranks, or only those from 0 to `below` - 1: a file may name two thousand million.
  [[nodiscard]] std::vector<int> ranks() const;
  [[nodiscard]] std::vector<int> ranks_below(int below) const;

  friend auto operator<=>(const RankList&, const RankList&) = default;

 private:
  std::vector<RankRun> runs_;
};

}  // namespace nanlocator::inline map_room
