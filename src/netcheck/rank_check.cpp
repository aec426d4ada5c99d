#include "netcheck/rank_check.hpp"
#include "nanlocator/error.hpp"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

#include "netcheck/attribution.hpp"
#include "netcheck/check_store.hpp"
#include "netcheck/conclusion.hpp"
#include "netcheck/write_all.hpp"

namespace nanlocator::netcheck {
namespace {

using Clock = std::chrono::steady_clock;
using Json = nlohmann::ordered_json;
using std::chrono::milliseconds;

constexpr milliseconds kRankInterval{50};     // between two checks of the rank by its supervisor
constexpr milliseconds kPeersInterval{300};   // and of whether another rank has ended the check
constexpr milliseconds kUntilPublished{300};  // the drill waits for the supervisor
constexpr std::size_t kMostEntries = 2'000;   // of one list of a result; the first ones matter most

std::atomic<int> received_signal = 0;

void keep_signal(int number) {
  received_signal = number;
}

void handle_signals() {
  struct sigaction action {};
  action.sa_handler = keep_signal;
  action.sa_flags = SA_RESTART;
  for (const int number : {SIGTERM, SIGINT, SIGHUP}) ::sigaction(number, &action, nullptr);
}

// torchrun shows the message of this file in its summary
// (torch/distributed/elastic/multiprocessing/errors/error_handler.py has its form).
void report_to_torchrun(const std::string& message) {
  const char* const file = std::getenv("TORCHELASTIC_ERROR_FILE");
  if (file == nullptr) return;
  const Json extra = {{"py_callstack", message}, {"timestamp", std::to_string(std::time(nullptr))}};
  const Json json = {{"message", {{"message", message}, {"extraInfo", extra}}}};
  std::ofstream(file) << json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string_view name_of(State state) {
  return state == State::entered ? "entered" : state == State::launched ? "launched" : "finished";
}

Json to_json(const Place& place) {
  Json json = {{"stage", place.stage}, {"step", place.step}, {"group", place.group}};
  json["ranks"] = place.ranks;
  json["sequence"] = place.sequence;
  json["state"] = name_of(place.state);
  json["launches"] = place.launches;
  return json;
}

}  // namespace

struct RankCheck::Shared {
  RankCheckOptions options;
  Injection injection;

  std::mutex mutex;
  std::condition_variable changed;
  Place place;
  int next_sequence = 0;
  Clock::time_point deadline;
  bool is_place_new = true;
  std::string end_reason;  // the worker's: "finished", "error", "failed"
  Json result = Json::object();
  std::string shown_stage;
  bool is_healthy = false;  // set last by the supervisor; otherwise it ends the process

  // --- used by the supervisor alone ---
  CheckStore store;
  Conclusion conclusion;
  Clock::time_point next_look_for_others;
  // --- used by the worker alone ---
  CheckStore worker_store;
  bool was_injected = false;

