// The end of a network check, over the Store alone: every rank writes what it saw, the lowest
// surviving rank explains it and prints, all read the outcome and exit.
#pragma once

#include <atomic>
#include <chrono>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "netcheck/check_store.hpp"
#include "netcheck/rank_check.hpp"

namespace nanlocator::netcheck {

constexpr int kHealthy = 0;
constexpr int kFindings = 1;  // or a verdict that could not be written

/// What the reporting rank sends to the others.
struct Report {
  int exit_code = kFindings;
  std::string headline;        // "netcheck: hang: rank 5 on host a17 ..."
  std::vector<int> missing{};  // ranks that put nothing down
};

/// Of the supervisor's thread. Calls throw StoreLost, and Error where no rank reports.
class Conclusion {
 public:
  /// Borrows all three. `signal`: the number of one that this process received, else 0.
  Conclusion(CheckStore& store, const RankCheckOptions& options, const std::atomic<int>& signal);

  /// Where this rank stands, for those that find it missing: `place` has "host", "process",
  /// "local_rank" and "place".
  void state_place(const nlohmann::ordered_json& place);
  /// Whether a rank has asked for the end.
  [[nodiscard]] bool is_called();
  /// Writes `result`, prints if it is this rank's turn, and returns the outcome.
  [[nodiscard]] Report conclude(const std::string& result, bool calls_the_end);
  /// The last word: the rank that keeps the Store waits for it.
  void leave(const Report& report);

 private:
  using Clock = std::chrono::steady_clock;
  using Json = nlohmann::ordered_json;

  void call_the_end();
  [[nodiscard]] bool is_my_turn();
  [[nodiscard]] bool has_been_called_for(Clock::duration time);
  [[nodiscard]] std::set<int> gone_ranks(const std::set<int>& missing);
  [[nodiscard]] Json result_of_missing(int rank);
  [[nodiscard]] Json gather_results();
  [[nodiscard]] Report report(const Json& results);
  [[nodiscard]] std::string write(const std::string& verdict) const;
  void end_if_stopped(int rank);
  void wait_until_all_have_left();

  CheckStore& store_;
  const RankCheckOptions& options_;
  const std::atomic<int>& signal_;
  Clock::time_point start_ = Clock::now();
  Clock::time_point called_ = Clock::time_point::max();  // when this rank saw the call for the end
};

}  // namespace nanlocator::netcheck
