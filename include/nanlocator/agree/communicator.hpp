// Do all ranks know? The only room that talks to other ranks.
//
// Four things travel: a handshake at install (Store), one int32 flag per step (all-reduce,
// launched early and read late), on a finding the ledgers and the verdict (Store), and heartbeats
// (Store, on a connection of their own; see rank_monitor.hpp). Nothing here waits without a
// deadline, nor for a rank that the monitor has lost, and no path makes one rank enter a collective
// that another does not.
// The Store is used through a connection and a thread of its own, never with a blocking get. Calls
// come from one thread; each releases no GIL itself (the bindings do).
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

/// What arrived by the deadline: one entry per rank, empty where a rank stayed silent.
using Gathered = std::vector<std::optional<std::string>>;

/// True where the text of an error says that a collective or a transfer has failed: a peer may have
/// gone. gloo and NCCL throw plain std::runtime_errors for it, too.
[[nodiscard]] bool is_failure_of_peers(std::string_view error) noexcept;

class Communicator {
 public:
  /// `group` reduces the flag (its own time-out bounds that wait); it and `store` are shared with
  /// the caller. Keys live below `prefix`, which must be the same on all ranks and unused before.
  /// Throws UsageError where either is null.
  Communicator(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::intrusive_ptr<c10d::Store> store,
               std::string prefix);
  /// The same over another connection (nccl_flag_reduction.hpp), with a Store of any kind
  /// (c10d::TCPStore, FileStore).
  Communicator(std::unique_ptr<FlagReduction> reduction, c10::intrusive_ptr<c10d::Store> store,
               std::string prefix);
  /// The group registered under `name` in c10d's group registry (ProcessGroup.group_name in
  /// Python). Throws UsageError where there is none.
  [[nodiscard]] static std::shared_ptr<Communicator> from_group_name(
      const std::string& name, c10::intrusive_ptr<c10d::Store> store, std::string prefix);
  ~Communicator();
  Communicator(const Communicator&) = delete;  // one connection, one sequence of collectives
  Communicator& operator=(const Communicator&) = delete;

  [[nodiscard]] int rank() const noexcept;
  [[nodiscard]] int size() const noexcept;
  /// True if the group has a backend for tensors of this device type (gloo: CPU, nccl: CUDA).
  [[nodiscard]] bool reduces_on(at::DeviceType device) const;

  /// Every rank states `mine` (a flat JSON object, say versions and options). Throws AgreementError
  /// on every rank alike, naming the keys that differ and the ranks that hold each value, or the
  /// ranks that did not come by the deadline.
  void handshake(const std::string& mine, Deadline deadline);

  /// Rank 0's `value`, on every rank. Every rank makes the same calls of `handshake` and
  /// `broadcast` in the same order. Throws AgreementError where it does not arrive by the deadline.
  [[nodiscard]] std::string broadcast(std::string_view key, const std::string& value,
                                      Deadline deadline);

  /// Launches a MAX all-reduce of `flag` (int32 [1], on the group's device), in place. It may not
  /// be read or written before `finish_flag`.
  void start_flag(const at::Tensor& flag);
  /// Waits for it; true if any rank's flag was set. Throws AgreementError where the group times out
  /// or a peer has gone (on a device: has said how it ended, as nothing else ends that wait); then
  /// no further flag may be started (UsageError).
  [[nodiscard]] bool finish_flag();

  /// Writes `value` under `key` for this rank, replacing what was there. Never blocks on other
  /// ranks; false where the Store is gone (no answer within 10 s).
  bool publish(std::string_view key, const std::string& value) noexcept;
  /// What all ranks published under `key`, waiting until the deadline for those that are missing
  /// and not lost.
  [[nodiscard]] Gathered gather(std::string_view key, Deadline deadline) noexcept;
  /// Whether any rank, or every rank, has published under `key` by now; false where the Store does
  /// not answer.
  [[nodiscard]] bool has_any_published(std::string_view key) noexcept;
  [[nodiscard]] bool have_all_published(std::string_view key) noexcept;
  /// What `rank` published under `key`; empty where it does not arrive by the deadline, or is lost.
  [[nodiscard]] std::optional<std::string> fetch(std::string_view key, int rank,
                                                 Deadline deadline) noexcept;
  /// Publishes `value` under `key` for the whole job, where no rank has done so yet. Never blocks
  /// on other ranks.
  void offer(std::string_view key, const std::string& value) noexcept;
  /// What was offered under `key` by now; empty where nothing was, or the Store does not answer.
  [[nodiscard]] std::optional<std::string> offered(std::string_view key) noexcept;
  /// Returns when all ranks but the lost ones and those in `absent` have called it with `key`, or
  /// at the deadline: false. Without rank 0, which opens it, it is false at once. While a rank that
  /// has not come `is_at_work` (may be empty), the deadline begins again.
  bool pass_barrier(std::string_view key, const std::vector<int>& absent, Deadline deadline,
                    const std::function<bool(int rank)>& is_at_work = {}) noexcept;

  /// Ends what waits in the flag's group, on whichever thread; it reduces no flag any more.
  void abort() noexcept;

  /// Starts the monitor of silent ranks. Every rank calls it, once, after a handshake. `place`:
  /// how the others call this rank. Throws UsageError where it runs already. Returns when the
  /// Store has this rank's first heartbeat, so that no rank can die unseen in its first step, or
  /// after four patiences.
  void watch_ranks(std::string place, MonitorTimes times, RankMonitor::OnChange on_change);
  /// nullptr before watch_ranks and after stop_watching.
  [[nodiscard]] RankMonitor* monitor() noexcept { return monitor_.get(); }
  /// Ends it: this rank has left in an orderly way, and `on_change` is not called again.
  void stop_watching() noexcept { monitor_.reset(); }

 private:
  [[nodiscard]] std::string key_of(std::string_view key, int rank) const;
  [[nodiscard]] bool has(std::string_view key, std::string_view what) noexcept;
  [[nodiscard]] std::int32_t read_flag();
  void throw_where_a_rank_has_ended() const;
  [[nodiscard]] std::vector<int> lost() const;
  [[nodiscard]] bool is_lost(int rank) const;
  [[nodiscard]] std::vector<int> missing(std::string_view key, std::vector<int> absent) const;
  [[nodiscard]] bool has_come_but_for(std::string_view key, const std::vector<int>& absent) const;

  std::unique_ptr<FlagReduction> reduction_;
  std::unique_ptr<StoreClient> store_;
  std::string prefix_;
  std::unique_ptr<RankMonitor> monitor_;
  bool is_pending_ = false;        // a flag reduction
  at::Tensor flag_;                // kept alive while the reduction writes it
  at::Tensor host_flag_;           // pinned, where flags are on a device
  bool is_group_usable_ = true;    // no flag reduction has failed
  std::set<std::string> counted_;  // keys that this rank has published
  int agreements_ = 0;  // handshakes and broadcasts so far: the same number on every rank
};

}  // namespace nanlocator::inline agree_room
