// Agreement between ranks; the only room that talks to other ranks.
//
// Ranks exchange four things: a handshake at install (Store), one int32 flag per step (all-reduce,
// launched early and read late), after a finding the ledgers and the verdict (Store), and
// heartbeats (Store, on a separate connection; see rank_monitor.hpp). Every wait has a deadline and
// gives up on a rank that the monitor has lost. No path makes one rank enter a collective that
// another does not. The Store has its own connection and thread and is never called with a blocking
// get. Calls come from one thread; none releases the GIL (the bindings do).
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include <c10/util/intrusive_ptr.h>

#include "nanlocator/agree/flag_reduction.hpp"
#include "nanlocator/agree/rank_monitor.hpp"

namespace c10d {
class ProcessGroup;
class Store;
}  // namespace c10d

namespace nanlocator::inline agree_room {

/// The values that arrived by the deadline: one entry per rank, empty for a silent rank.
using Gathered = std::vector<std::optional<std::string>>;

/// True if an error's text says that a collective or a transfer has failed, perhaps because a peer
/// is gone. gloo and NCCL throw plain std::runtime_errors for that, too.
[[nodiscard]] bool is_failure_of_peers(std::string_view error) noexcept;

class Communicator {
 public:
  /// `group` reduces the flag (its own timeout bounds that wait) and, like `store`, is shared with
  /// the caller. Keys begin with `prefix`, which must be the same on all ranks and unused before.
  /// Throws UsageError if either is null.
  Communicator(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::intrusive_ptr<c10d::Store> store,
               std::string prefix);
  /// The same with another flag reduction (nccl_flag_reduction.hpp) and a Store of any kind
  /// (c10d::TCPStore, FileStore).
  Communicator(std::unique_ptr<FlagReduction> reduction, c10::intrusive_ptr<c10d::Store> store,
               std::string prefix);
  /// The group registered under `name` in c10d's group registry (ProcessGroup.group_name in
  /// Python). Throws UsageError if there is none.
  [[nodiscard]] static std::shared_ptr<Communicator> from_group_name(
      const std::string& name, c10::intrusive_ptr<c10d::Store> store, std::string prefix);
  ~Communicator();
  Communicator(const Communicator&) = delete;  // one connection, one sequence of collectives
  Communicator& operator=(const Communicator&) = delete;

  [[nodiscard]] int rank() const noexcept;
  [[nodiscard]] int size() const noexcept;
  /// True if the group has a backend for tensors of this device type (gloo: CPU, nccl: CUDA).
  [[nodiscard]] bool reduces_on(at::DeviceType device) const;

  /// Compares `mine` (a flat JSON object, for example versions and options) on all ranks. On a
  /// difference, or if ranks did not come by the deadline, throws the same AgreementError on every
  /// rank; it names the keys that differ and the ranks with each value, or the missing ranks.
  void handshake(const std::string& mine, Deadline deadline);

  /// Rank 0's `value`, on every rank. Every rank makes the same calls of `handshake` and
  /// `broadcast` in the same order. Throws AgreementError if it does not arrive by the deadline.
  [[nodiscard]] std::string broadcast(std::string_view key, const std::string& value,
                                      Deadline deadline);

  /// Launches a MAX all-reduce of `flag` (int32 [1], on the group's device), in place. `flag` must
  /// not be read or written before `finish_flag`.
  void start_flag(const at::Tensor& flag);
  /// Waits for the all-reduce; true if any rank's flag was set. Throws AgreementError if the group
  /// times out or a peer is gone; no further flag may then be started (UsageError). For a flag on a
  /// device, "gone" means that the peer said how it ended, because nothing else ends that wait.
  [[nodiscard]] bool finish_flag();

  /// Writes `value` under `key` for this rank, replacing the previous one. Never blocks on other
  /// ranks. False if the Store is gone (no answer within 10 s).
  bool publish(std::string_view key, const std::string& value) noexcept;
  /// The values that all ranks published under `key`. Waits until the deadline for missing ranks
  /// that are not lost.
  [[nodiscard]] Gathered gather(std::string_view key, Deadline deadline) noexcept;
  /// Whether any rank, or every rank, has published under `key` by now; false if the Store does not
  /// answer.
  [[nodiscard]] bool has_any_published(std::string_view key) noexcept;
  [[nodiscard]] bool have_all_published(std::string_view key) noexcept;
  /// The value that `rank` published under `key`; empty if it does not arrive by the deadline or
  /// the rank is lost.
  [[nodiscard]] std::optional<std::string> fetch(std::string_view key, int rank,
                                                 Deadline deadline) noexcept;
  /// Publishes `value` under `key` for the whole job, unless a rank has done so already. Never
  /// blocks on other ranks.
  void offer(std::string_view key, const std::string& value) noexcept;
  /// The value offered under `key` by now; empty if there is none or the Store does not answer.
  [[nodiscard]] std::optional<std::string> offered(std::string_view key) noexcept;
  /// True when all ranks but the lost ones and those in `absent` have called this with `key`; false
  /// at the deadline, or at once if rank 0, which opens the barrier, is absent. While a missing
  /// rank `is_at_work` (may be empty), the deadline is extended.
  bool pass_barrier(std::string_view key, const std::vector<int>& absent, Deadline deadline,
                    const std::function<bool(int rank)>& is_at_work = {}) noexcept;

  /// Ends any wait in the flag's group, from any thread. No flag can be reduced afterwards.
  void abort() noexcept;

  /// Starts the monitor of silent ranks. Every rank calls it once, after a handshake. `place`:
  /// describes this rank to the others. Throws UsageError if it is already running. Returns when
  /// the Store has this rank's first heartbeat, so that no rank can die unseen in its first step,
  /// or after four patiences.
  void watch_ranks(RankPlace place, MonitorTimes times, RankMonitor::OnChange on_change);
  /// nullptr before watch_ranks and after stop_watching.
  [[nodiscard]] RankMonitor* monitor() noexcept { return monitor_.get(); }
  /// Ends the monitor: this rank leaves in an orderly way, and `on_change` is not called again.
  void stop_watching() noexcept { monitor_.reset(); }

 private:
  [[nodiscard]] std::string key_of(std::string_view key, int rank) const;
  [[nodiscard]] bool has(std::string_view key, std::string_view what) noexcept;
  [[nodiscard]] std::int32_t read_flag();
  void throw_where_a_rank_has_ended() const;
  [[nodiscard]] std::vector<int> lost() const;
  [[nodiscard]] bool is_lost(int rank) const;
  [[nodiscard]] std::vector<int> missing(std::string_view key, std::vector<int> absent) const;
  [[nodiscard]] bool has_come_except(std::string_view key, const std::vector<int>& absent) const;

  std::unique_ptr<FlagReduction> reduction_;
  std::unique_ptr<StoreClient> store_;
  std::string prefix_;
  std::unique_ptr<RankMonitor> monitor_;
  bool is_pending_ = false;        // a flag reduction
  at::Tensor flag_;                // kept alive while the reduction writes it
  at::Tensor host_flag_;           // pinned, if flags are on a device
  bool is_group_usable_ = true;    // no flag reduction has failed
  std::set<std::string> counted_;  // keys that this rank has published
  int agreements_ = 0;  // handshakes and broadcasts so far: the same number on every rank
};

}  // namespace nanlocator::inline agree_room
