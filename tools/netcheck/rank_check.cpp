#include "netcheck/rank_check.hpp"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <iostream>
#include <mutex>
#include <set>
#include <sstream>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

#include "agree/store_client.hpp"
#include "nanlocator/error.hpp"
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
// Of the Store's connections, before the first step: looking names up takes seconds on some hosts.
constexpr milliseconds kConnects{60'000};
// A connection that was reset is opened again; a Store that is gone refuses that.
constexpr int kAttempts = 3;
constexpr milliseconds kBetweenAttempts{500};
// From the first call for the end on: what the ranks that live need to put their results down, on
// a busy machine. With the report it stays far below the 30 s that torchrun gives after SIGTERM.
constexpr milliseconds kGrace{6'000};
constexpr milliseconds kUntilPublished{300};  // the drill waits for the supervisor
constexpr std::size_t kMostEntries = 2'000;   // of one list of a result; the first ones tell most
constexpr milliseconds kLastOne{10'000};
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

// Why a rank is left to itself.
struct CutOff : Error {
  using Error::Error;
};

std::string first_line(const std::exception& error) {
  const std::string text = error.what();
  return text.substr(0, text.find('\n'));
}

void write_all(int file, std::string_view text) {
  while (!text.empty()) {
    const auto written = ::write(file, text.data(), text.size());
    if (written <= 0) return;
    text.remove_prefix(static_cast<std::size_t>(written));
  }
}

// A process of this host, as /proc/PID/stat has it.
struct Process {
  char state = 'X';
  int parent = 0;

  // "ended", "stopped" or, where it runs, "".
  [[nodiscard]] std::string what_became() const {
    if (state == 'T' || state == 't') return "stopped";
    return state == 'Z' || state == 'X' ? "ended" : "";
  }
};

Process look_at_process(int process) {
  std::ifstream file("/proc/" + std::to_string(process) + "/stat");
  std::string line;
  Process found;
  if (!std::getline(file, line)) return found;
  line.erase(0, line.find_last_of(')') + 1);  // the name before may hold brackets
  std::istringstream(line) >> found.state >> found.parent;
  return found;
}

// torchrun shows the message of this file in its summary (torch/distributed/elastic/multiprocessing
// /errors/error_handler.py has its form).
void tell_torchrun(const std::string& message) {
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
  bool is_healthy = false;  // the supervisor's last word; else it ends the process

  // --- of the supervisor alone ---
  std::unique_ptr<StoreClient> store;
  Clock::time_point next_look_for_others;
  // --- of the worker alone ---
  std::unique_ptr<StoreClient> worker_store;
  bool was_injected = false;

  [[nodiscard]] static std::string key(const std::string& name) {
    return "nanlocator/netcheck/" + name;
  }
  [[nodiscard]] std::string key(const std::string& name, int rank) const {
    return key(name) + "/" + std::to_string(rank);
  }
  [[nodiscard]] bool has(std::unique_ptr<StoreClient>& client, const std::string& name) {
    return ask<bool>(client, [&](auto& c, Deadline limit) { return c.has(name, limit); });
  }
  [[nodiscard]] std::string get(std::unique_ptr<StoreClient>& client, const std::string& name) {
    return ask<std::string>(client, [&](auto& c, Deadline limit) { return c.get(name, limit); });
  }
  void put(std::unique_ptr<StoreClient>& client, const std::string& name,
           const std::string& value) {
    ask<bool>(client, [&](auto& c, Deadline limit) {
      return c.set(name, value, limit) ? std::optional(true) : std::nullopt;
    });
  }
  [[nodiscard]] bool has(const std::string& name) { return has(store, name); }
  [[nodiscard]] std::string get(const std::string& name) { return get(store, name); }
  void put(const std::string& name, const std::string& value) { put(store, name, value); }
  [[nodiscard]] bool is_first(const std::string& name) {
    return ask<bool>(store,
                     [&](auto& c, Deadline limit) { return c.put_if_absent(name, "", limit); });
  }
  template <typename Value, typename Call>
  Value ask(std::unique_ptr<StoreClient>& client, const Call& call);

  void connect();
  void end_worker(const std::string& reason, const std::string& error);
  void serve();
  void publish_place();
  [[nodiscard]] std::string reason_to_end();
  [[nodiscard]] std::string dump_result(const std::string& reason);
  [[nodiscard]] Json who_and_where();
  [[nodiscard]] std::set<int> gone_ranks(const std::set<int>& missing);
  [[nodiscard]] bool is_my_turn(Clock::time_point called);
  [[nodiscard]] Json wait_for_report(const std::string& reason);
  [[nodiscard]] std::string gather_results();
  [[nodiscard]] Json result_of_missing(int rank);
  [[nodiscard]] Json report(const std::string& results);
  void end_if_stopped(int rank);
  void wait_until_all_have_left();
  void leave(const Json& report);
  [[noreturn]] void tell_alone(const std::string& why);
};

// A Store that answers late is not gone. One is gone that refuses the connection, or gives no
// answer for as long as a step may take.
template <typename Value, typename Call>
Value RankCheck::Shared::ask(std::unique_ptr<StoreClient>& client, const Call& call) {
  for (int attempt = 1;; ++attempt) {
    try {
      auto answer = call(*client, Clock::now() + options.deadline);
      if (answer) return *std::move(answer);
      throw CutOff("it gave no answer for " + std::to_string(options.deadline.count() / 1000) +
                   " s");
    } catch (const CutOff&) {
      throw;
    } catch (const std::exception& error) {
      if (attempt == kAttempts) throw CutOff(first_line(error));
    }
    std::this_thread::sleep_for(kBetweenAttempts);
    client = client->another();
  }
}

// --- the supervisor ---------------------------------------------------------------------------

void RankCheck::Shared::serve() {
  try {
    std::string reason;
    while (reason.empty()) {
      {
        std::unique_lock lock(mutex);
        changed.wait_for(lock, kLook, [&] { return is_place_new || !end_reason.empty(); });
      }
      publish_place();
      reason = reason_to_end();
    }
    leave(wait_for_report(reason));
  } catch (const CutOff& error) {
    tell_alone(std::string("has lost the Store: ") + error.what() +
               ". The process that keeps it (under torchrun that of the first host, else rank 0) "
               "has ended, or its host does not answer.");
  } catch (const std::exception& error) {
    tell_alone("could not conclude: " + first_line(error));
  }
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
  return has(key("end")) ? "stopped" : "";
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

// Every rank puts its result down; one of them reports. The report: {"code", "headline",
// "missing"}.
Json RankCheck::Shared::wait_for_report(const std::string& reason) {
  put(key("result", options.rank), dump_result(reason));
  if (reason != "finished") put(key("end"), "");
  auto called = Clock::time_point::max();  // when this rank saw that the end was called for
  bool has_lost_the_turn = false;
  for (;; std::this_thread::sleep_for(kLook)) {
    if (has(key("report"))) return Json::parse(get(key("report")));
    if (called == Clock::time_point::max() && has(key("end"))) called = Clock::now();
    if (!has_lost_the_turn && is_my_turn(called)) {
      if (is_first(key("reporter"))) return report(gather_results());
      has_lost_the_turn = true;
    }
    if (has_lost_the_turn && called != Clock::time_point::max() &&
        Clock::now() > called + 3 * kGrace) {
      throw Error("the rank whose turn it was has put down no report");
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

// Of these, the ones whose process on this host has ended or is stopped.
std::set<int> RankCheck::Shared::gone_ranks(const std::set<int>& missing) {
  std::set<int> gone;
  for (const int rank : missing) {
    if (!result_of_missing(rank).at("process").get<std::string>().empty()) gone.insert(rank);
  }
  return gone;
}

Json RankCheck::Shared::result_of_missing(int rank) {
  Json known_of = {{"rank", rank}, {"answered", false}, {"ended", ""}, {"process", ""}};
  if (!has(key("place", rank))) return known_of;
  const auto known = Json::parse(get(key("place", rank)));
  for (const char* name : {"host", "local_rank", "place"}) known_of[name] = known.at(name);
  if (known.at("host") == options.host) {
    known_of["process"] = look_at_process(known.at("process")).what_became();
  }
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
      if (received_signal != 0) put(key("end"), "");
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

Json RankCheck::Shared::report(const std::string& results) {
  const auto verdict = make_verdict(results);
  const auto json = Json::parse(verdict);
  write_all(STDOUT_FILENO,
            options.as_json ? verdict + "\n" : format_verdict(verdict, {.colour = options.colour}));
  if (!options.output.empty()) {
    try {
      write_file_atomically(options.output, verdict + "\n");
    } catch (const std::exception& error) {
      write_all(STDERR_FILENO, std::string("netcheck: ") + error.what() + "\n");
    }
  }
  Json report = {{"code", json.at("verdict") == "healthy" ? kHealthy : kFindings},
                 {"headline", headline_of(verdict)},
                 {"missing", Json::array()}};
  const auto all = Json::parse(results);
  for (const auto& each : all.at("ranks")) {
    if (!each.at("answered").get<bool>()) report["missing"].push_back(each.at("rank"));
  }
  put(key("report"), report.dump());
  wait_until_all_have_left();
  return report;
}

// torchrun waits 30 s for a process that is stopped and so does not hear SIGTERM. Only a sibling
// that the same launcher has started is ended.
void RankCheck::Shared::end_if_stopped(int rank) {
  if (!has(key("place", rank))) return;
  const auto known = Json::parse(get(key("place", rank)));
  if (known.at("host") != options.host) return;
  const int process = known.at("process");
  const auto found = look_at_process(process);
  if (found.what_became() == "stopped" && found.parent == ::getppid()) ::kill(process, SIGKILL);
}

// The Store may live in this process, so it leaves last of those that still answer.
void RankCheck::Shared::wait_until_all_have_left() {
  const auto until = Clock::now() + kLastOne;
  for (int rank = 0; rank < options.world_size; ++rank) {
    if (rank == options.rank || !has(key("result", rank))) continue;
    while (!has(key("left", rank)) && Clock::now() < until) std::this_thread::sleep_for(kLook / 5);
  }
}

// A healthy rank returns to Python; the others may be stuck in a group, so the process ends here.
void RankCheck::Shared::leave(const Json& report) {
  try {
    for (const int rank : report.at("missing")) end_if_stopped(rank);
    (void)store->set(key("left", options.rank), "", Clock::now() + kGrace);
  } catch (const std::exception&) {
    // The rank that keeps the Store may have left first. The report has been read.
  }
  const int code = report.at("code");
  if (code != kHealthy) {
    tell_torchrun(report.at("headline"));
    ::_exit(code);
  }
  const std::lock_guard lock(mutex);
  is_healthy = true;
  changed.notify_all();
}

void RankCheck::Shared::tell_alone(const std::string& why) {
  auto text = "rank " + std::to_string(options.rank) + " on host " + options.host + " " + why;
  {
    const std::lock_guard lock(mutex);
    if (place.sequence >= 0) {
      text += " It was in " + place.step + (place.group.empty() ? "" : " on " + place.group) + ".";
    }
    if (result.contains("error")) text += " " + result["error"].get<std::string>();
  }
  write_all(STDERR_FILENO, "netcheck: " + text + "\n");
  tell_torchrun(text);
  ::_exit(kFindings);
}

// --- the worker -------------------------------------------------------------------------------

RankCheck::RankCheck(c10::intrusive_ptr<c10d::Store> store, RankCheckOptions options,
                     Injection injection)
    : shared_(std::make_shared<Shared>()) {
  shared_->store = std::make_unique<StoreClient>(std::move(store));
  shared_->worker_store = shared_->store->another();
  shared_->options = std::move(options);
  shared_->injection = std::move(injection);
  handle_signals();
  shared_->connect();
  shared_->deadline = Clock::now() + shared_->options.deadline;
  std::thread([shared = shared_] { shared->serve(); }).detach();
}

// Both connections are opened before any deadline starts.
void RankCheck::Shared::connect() {
  const auto limit = Clock::now() + kConnects;
  try {
    for (auto* client : {store.get(), worker_store.get()}) {
      if (!client->has(key("end"), limit)) {
        tell_alone("reached the Store, which gave no answer for " +
                   std::to_string(kConnects.count() / 1000) + " s.");
      }
    }
  } catch (const std::exception& error) {
    tell_alone("cannot use the Store: " + first_line(error));
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
  shared_->put(shared_->worker_store, shared_->key(key, shared_->options.rank), text);
}

std::vector<std::string> RankCheck::collect(const std::string& key) {
  std::vector<std::string> texts;
  auto& store = shared_->worker_store;
  for (int rank = 0; rank < shared_->options.world_size; ++rank) {
    const auto full_key = shared_->key(key, rank);
    while (!shared_->has(store, full_key)) std::this_thread::sleep_for(kLook);
    texts.push_back(shared_->get(store, full_key));
  }
  return texts;
}

void RankCheck::meet() {
  auto& store = shared_->worker_store;
  const auto came = shared_->ask<std::int64_t>(store, [&](auto& client, Deadline limit) {
    return client.count(Shared::key("came"), limit);
  });
  if (came == shared_->options.world_size) shared_->put(store, Shared::key("all_came"), "");
  while (!shared_->has(store, Shared::key("all_came"))) std::this_thread::sleep_for(kLook);
}

void RankCheck::finish() {
  shared_->end_worker("finished", "");
}

void RankCheck::end_by_error(const std::string& error) {
  shared_->end_worker("error", error);
  std::abort();  // not reached: only a rank that has finished returns
}

void RankCheck::end_by_failure(const std::string& error) {
  shared_->end_worker("failed", error);
  std::abort();  // not reached
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