  Shared(c10::intrusive_ptr<c10d::Store> store, RankCheckOptions options, Injection injection);
  void connect();
  void end_worker(const std::string& reason, const std::string& error);
  void serve();
  void publish_place();
  [[nodiscard]] std::string reason_to_end();
  [[nodiscard]] std::string dump_result(const std::string& reason);
  [[nodiscard]] Json who_and_where();
  void leave(const Report& report);
  [[noreturn]] void report_alone(const std::string& why);
};

// --- the supervisor ---------------------------------------------------------------------------

void RankCheck::Shared::serve() {
  try {
    std::string reason;
    while (reason.empty()) {
      {
        std::unique_lock lock(mutex);
        changed.wait_for(lock, kRankInterval, [&] { return is_place_new || !end_reason.empty(); });
      }
      publish_place();
      reason = reason_to_end();
    }
    leave(conclusion.conclude(dump_result(reason), reason != "finished"));
  } catch (const StoreLost& error) {
    report_alone(std::string("has lost the Store: ") + error.what() +
                 ". The process that hosts it (under torchrun on the first host, else rank 0) "
                 "has ended, or its host does not answer.");
  } catch (const std::exception& error) {
    report_alone("could not conclude: " + first_line(error));
  }
}

void RankCheck::Shared::publish_place() {
  Json here;
  {
    const std::lock_guard lock(mutex);
    if (!std::exchange(is_place_new, false)) return;
    here = who_and_where();
  }
  conclusion.put_place(here);
}

Json RankCheck::Shared::who_and_where() {  // needs the mutex
  return {{"rank", options.rank},
          {"host", options.host},
          {"local_rank", options.local_rank},
          {"process", static_cast<int>(::getpid())},
          {"place", place.sequence < 0 ? Json(nullptr) : to_json(place)}};
}

std::string RankCheck::Shared::reason_to_end() {
  {
    const std::lock_guard lock(mutex);
    if (!end_reason.empty()) return end_reason;
    if (Clock::now() > deadline) return "deadline";
  }
  if (received_signal != 0) return "signal";
  if (Clock::now() < next_look_for_others) return "";
  next_look_for_others = Clock::now() + kPeersInterval;
  return conclusion.is_end_requested() ? "stopped" : "";
}

std::string RankCheck::Shared::dump_result(const std::string& reason) {
  const std::lock_guard lock(mutex);
  auto text = who_and_where();
  text["answered"] = true;
  text["ended"] = reason;
  text.erase("process");
  text.update(result);
  return text.dump(-1, ' ', false, Json::error_handler_t::replace);
}

// A healthy rank returns to Python; the others may be stuck in a group, so the process ends here.
void RankCheck::Shared::leave(const Report& report) {
  conclusion.leave(report);
  if (report.exit_code != kHealthy) {
    report_to_torchrun(report.headline);
    ::_exit(report.exit_code);
  }
  const std::lock_guard lock(mutex);
  is_healthy = true;
  changed.notify_all();
}

void RankCheck::Shared::report_alone(const std::string& why) {
  auto text = "rank " + std::to_string(options.rank) + " on host " + options.host + " " + why;
  {
    const std::lock_guard lock(mutex);
    if (place.sequence >= 0) {
      text += " It was in " + place.step + (place.group.empty() ? "" : " on " + place.group) + ".";
    }
    if (result.contains("error")) text += " " + result["error"].get<std::string>();
  }
  write_all(STDERR_FILENO, "netcheck: " + text + "\n");
  report_to_torchrun(text);
  ::_exit(kFindings);
}

// --- the worker -------------------------------------------------------------------------------

RankCheck::RankCheck(c10::intrusive_ptr<c10d::Store> store, RankCheckOptions options,
                     Injection injection)
    : shared_(
          std::make_shared<Shared>(std::move(store), std::move(options), std::move(injection))) {
  handle_signals();
  shared_->connect();
  shared_->deadline = Clock::now() + shared_->options.deadline;
  std::thread([shared = shared_] { shared->serve(); }).detach();
}

RankCheck::Shared::Shared(c10::intrusive_ptr<c10d::Store> c10d_store, RankCheckOptions given,
                          Injection drill)
    : options(std::move(given)),
      injection(std::move(drill)),
      store(std::move(c10d_store), options.deadline),
      conclusion(store, options, received_signal),
      worker_store(store.another()) {}

// Opens both connections before any deadline starts.
void RankCheck::Shared::connect() {
  try {
    store.connect();
    worker_store.connect();
  } catch (const StoreLost& error) {
    report_alone(std::string("cannot use the Store: ") + error.what());
  }
}

RankCheck::~RankCheck() = default;

const RankCheckOptions& RankCheck::options() const noexcept {
  return shared_->options;
}

void RankCheck::enter(const Step& step) {
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->place = {step.stage, step.name, step.group, step.ranks, shared_->next_sequence++};
    shared_->deadline = Clock::now() + shared_->options.deadline + step.extra;
    shared_->is_place_new = true;
    shared_->changed.notify_all();
  }
  if (shared_->options.rank == 0 && std::exchange(shared_->shown_stage, step.stage) != step.stage) {
    write_all(STDERR_FILENO, "netcheck: " + step.stage + "\n");
  }
  inject(Injection::Moment::before);
}

void RankCheck::skip() {
  const std::lock_guard lock(shared_->mutex);
  ++shared_->next_sequence;
}

int RankCheck::sequence() const noexcept {
  return shared_->place.sequence;  // written only by the worker
}

void RankCheck::launched() {
  {
    // Does not wake the supervisor, which would disturb the timing.
    const std::lock_guard lock(shared_->mutex);
    shared_->place.state = State::launched;
    ++shared_->place.launches;
    shared_->is_place_new = true;
  }
  inject(Injection::Moment::inside);
}

void RankCheck::finished() {
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->place.state = State::finished;
    shared_->is_place_new = true;
    shared_->changed.notify_all();
  }
  inject(Injection::Moment::after);
}

