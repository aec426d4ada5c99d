// Which ranks have stopped answering? A thread per rank that needs neither the GIL nor the
// device.
//
// Every `interval` the thread writes a heartbeat (a counter, and where training is) to the
// Store and reads that of the next rank in the ring; behind a rank that is late it reads on, twice
// as far each time, because a dead host takes neighbours with it. A heartbeat that has not moved
// for `patience` is news, and so is a rank that ends by an exception: all ranks look for news once
// per interval. That is four Store requests per rank and interval, whatever the number of ranks.
//
// Nobody is accused of what the observer slept through: between two checks at most twice the
// interval counts as silence, and nothing where the Store did not answer. A rank that answers again
// is taken off the list. Where the Store breaks the thread ends; `problem` then says so.
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

/// What a rank is doing, as its heartbeat says.
enum class Activity : std::uint8_t {
  training,          // outside of what is watched: optimizer, data, checkpoint
  forward_backward,  // from begin_step to the flag reduction
  agreement,         // the flag reduction, launched and not yet read
  rerun,             // the re-run of a bad step
  gathering,         // of a finding
  stopped,           // after a finding that ends the run: silence is expected
};
[[nodiscard]] std::string_view name_of(Activity activity) noexcept;

/// A rank that no longer answers.
struct LostRank {
  int rank = 0;
  std::string place;                      // RankCoordinates::describe(); "" where unknown
  std::optional<std::int64_t> iteration;  // of its last heartbeat; empty: there was none
  std::string activity;                   // of its last heartbeat: Activity's name
  std::string ended_by;                   // "ValueError: ..."; "": it fell silent
  friend bool operator==(const LostRank&, const LostRank&) = default;

  /// One sentence without a full stop: "rank 5 (tp1 pp0 dp1, host a17) has not answered since
  /// iteration 7, where it was in forward_backward".
  [[nodiscard]] std::string describe() const;
};

struct MonitorTimes {
  std::chrono::milliseconds interval{2'500};
  std::chrono::milliseconds patience{15'000};

  /// A twelfth of the deadline, between 0.1 s and 5 s; and half of it, but at least 1 s: a busy
  /// machine keeps a thread waiting for some tenths of a second.
  [[nodiscard]] static MonitorTimes for_deadline(std::chrono::milliseconds gather_deadline);
};

class RankMonitor {
 public:
  /// The lost ranks, ascending, whenever they change. Called on the monitor's thread, never after
  /// the destructor has returned.
  using OnChange = std::function<void(const std::vector<LostRank>&)>;

  /// `prefix` must be the same on all ranks and unused before; `place` is how others call this
  /// rank. The thread starts at once.
  RankMonitor(std::unique_ptr<StoreClient> store, std::string prefix, int rank, int size,
              std::string place, MonitorTimes times, OnChange on_change);
  /// Leaves. The thread is not joined (it may be stuck in the Store), but `on_change` has returned.
  ~RankMonitor();
  RankMonitor(const RankMonitor&) = delete;  // one thread, one heartbeat
  RankMonitor& operator=(const RankMonitor&) = delete;

  // Any thread may call what follows.

  /// For the next heartbeats. Two stores to memory.
  void now_in(Activity activity, std::int64_t iteration) noexcept;
  /// `now_in(Activity::stopped)`, and the others are informed before it returns (or 1 s is over).
  void stop(std::int64_t iteration) noexcept;
  /// Goodbye: from now on this rank's silence means nothing. With `ended_by` ("ValueError: ...") it
  /// is lost, and the others learn why; unless ranks were lost before: then its end follows from
  /// theirs. Returns when the Store has it, or after 1 s; with `ended_by` when `on_change` has
  /// returned on all others, or after one interval and 1 s. A second call does nothing.
  void leave(const std::string& ended_by = "") noexcept;

  /// Waits until the Store has this rank's first heartbeat, four patiences at most: so long the
  /// others take it to be connecting, which may need seconds.
  void wait_for_first_heartbeat() const;
  [[nodiscard]] std::vector<LostRank> lost() const;
  /// Whether `rank` answers, and its latest heartbeat says that it is busy with a finding of this
  /// iteration (`rerun` or `gathering`).
  [[nodiscard]] bool is_locating(int rank, std::int64_t iteration) const;
  /// Why the monitor has ended before its time; "": it has not.
  [[nodiscard]] std::string problem() const;
  /// Waits until a rank is lost, the monitor has ended or the deadline is there; gives `lost()`.
  [[nodiscard]] std::vector<LostRank> wait_for_loss(Deadline deadline) const;

 private:
  struct Shared;  // with the thread, which may outlive the monitor
  std::shared_ptr<Shared> shared_;
};

}  // namespace nanlocator::inline agree_room
