// Detects ranks that have stopped answering. One thread per rank, which needs neither the GIL nor
// the device.
//
// Every `interval` the thread writes a heartbeat (a counter, and where training is) to the Store
// and reads that of the next rank in the ring. If that rank is late, it reads further, twice as far
// each time, because a dead host takes neighbours with it. A heartbeat that has not changed for
// `patience` is published as news, and so is a rank that ends by an exception; all ranks look for
// news once per interval. That is four Store requests per rank and interval, whatever the number of
// ranks.
//
// No rank is blamed for time in which the observer slept: between two checks at most twice the
// interval counts as silence, and nothing if the Store did not answer. A rank that answers again is
// removed from the list. If the Store breaks, the thread ends and `problem` says so.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace nanlocator::inline agree_room {

using Deadline = std::chrono::steady_clock::time_point;

class StoreClient;

/// The activity of a rank, as stated in its heartbeat.
enum class Activity : std::uint8_t {
  training,          // outside the watched code: optimizer, data, checkpoint
  forward_backward,  // from begin_step to the flag reduction
  agreement,         // the flag reduction is launched and not yet read
  rerun,             // the re-run of a bad step
  gathering,         // collecting the ledgers of a finding
  stopped,           // after a finding that ends the run: silence is expected
};
[[nodiscard]] std::string_view name_of(Activity activity) noexcept;

/// What a rank's heartbeats tell of it. Empty: not known.
struct RankPlace {
  std::string text;  // RankCoordinates::describe()
  std::string host;
  std::string log;             // file into which it writes its stderr
  std::int64_t log_begin = 0;  // bytes in it from before this attempt
  friend bool operator==(const RankPlace&, const RankPlace&) = default;
};

/// A rank that no longer answers.
struct LostRank {
  int rank = 0;
  RankPlace place;
  std::optional<std::int64_t> iteration;  // of its last heartbeat; empty if there was none
  std::string activity;                   // of its last heartbeat: Activity's name
  std::string ended_by;                   // "ValueError: ..."; "" if it fell silent
  friend bool operator==(const LostRank&, const LostRank&) = default;

  /// One sentence without a full stop: "rank 5 (tp1 pp0 dp1, host a17) has not answered since
  /// iteration 7, where it was in forward_backward".
  [[nodiscard]] std::string describe() const;
};

struct MonitorTimes {
  std::chrono::milliseconds interval{2'500};
  std::chrono::milliseconds patience{15'000};

  /// The interval is a twelfth of the deadline, between 0.1 s and 5 s. The patience is half of it,
  /// but at least 1 s: a busy machine delays a thread by some tenths of a second.
  [[nodiscard]] static MonitorTimes for_deadline(std::chrono::milliseconds gather_deadline);
};

class RankMonitor {
 public:
  /// Receives the lost ranks, ascending, whenever they change. Called on the monitor's thread,
  /// never after the destructor has returned.
  using OnChange = std::function<void(const std::vector<LostRank>&)>;

  /// `prefix` must be the same on all ranks and unused before; `place` describes this rank to the
  /// others. The thread starts at once.
  RankMonitor(std::unique_ptr<StoreClient> store, std::string prefix, int rank, int size,
              RankPlace place, MonitorTimes times, OnChange on_change);
  /// Leaves. Does not join the thread (it may be stuck in the Store), but waits for a running
  /// `on_change`.
  ~RankMonitor();
  RankMonitor(const RankMonitor&) = delete;  // one thread, one heartbeat
  RankMonitor& operator=(const RankMonitor&) = delete;

  // Any thread may call the following.

  /// For the next heartbeats. Cost: two stores to memory.
  void now_in(Activity activity, std::int64_t iteration) noexcept;
  /// `now_in(Activity::stopped)`; returns when the others have been informed, or after 1 s.
  void stop(std::int64_t iteration) noexcept;
  /// Says goodbye: from now on this rank's silence means nothing. With `ended_by` ("ValueError:
  /// ...") the rank counts as lost and the others learn why, unless ranks were lost before: then
  /// its end is their consequence. Returns when the Store has it, or after 1 s; with `ended_by`,
  /// when `on_change` has returned on all others, or after one interval and 1 s. A second call does
  /// nothing.
  void leave(const std::string& ended_by = "") noexcept;

  /// Waits until the Store has this rank's first heartbeat, at most four patiences: for so long the
  /// others assume that it is still connecting, which may take seconds.
  void wait_for_first_heartbeat() const;
  [[nodiscard]] std::vector<LostRank> lost() const;
  /// Whether `rank` answers and its latest heartbeat says that it is busy with a finding of this
  /// iteration (`rerun` or `gathering`).
  [[nodiscard]] bool is_locating(int rank, std::int64_t iteration) const;
  /// Why the monitor ended early; "" if it did not.
  [[nodiscard]] std::string problem() const;
  /// Waits until a rank is lost, the monitor has ended or the deadline is reached; returns
  /// `lost()`.
  [[nodiscard]] std::vector<LostRank> wait_for_loss(Deadline deadline) const;

 private:
  struct Shared;  // shared with the thread, which may outlive the monitor
  std::shared_ptr<Shared> shared_;
};

}  // namespace nanlocator::inline agree_room