void RankCheck::inject(Injection::Moment moment) {
  const auto& injection = shared_->injection;
  using Kind = Injection::Kind;
  if (injection.kind != Kind::hang && injection.kind != Kind::stop && injection.kind != Kind::die) {
    return;
  }
  const auto at = injection.at.empty() ? std::string("all_reduce") : injection.at;
  if (!is_at(at) || moment != injection.moment || std::exchange(shared_->was_injected, true))
    return;
  std::this_thread::sleep_for(kUntilPublished);
  if (injection.kind == Kind::die) ::kill(::getpid(), SIGKILL);
  if (injection.kind == Kind::stop) ::kill(::getpid(), SIGSTOP);
  for (;;) std::this_thread::sleep_for(std::chrono::hours(1));  // the supervisor lives
}

void RankCheck::before_launch() {
  if (shared_->injection.kind == Injection::Kind::slow) {
    std::this_thread::sleep_for(shared_->injection.pause);
  }
}

const Injection* RankCheck::corruption() const {
  const auto& injection = shared_->injection;
  if (injection.kind != Injection::Kind::corrupt) return nullptr;
  return injection.at.empty() || is_at(injection.at) ? &injection : nullptr;
}

bool RankCheck::is_at(const std::string& name) const {
  const auto& place = shared_->place;
  return place.stage == name || place.group == name || place.step.starts_with(name);
}

void RankCheck::add(const std::string& key, Json value) {
  const std::lock_guard lock(shared_->mutex);
  auto& list = shared_->result[key];
  if (list.size() < kMostEntries) list.push_back(std::move(value));
}

void RankCheck::set(const std::string& key, Json value) {
  const std::lock_guard lock(shared_->mutex);
  shared_->result[key] = std::move(value);
}

void RankCheck::publish(const std::string& name, const std::string& text) {
  shared_->worker_store.put(of_rank(name, shared_->options.rank), text);
}

std::vector<std::string> RankCheck::collect(const std::string& name) {
  std::vector<std::string> texts;
  auto& store = shared_->worker_store;
  for (int rank = 0; rank < shared_->options.world_size; ++rank) {
    while (!store.has(of_rank(name, rank))) std::this_thread::sleep_for(kRankInterval);
    texts.push_back(store.get(of_rank(name, rank)));
  }
  return texts;
}

void RankCheck::meet() {
  auto& store = shared_->worker_store;
  if (store.count("came") == shared_->options.world_size) store.put("all_came", "");
  while (!store.has("all_came")) std::this_thread::sleep_for(kRankInterval);
}

void RankCheck::finish() {
  shared_->end_worker("finished", "");
}

void RankCheck::end_by_error(const std::string& error) {
  shared_->end_worker("error", error);
  std::abort();  // unreachable: only a rank that has finished returns
}

void RankCheck::end_by_failure(const std::string& error) {
  shared_->end_worker("failed", error);
  std::abort();  // unreachable
}

// Waits for the supervisor, which ends the process unless all is well.
void RankCheck::Shared::end_worker(const std::string& reason, const std::string& error) {
  std::unique_lock lock(mutex);
  if (!error.empty()) result["error"] = error;
  end_reason = reason;
  changed.notify_all();
  changed.wait(lock, [&] { return is_healthy; });
}

}  // namespace nanlocator::netcheck
