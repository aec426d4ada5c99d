// One rank's part of the network check: where it stands, what it saw, and the end.
//
// Two threads. The worker (Python's main thread) calls `enter`, `launched`, `finished` around each
// step and may block in any of them forever. The supervisor, a thread of this class that needs
// neither the GIL nor the device, writes the place to the Store, and ends the check when
// the worker is done, a step's deadline has passed, a signal arrived (torchrun's, after another
// rank died), or another rank has asked for the end. The end uses the Store only: every rank writes
// what it saw there, the lowest surviving rank explains it and prints. Where something was found
// all exit with 1 by _exit: a destructor of a process group could wait forever.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace c10d {
class Store;
}

namespace nanlocator::netcheck {

struct RankCheckOptions {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  std::string host;
  std::string backend;
  std::chrono::milliseconds deadline{30'000};  // of each step
  bool as_json = false;
  bool colour = false;
  std::string output;  // the verdict is written there, too; "": nowhere
  int terminal = 1;    // descriptor that the verdict is printed on; not owned
};

/// The drill: a fault of this rank's own, at the first step whose stage or name it is.
struct Injection {
  enum class Kind : std::uint8_t { none, corrupt, slow, hang, stop, die };
  enum class Moment : std::uint8_t { before, inside, after };
  Kind kind = Kind::none;  // none on all ranks but one
  Moment moment = Moment::before;
  // A stage, a collective or a group; "": everywhere (hang, stop, die: at the first all_reduce).
  std::string at{};
  bool in_contribution = false;         // corrupt: what is sent instead of what has come
  std::chrono::milliseconds pause{30};  // slow: before each launch
};

/// A step that several ranks make together, or (no ranks) each on its own.
struct Step {
  std::string stage;    // "device", "barrier", "collectives", "groups", "timing"
  std::string name;     // begins with the collective's
  std::string group{};  // "tp[4,5]"
  std::vector<int> ranks{};
  std::chrono::milliseconds extra{0};  // more time than the deadline
};

class RankCheck {
 public:
  /// Shares `store`; keys live below "nanlocator/netcheck". Handles SIGTERM, SIGINT and SIGHUP from
  /// now on. Returns when the Store has answered; ends the process where it does not. One per
  /// process.
  RankCheck(c10::intrusive_ptr<c10d::Store> store, RankCheckOptions options, Injection injection);
  ~RankCheck();
  RankCheck(const RankCheck&) = delete;  // one per process

  [[nodiscard]] const RankCheckOptions& options() const noexcept;

  // --- the worker's ---

  /// Every rank counts every step, those of other ranks' groups with `skip`.
  void enter(const Step& step);
  void skip();
  /// Of the step that this rank is in.
  [[nodiscard]] int sequence() const noexcept;
  /// Called between each launch of the step's communication and the wait for it.
  void launched();
  void finished();
  /// The drill: sleeps where this rank is to be slow.
  void before_launch();
  /// The drill's, where this step's data are to be corrupted by this rank.
  [[nodiscard]] const Injection* corruption() const;

  /// Adds to the list `key` of this rank's result ("wrong", "timings", "edges", "unsupported",
  /// "device_failures"), or sets it.
  void add(const std::string& key, nlohmann::ordered_json value);
  void set(const std::string& key, nlohmann::ordered_json value);

  /// Puts `text` where the other ranks' `collect` finds it.
  void publish(const std::string& name, const std::string& text);
  /// What every rank published under `name`; waits, under the deadline of the step.
  [[nodiscard]] std::vector<std::string> collect(const std::string& name);

  /// Waits until every rank has arrived here once, under the deadline of the step.
  void meet();

  /// The end: returns where all ranks are healthy, else the process exits with 1.
  void finish();
  /// `error`: first line of what a collective or a connection threw. The peer may be at fault.
  [[noreturn]] void end_by_error(const std::string& error);
  /// `error`: of this rank alone.
  [[noreturn]] void end_by_failure(const std::string& error);

 private:
  struct Shared;
  void inject(Injection::Moment moment);
  [[nodiscard]] bool is_at(const std::string& name) const;
  std::shared_ptr<Shared> shared_;
};

}  // namespace nanlocator::netcheck
