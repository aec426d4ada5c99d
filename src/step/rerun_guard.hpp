// Prevents hangs in a re-run: guards a stretch of it (a pass, or an agreement between two passes)
// from a separate thread, which needs neither the device, the training thread nor Python.
//
// A stretch cannot end if another rank's re-run has failed, if a rank has fallen silent, or if no
// rank still in it has begun an operator for kStandstill patiences. It then gets one patience
// without an operator to end by itself, as gloo's collectives do. After that, `abort` ends the
// collectives that this process waits in: NCCL waits forever for a lost peer. If the training
// thread stands still for another patience, `conclude` is called in its place and does not return.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "nanlocator/agree/communicator.hpp"
#include "operators/operator_progress.hpp"

namespace nanlocator::inline step_room {

class RerunGuard {
 public:
  /// Ranks report standstills and failures of this re-run under `key` (see `report_failure`).
  /// `stretch`: its number in the re-run, the same on all ranks. `communicator` must stay valid
  /// until the destructor has returned. `abort` is called on a separate thread and may never
  /// return; `conclude` on the guard's thread, with a sentence.
  RerunGuard(Communicator& communicator, std::string key, int stretch,
             std::chrono::milliseconds patience, std::function<void()> abort,
             std::function<void(const std::string&)> conclude);
  /// The stretch has ended. Does not return if `conclude` has been called: the process ends there.
  ~RerunGuard();
  RerunGuard(const RerunGuard&) = delete;  // owns a thread
  RerunGuard& operator=(const RerunGuard&) = delete;

  /// Why the collectives of this stretch were aborted; "" if they were not.
  [[nodiscard]] std::string problem() const;

  /// Reports to the guards of all ranks that this rank's re-run has failed.
  static void report_failure(Communicator& communicator, const std::string& key,
                             const std::string& problem);
  /// This rank has reached the end of a stretch: ranks that stand still in it do not wait for it.
  static void report_end(Communicator& communicator, const std::string& key, int stretch);
  /// The places of ranks that reported a standstill: one sentence, or "".
  [[nodiscard]] static std::string standstill(Communicator& communicator, const std::string& key);

 private:
  using Clock = std::chrono::steady_clock;

  void serve();
  [[nodiscard]] bool is_over_within(Clock::duration time);
  [[nodiscard]] bool stands_still_for(Clock::duration time);
  [[nodiscard]] std::string why_it_cannot_end();

  Communicator& communicator_;
  const std::string key_;
  const int stretch_;
  const std::chrono::milliseconds patience_;
  const std::function<void()> abort_;
  const std::function<void(const std::string&)> conclude_;
  const OperatorProgress progress_;
  bool has_reported_ = false;  // its standstill

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool is_over_ = false;
  bool has_concluded_ = false;  // or is about to
  std::string problem_;
  std::thread thread_;
};

}  // namespace nanlocator::inline step_room
