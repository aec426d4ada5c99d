// The end of a network check, over the Store alone: every rank writes its result, the lowest
// surviving rank explains and prints them, all read the outcome and exit.
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

/// Sent by the reporting rank to the others.
struct Report {
  int exit_code = kFindings;
  std::string headline;        // "netcheck: hang: rank 5 on host a17 ..."
  std::vector<int> missing{};  // ranks that wrote no result
};

/// Used by the supervisor's thread. Calls throw StoreLost, and Error if no rank reports.
class Conclusion {
 public:
  /// Borrows all three. `signal`: the number of a signal that this process received, else 0.
  Conclusion(CheckStore& store, const RankCheckOptions& options, const std::atomic<int>& signal);

  /// Publishes this rank's position for the ranks that find it missing: `place` has "host",
  /// "process", "local_rank" and "place".
  void put_place(const nlohmann::ordered_json& place);
  /// Whether a rank has requested the end.
  [[nodiscard]] bool is_end_requested();
  /// Writes `result`, prints if it is this rank's turn, and returns the outcome.
  [[nodiscard]] Report conclude(const std::string& result, bool requests_end);
  /// This rank's last message: the rank that hosts the Store waits for it.
  void leave(const Report& report);

 private:
  using Clock = std::chrono::steady_clock;
  using Json = nlohmann::ordered_json;

  void request_end();
  [[nodiscard]] bool is_my_turn();
  [[nodiscard]] bool has_been_requested_for(Clock::duration time);
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
  Clock::time_point requested_ =
      Clock::time_point::max();  // when this rank saw the request for the end
};

}  // namespace nanlocator::netcheck
