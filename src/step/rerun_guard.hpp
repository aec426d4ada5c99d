// No re-run hangs: what watches over a stretch of it, a pass or an agreement between two, from a
// thread of its own, which needs neither the device nor the training thread nor Python.
//
// A stretch cannot be completed where another rank's re-run has failed, where a rank has fallen
// silent, or where no rank that is still in it has begun an operator for kStandstill patiences. It
// gets one patience without an operator to end by itself, as gloo's collectives do. Then `abort`
// ends the collectives that this process waits in: NCCL's wait for a peer that has gone without
// end. Where the training thread stands still for another patience, `conclude` is called in its
// place, and does not return.
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
  /// Below `key` the ranks report standstills and failures of this re-run (see `report_failure`).
  /// `stretch`: its number in the re-run, the same on all ranks. `communicator` is the guard's
  /// until its destructor has returned. `abort` is called on a thread of its own, which may never
  /// come back; `conclude` on the guard's, with a sentence.
  RerunGuard(Communicator& communicator, std::string key, int stretch,
             std::chrono::milliseconds patience, std::function<void()> abort,
             std::function<void(const std::string&)> conclude);
  /// The stretch has ended. Does not return where `conclude` has been called: the process ends
  /// there.
  ~RerunGuard();
  RerunGuard(const RerunGuard&) = delete;  // one thread
  RerunGuard& operator=(const RerunGuard&) = delete;

  /// Why the collectives of this stretch were aborted; "": they were not.
  [[nodiscard]] std::string problem() const;

  /// The guards of all ranks know that this rank's re-run has failed.
  static void report_failure(Communicator& communicator, const std::string& key,
                             const std::string& problem);
  /// This rank has come to the end of a stretch: one that stands still in it waits for nobody.
  static void report_end(Communicator& communicator, const std::string& key, int stretch);
  /// Where each rank stood that had reported a standstill: one sentence, or none.
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
