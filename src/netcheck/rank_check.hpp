// One rank's part of the network check: its position, its result, and the end.
//
// Two threads. The worker (Python's main thread) calls `enter`, `launched`, `finished` around each
// step and may block in any of them forever. The supervisor, a thread of this class that needs
// neither the GIL nor the device, writes the position to the Store. It ends the check when the
// worker is done, a step's deadline has passed, a signal arrived (torchrun's, after another rank
// died), or another rank has requested the end. The end uses the Store only: every rank writes its
// result there, the lowest surviving rank explains and prints them. If there are findings, all exit
// with 1 by _exit, because a destructor of a process group could wait forever.
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
  std::string output;  // also writes the verdict to this file; "": to none
  int terminal = 1;    // descriptor on which the verdict is printed; not owned
};

/// The drill: plants a fault on this rank, at the first step with this stage or name.
struct Injection {
  enum class Kind : std::uint8_t { none, corrupt, slow, hang, stop, die };
  enum class Moment : std::uint8_t { before, inside, after };
  Kind kind = Kind::none;  // none on all ranks but one
  Moment moment = Moment::before;
  // A stage, a collective or a group; "": everywhere (hang, stop, die: at the first all_reduce).
  std::string at{};
  bool in_contribution = false;         // corrupt: the data sent, instead of the data received
  std::chrono::milliseconds pause{30};  // slow: before each launch
};

/// A step that several ranks take together or, without ranks, each on its own.
struct Step {
  std::string stage;    // "device", "barrier", "collectives", "groups", "timing"
  std::string name;     // begins with the collective's
  std::string group{};  // "tp[4,5]"
  std::vector<int> ranks{};
  std::chrono::milliseconds extra{0};  // time in addition to the deadline
};

class RankCheck {
 public:
  /// Shares `store`; keys begin with "nanlocator/netcheck". Handles SIGTERM, SIGINT and SIGHUP from
  /// now on. Returns when the Store has answered; ends the process if it does not. One per process.
  RankCheck(c10::intrusive_ptr<c10d::Store> store, RankCheckOptions options, Injection injection);
  ~RankCheck();
  RankCheck(const RankCheck&) = delete;  // one per process

  [[nodiscard]] const RankCheckOptions& options() const noexcept;

  // --- for the worker ---

  /// Every rank counts every step; `skip` counts those of other ranks' groups.
  void enter(const Step& step);
  void skip();
  /// Of this rank's current step.
  [[nodiscard]] int sequence() const noexcept;
  /// Called between each launch of the step's communication and the wait for it.
  void launched();
  void finished();
  /// The drill: sleeps if this rank is to be slow.
  void before_launch();
  /// The drill's injection if this rank is to corrupt this step's data, else null.
  [[nodiscard]] const Injection* corruption() const;

  /// Adds to the list `key` of this rank's result ("wrong", "timings", "edges", "unsupported",
  /// "device_failures"), or sets it.
  void add(const std::string& key, nlohmann::ordered_json value);
  void set(const std::string& key, nlohmann::ordered_json value);

  /// Publishes `text` for the other ranks' `collect`.
  void publish(const std::string& name, const std::string& text);
  /// The texts that every rank published under `name`; waits, under the step's deadline.
  [[nodiscard]] std::vector<std::string> collect(const std::string& name);

  /// Waits until every rank has called this, under the step's deadline.
  void meet();

  /// The end: returns if all ranks are healthy, otherwise the process exits with 1.
  void finish();
  /// `error`: first line of a collective's or a connection's error. The peer may be at fault.
  [[noreturn]] void end_by_error(const std::string& error);
  /// `error`: an error of this rank alone.
  [[noreturn]] void end_by_failure(const std::string& error);

 private:
  struct Shared;
  void inject(Injection::Moment moment);
  [[nodiscard]] bool is_at(const std::string& name) const;
  std::shared_ptr<Shared> shared_;
};

}  // namespace nanlocator::netcheck
