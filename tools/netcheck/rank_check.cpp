#include "netcheck/rank_check.hpp"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <mutex>
#include <set>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

#include "agree/store_client.hpp"
#include "nanlocator/agree/rank_monitor.hpp"
#include "nanlocator/record/atomic_file.hpp"
#include "netcheck/attribution.hpp"
#include "netcheck/text.hpp"
#include "netcheck/verdict.hpp"

namespace nanlocator::netcheck {
namespace {

using Clock = std::chrono::steady_clock;
using Json = nlohmann::ordered_json;
using std::chrono::milliseconds;

constexpr milliseconds kLook{50};            // between two looks of the supervisor at its rank
constexpr milliseconds kLookForOthers{300};  // and at whether another rank has ended the check
constexpr milliseconds kStoreAnswers{5'000};
// From the first call for the end on: what the ranks that live need to put their results down, on
// a busy machine. With the report it stays far below the 30 s that torchrun gives after SIGTERM.
constexpr milliseconds kGrace{6'000};
constexpr milliseconds kUntilPublished{300};  // the drill waits for the supervisor
constexpr std::size_t kMostEntries = 2'000;   // of one list of a result; the first ones tell most
constexpr milliseconds kLastOne{2'000};
constexpr int kHealthy = 0;
constexpr int kFindings = 1;

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

struct StoreGone {};

template <typename Value>
Value answered(std::optional<Value> value) {
  if (!value) throw StoreGone{};
  return *std::move(value);
}

void write_all(int file, std::string_view text) {
  while (!text.empty()) {
    const auto written = ::write(file, text.data(), text.size());
    if (written <= 0) return;
    text.remove_prefix(static_cast<std::size_t>(written));
  }
}

// What has become of a process of this host: "", "ended" or "stopped".
std::string state_of_process(int process) {
  std::ifstream file("/proc/" + std::to_string(process) + "/stat");
  std::string line;
  if (!std::getline(file, line)) return "ended";
  const auto state = line.find_last_of(')') + 2;  // the name before may hold brackets
  if (state >= line.size()) return "";
  if (line[state] == 'T' || line[state] == 't') return "stopped";
  return line[state] == 'Z' || line[state] == 'X' ? "ended" : "";
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
  Clock::time_point start = Clock::now();

  std::mutex mutex;
  std::condition_variable changed;
  Place place;
  int next_sequence = 0;
  Clock::time_point deadline;
  bool is_place_new = true;
  std::string end_reason;  // the worker's: "finished", "error", "failed"
  Json result = Json::object();
  std::string shown_stage;
  bool was_injected = false;  // of the worker alone

  // --- of the supervisor alone ---
  std::unique_ptr<StoreClient> store;
  std::unique_ptr<StoreClient> worker_store;
  std::unique_ptr<RankMonitor> monitor;
  Clock::time_point next_look_for_others;

  [[nodiscard]] static std::string key(const std::string& name) {
    return "nanlocator/netcheck/" + name;
  }
  [[nodiscard]] std::string key(const std::string& name, int rank) const {
    return key(name) + "/" + std::to_string(rank);
  }
  [[nodiscard]] static Deadline limit() { return Clock::now() + kStoreAnswers; }
  [[nodiscard]] bool has(const std::string& name) { return answered(store->has(name, limit())); }
  [[nodiscard]] std::string get(const std::string& name) {
    return answered(store->get(name, limit()));
  }
  void put(const std::string& name, const std::string& value) {
    if (!store->set(name, value, limit())) throw StoreGone{};
  }

  [[noreturn]] void end_worker(const std::string& reason, const std::string& error);
  [[noreturn]] void serve();
  void publish_place();
  [[nodiscard]] std::string reason_to_end();
  [[nodiscard]] std::string dump_result(const std::string& reason);
  [[nodiscard]] Json who_and_where();
  [[nodiscard]] std::set<int> gone_ranks(const std::set<int>& missing);
  [[nodiscard]] bool is_my_turn(Clock::time_point called);
  void wait_for_the_end(const std::string& reason);
  [[nodiscard]] std::string gather_results();
  [[nodiscard]] Json result_of_missing(int rank);
  int report(const std::string& verdict);
  void wait_until_all_have_left();
  [[noreturn]] void leave(int code);
  [[noreturn]] void tell_alone();
};

// ----------------------------------------------------------------------------------- the
// supervisor

void RankCheck::Shared::serve() {
  try {
    for (;;) {
      {
        std::unique_lock lock(mutex);
        changed.wait_for(lock, kLook, [&] { return is_place_new || !end_reason.empty(); });
      }
      publish_place();
      const auto reason = reason_to_end();
      if (!reason.empty()) wait_for_the_end(reason);
    }
  } catch (const StoreGone&) {
  } catch (const std::exception&) {
  }
  tell_alone();
}

void RankCheck::Shared::publish_place() {
  std::string text;
  {
    const std::lock_guard lock(mutex);
    if (!std::exchange(is_place_new, false)) return;
    text = who_and_where().dump();
  }
  put(key("place", options.rank), text);
}

Json RankCheck::Shared::who_and_where() {  // the mutex is held
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
  next_look_for_others = Clock::now() + kLookForOthers;
  return has(key("end")) || !monitor->lost().empty() ? "stopped" : "";
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

// Returns only by leaving the process, or by throwing where the Store is gone.
void RankCheck::Shared::wait_for_the_end(const std::string& reason) {
  put(key("result", options.rank), dump_result(reason));
  if (reason != "finished") put(key("end"), "");
  auto called = Clock::time_point::max();  // when this rank saw that the end was called for
  bool has_lost_the_turn = false;
  for (;; std::this_thread::sleep_for(kLook)) {
    if (has(key("report"))) {
      const auto code = std::stoi(get(key("report")));
      put(key("left", options.rank), "");
      leave(code);
    }
    if (called == Clock::time_point::max() && has(key("end"))) called = Clock::now();
    if (!monitor->lost().empty() && called == Clock::time_point::max()) put(key("end"), "");
    if (has_lost_the_turn) {
      if (called != Clock::time_point::max() && Clock::now() > called + 3 * kGrace)
        throw StoreGone{};
    } else if (is_my_turn(called)) {
      if (answered(store->put_if_absent(key("reporter"), "", limit()))) {
        leave(report(make_verdict(gather_results())));
      }
      has_lost_the_turn = true;
    }
  }
}

// The lowest rank that lives: those below it are gone, or had time enough.
bool RankCheck::Shared::is_my_turn(Clock::time_point called) {
  if (options.rank == 0) return true;
  if (called == Clock::time_point::max()) return false;
  if (Clock::now() > called + 2 * kGrace) return true;
  std::set<int> below;
  for (int rank = 0; rank < options.rank; ++rank) {
    if (!has(key("result", rank)))
      below.insert(rank);
    else
      return false;
  }
  return gone_ranks(below) == below;
}

// Of these, the ones whose process on this host has ended or is stopped, and those that the monitor
// has lost.
std::set<int> RankCheck::Shared::gone_ranks(const std::set<int>& missing) {
  std::set<int> gone;
  for (const auto& lost : monitor->lost()) {
    if (missing.contains(lost.rank)) gone.insert(lost.rank);
  }
  for (const int rank : missing) {
    if (!gone.contains(rank) && !result_of_missing(rank).value("process", "").empty())
      gone.insert(rank);
  }
  return gone;
}

Json RankCheck::Shared::result_of_missing(int rank) {
  Json known_of = {{"rank", rank}, {"answered", false}, {"ended", ""}, {"process", ""}};
  if (!has(key("place", rank))) return known_of;
  const auto known = Json::parse(get(key("place", rank)));
  for (const char* name : {"host", "local_rank", "place"}) known_of[name] = known.at(name);
  if (known.at("host") == options.host) known_of["process"] = state_of_process(known.at("process"));
  return known_of;
}

std::string RankCheck::Shared::gather_results() {
  std::set<int> missing;
  for (int rank = 0; rank < options.world_size; ++rank) missing.insert(rank);
  std::vector<Json> results(options.world_size);
  auto called = Clock::time_point::max();
  for (; !missing.empty(); std::this_thread::sleep_for(kLook)) {
    for (auto rank = missing.begin(); rank != missing.end();) {
      if (has(key("result", *rank))) {
        results[*rank] = Json::parse(get(key("result", *rank)));
        rank = missing.erase(rank);
      } else {
        ++rank;
      }
    }
    if (called == Clock::time_point::max()) {
      if (received_signal != 0 || !monitor->lost().empty()) put(key("end"), "");
      if (has(key("end"))) called = Clock::now();
    } else if (Clock::now() > called + kGrace ||
               (Clock::now() > called + 2 * kLookForOthers && gone_ranks(missing) == missing)) {
      break;
    }
  }
  for (const int rank : missing) results[rank] = result_of_missing(rank);
  Json all = {{"world_size", options.world_size}, {"backend", options.backend}};
  all["seconds"] = std::chrono::duration<double>(Clock::now() - start).count();
  all["differences"] = Json::array();
  for (const auto& each : results) {
    for (const auto& difference : each.value("differences", Json::array())) {
      all["differences"].push_back(difference);
    }
  }
  all["ranks"] = std::move(results);
  return all.dump(-1, ' ', false, Json::error_handler_t::replace);
}

int RankCheck::Shared::report(const std::string& verdict) {
  const bool is_healthy = Json::parse(verdict).at("verdict") == "healthy";
  const int code = is_healthy ? kHealthy : kFindings;
  write_all(STDOUT_FILENO,
            options.as_json ? verdict + "\n" : format_verdict(verdict, {.colour = options.colour}));
  if (!options.output.empty()) {
    try {
      write_file_atomically(options.output, verdict + "\n");
    } catch (const std::exception& error) {
      write_all(STDERR_FILENO, std::string("netcheck: ") + error.what() + "\n");
    }
  }
  put(key("report"), std::to_string(code));
  wait_until_all_have_left();
  return code;
}

// The Store may live in this process, so it leaves last of those that still answer.
void RankCheck::Shared::wait_until_all_have_left() {
  const auto until = Clock::now() + kLastOne;
  for (int rank = 0; rank < options.world_size; ++rank) {
    if (rank == options.rank || !has(key("result", rank))) continue;
    while (!has(key("left", rank)) && Clock::now() < until) std::this_thread::sleep_for(kLook / 5);
  }
}

void RankCheck::Shared::leave(int code) {
  ::_exit(code);
}

void RankCheck::Shared::tell_alone() {
  std::string text = "netcheck: rank " + std::to_string(options.rank) +
                     " no longer reaches the Store: the host that keeps it (under torchrun the "
                     "first one) has ended or does not answer.";
  {
    const std::lock_guard lock(mutex);
    if (place.sequence >= 0) {
      text += " It was in " + place.step + (place.group.empty() ? "" : " on " + place.group) + ".";
    }
    if (result.contains("error")) text += " " + result["error"].get<std::string>();
  }
  write_all(STDERR_FILENO, text + "\n");
  leave(kFindings);
}

// --------------------------------------------------------------------------------------- the
// worker

RankCheck::RankCheck(c10::intrusive_ptr<c10d::Store> store, RankCheckOptions options,
                     Injection injection)
    : shared_(std::make_shared<Shared>()) {
  shared_->store = std::make_unique<StoreClient>(std::move(store));
  shared_->worker_store = shared_->store->another();
  shared_->deadline = Clock::now() + options.deadline;
  const auto place = "rank " + std::to_string(options.rank) + " on host " + options.host;
  shared_->monitor = std::make_unique<RankMonitor>(
      shared_->store->another(), "nanlocator/netcheck/monitor", options.rank, options.world_size,
      place, MonitorTimes::for_deadline(options.deadline), nullptr);
  shared_->options = std::move(options);
  shared_->injection = std::move(injection);
  handle_signals();
  std::thread([shared = shared_] { shared->serve(); }).detach();
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
  return shared_->place.sequence;  // written by the worker alone
}

void RankCheck::launched() {
  {
    // The supervisor is not woken: it would disturb what is being timed.
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

void RankCheck::publish(const std::string& key, const std::string& text) {
  if (!shared_->worker_store->set(shared_->key(key, shared_->options.rank), text,
                                  Shared::limit())) {
    end_by_error("the Store does not answer");
  }
}

std::vector<std::string> RankCheck::collect(const std::string& key) {
  std::vector<std::string> texts;
  auto& store = *shared_->worker_store;
  for (int rank = 0; rank < shared_->options.world_size; ++rank) {
    const auto full_key = shared_->key(key, rank);
    while (!store.has(full_key, Shared::limit()).value_or(false))
      std::this_thread::sleep_for(kLook);
    texts.push_back(store.get(full_key, Shared::limit()).value_or(""));
  }
  return texts;
}

void RankCheck::finish() {
  shared_->end_worker("finished", "");
}

void RankCheck::end_by_error(const std::string& error) {
  shared_->end_worker("error", error);
}

void RankCheck::end_by_failure(const std::string& error) {
  shared_->end_worker("failed", error);
}

void RankCheck::Shared::end_worker(const std::string& reason, const std::string& error) {
  {
    const std::lock_guard lock(mutex);
    if (!error.empty()) result["error"] = error;
    end_reason = reason;
    changed.notify_all();
  }
  for (;;) std::this_thread::sleep_for(std::chrono::hours(1));  // the supervisor ends the process
}

}  // namespace nanlocator::netcheck
