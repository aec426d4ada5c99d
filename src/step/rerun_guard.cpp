#include "step/rerun_guard.hpp"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "nanlocator/map/rank_coordinates.hpp"

namespace nanlocator::inline step_room {
namespace {

using std::chrono::milliseconds;

/// A standstill is this many patiences without an operator, on every rank still in the stretch:
/// compiling a kernel takes minutes.
constexpr int kStandstill = 10;
constexpr milliseconds kShortestInterval{50};
constexpr milliseconds kLongestInterval{1'000};

std::string failed_key(const std::string& key) {
  return key + "/failed";
}
std::string standstill_key(const std::string& key) {
  return key + "/standstill";
}
/// Published by all ranks that stand still in the stretch or have reached its end.
std::string over_key(const std::string& key, int stretch) {
  return key + "/over/" + std::to_string(stretch);
}

}  // namespace

RerunGuard::RerunGuard(Communicator& communicator, std::string key, int stretch,
                       milliseconds patience, std::function<void()> abort,
                       std::function<void(const std::string&)> conclude)
    : communicator_(communicator),
      key_(std::move(key)),
      stretch_(stretch),
      patience_(patience),
      abort_(std::move(abort)),
      conclude_(std::move(conclude)),
      thread_([this] { serve(); }) {}

RerunGuard::~RerunGuard() {
  {
    std::unique_lock lock(mutex_);
    is_over_ = true;
    changed_.notify_all();
    changed_.wait(lock, [&] { return !has_concluded_; });  // forever: the process ends
  }
  thread_.join();
}

void RerunGuard::report_failure(Communicator& communicator, const std::string& key,
                                const std::string& problem) {
  (void)communicator.publish(failed_key(key), problem);
}

void RerunGuard::report_end(Communicator& communicator, const std::string& key, int stretch) {
  (void)communicator.publish(over_key(key, stretch), "");
}

std::string RerunGuard::standstill(Communicator& communicator, const std::string& key) {
  if (!communicator.has_any_published(standstill_key(key))) return {};
  const auto latest = communicator.gather(standstill_key(key), Clock::now());
  std::map<std::string, std::vector<int>> ranks;
  for (std::size_t rank = 0; rank < latest.size(); ++rank) {
    if (latest[rank]) ranks[*latest[rank]].push_back(static_cast<int>(rank));
  }
  std::string text;
  for (const auto& [op, those] : ranks) {
    text += (text.empty() ? "" : "; ") + ranks_text(those) + " " + (op.empty() ? "none" : op);
  }
  return "In the re-run of the step no operator was begun any more; the latest were: " + text + ".";
}

std::string RerunGuard::problem() const {
  const std::lock_guard lock(mutex_);
  return problem_;
}

void RerunGuard::serve() {
  const auto interval =
      std::clamp<milliseconds>(patience_ / 12, kShortestInterval, kLongestInterval);
  std::string why;
  while (why.empty()) {
    if (is_over_within(interval)) return;
    why = why_it_cannot_end();
  }
  if (!stands_still_for(patience_)) return;
  {
    const std::lock_guard lock(mutex_);
    if (is_over_) return;
    problem_ = why;
  }
  std::thread(abort_).detach();
  if (!stands_still_for(patience_)) return;
  {
    const std::lock_guard lock(mutex_);
    if (is_over_) return;
    has_concluded_ = true;
  }
  conclude_(why);
}

bool RerunGuard::is_over_within(Clock::duration time) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, time, [&] { return is_over_; });
}

/// Waits for `time` without an operator, from now on; false: the stretch is over.
bool RerunGuard::stands_still_for(Clock::duration time) {
  for (auto begun = Clock::now();;) {
    const auto left = begun + time - Clock::now();
    if (left <= Clock::duration::zero()) return true;
    if (is_over_within(left)) return false;
    begun = std::max(begun, progress_.latest().begun);
  }
}

/// A sentence without a full stop; "" if it can end, as far as is known.
std::string RerunGuard::why_it_cannot_end() {
  if (communicator_.has_any_published(failed_key(key_))) {
    const auto problems = communicator_.gather(failed_key(key_), Clock::now());
    for (std::size_t rank = 0; rank < problems.size(); ++rank) {
      if (problems[rank])
        return "the re-run of rank " + std::to_string(rank) + " has failed: " + *problems[rank];
    }
  }
  if (auto* const monitor = communicator_.monitor()) {
    if (const auto lost = monitor->lost(); !lost.empty()) return lost.front().describe();
    if (auto problem = monitor->problem(); !problem.empty()) return problem;
  }
  const auto [op, begun] = progress_.latest();
  if (Clock::now() - begun < kStandstill * patience_) return {};
  if (!std::exchange(has_reported_, true)) {
    (void)communicator_.publish(standstill_key(key_), op);
    report_end(communicator_, key_, stretch_);
  }
  return communicator_.have_all_published(over_key(key_, stretch_))
             ? "no rank has begun an operator for " +
                   std::to_string(
                       std::chrono::duration_cast<std::chrono::seconds>(kStandstill * patience_)
                           .count()) +
                   " s"
             : "";
}

}  // namespace nanlocator::inline step_room
