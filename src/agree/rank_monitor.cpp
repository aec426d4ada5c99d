#include "nanlocator/agree/rank_monitor.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>
#include <utility>

#include "agree/store_client.hpp"
#include "nanlocator/error.hpp"

namespace nanlocator::inline agree_room {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kShortestInterval{100};
constexpr milliseconds kLongestInterval{5'000};
constexpr milliseconds kLeastPatience{1'000};
constexpr milliseconds kGoodbye{1'000};  // for publishing while others wait
constexpr milliseconds kBetweenAsking{50};
constexpr int kPatiencesToConnect = 4;
constexpr int kLateIntervals =
    2;  // a rank without a change for so long is late: the ranks behind it are checked, too

constexpr std::array<std::string_view, 6> kActivities = {
    "training", "forward_backward", "agreement", "rerun", "gathering", "stopped"};

// Keys of heartbeats and news.
constexpr const char* kBeat = "beat";
constexpr const char* kRank = "rank";
constexpr const char* kPlace = "place";
constexpr const char* kHost = "host";
constexpr const char* kLog = "log";
constexpr const char* kLogBegin = "log_begin";
constexpr const char* kIteration = "iteration";
constexpr const char* kActivity = "activity";
constexpr const char* kHasLeft = "has_left";
constexpr const char* kEndedBy = "ended_by";
constexpr const char* kIsBack = "is_back";

std::string dump(const nlohmann::json& json) {
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

LostRank lost_rank_from_json(const nlohmann::json& json) {
  LostRank lost;
  lost.rank = json.at(kRank).get<int>();
  lost.place = {.text = json.value(kPlace, ""),
                .host = json.value(kHost, ""),
                .log = json.value(kLog, ""),
                .log_begin = json.value(kLogBegin, std::int64_t{0})};
  if (const auto found = json.find(kIteration); found != json.end()) {
    lost.iteration = found->get<std::int64_t>();
  }
  lost.activity = json.value(kActivity, "");
  lost.ended_by = json.value(kEndedBy, "");
  return lost;
}

// The Store gave no answer in time; what it holds is unknown.
struct NoAnswer {};

template <class Value>
Value answered(std::optional<Value> value) {
  if (!value) throw NoAnswer{};
  return *std::move(value);
}

}  // namespace

std::string_view name_of(Activity activity) noexcept {
  return kActivities[static_cast<std::size_t>(activity)];
}

std::string LostRank::describe() const {
  const auto name = place.text.empty() ? "rank " + std::to_string(rank) : place.text;
  const auto where = iteration ? "iteration " + std::to_string(*iteration) : "the install";
  if (!ended_by.empty()) return name + " ended by " + ended_by + " (in " + where + ")";
  return name + " has not answered since " + where +
         (activity.empty() ? "" : ", where it was in " + activity);
}

MonitorTimes MonitorTimes::for_deadline(milliseconds gather_deadline) {
  return {std::clamp(gather_deadline / 12, kShortestInterval, kLongestInterval),
          std::max(gather_deadline / 2, kLeastPatience)};
}

struct RankMonitor::Shared {
  // --- set by any thread ---
  std::atomic<Activity> activity = Activity::training;
  std::atomic<std::int64_t> iteration = 0;

  mutable std::mutex mutex;
  mutable std::condition_variable changed;
  bool is_leaving = false;
  std::string ended_by;
  bool has_beaten = false;         // set once, from when on the others can see its silence
  bool is_done = false;            // the thread has ended
  bool is_look_requested = false;  // at once, not at the next interval
  std::map<int, LostRank> lost;
  std::string problem;

  std::mutex callback_mutex;  // held while on_change runs
  OnChange on_change;

  // --- used by the thread alone ---
  std::unique_ptr<StoreClient> store;
  std::string prefix;
  int rank = 0;
  int size = 1;
  RankPlace place;
  MonitorTimes times;
  std::int64_t beats = 0;
  std::int64_t news_read = 0;
  Clock::time_point last_look = Clock::now();

  // What this rank has seen of another rank's heartbeat.
  struct Watched {
    std::string heartbeat;  // "": none yet
    milliseconds silence{0};
    bool is_there = false;
    bool has_left = false;
    bool is_known = false;  // has been checked
  };
  std::map<int, Watched> watched;

  void serve();
  void look();
  void beat(bool has_left);
  void read_news();
  void confirm(std::int64_t news_number);
  void watch_ring(milliseconds since_last_look);
  Watched& read_heartbeat(int peer, milliseconds since_last_look);
  std::int64_t publish(const nlohmann::json& news);
  void apply(const nlohmann::json& news);
  void say_goodbye();
  void wait_until_all_have_read(std::int64_t news_number);
  void end_with(std::string reason);

  [[nodiscard]] Deadline limit() const { return Clock::now() + times.patience; }
  [[nodiscard]] std::string beat_key(int peer) const {
    return prefix + "/beat/" + std::to_string(peer);
  }
  [[nodiscard]] std::string news_key(std::int64_t number) const {
    return prefix + "/news/" + std::to_string(number);
  }
  // The others confirm the news that a rank ends; the last one sets "all".
  [[nodiscard]] std::string confirmed_key(std::int64_t number, const char* what) const {
    return news_key(number) + "/confirmed/" + what;
  }
  [[nodiscard]] bool is_lost(int peer) const {
    const std::lock_guard lock(mutex);
    return lost.contains(peer);
  }
  [[nodiscard]] std::vector<LostRank> lost_now() const {
    const std::lock_guard lock(mutex);
    return lost_in_order();
  }
  [[nodiscard]] std::vector<LostRank> lost_in_order() const {  // needs the mutex
    std::vector<LostRank> all;
    for (const auto& [peer, found] : lost) all.push_back(found);
    return all;
  }
  [[nodiscard]] nlohmann::json here() const {
    return {{kRank, rank},
            {kPlace, place.text},
            {kHost, place.host},
            {kLog, place.log},
            {kLogBegin, place.log_begin},
            {kIteration, iteration.load()},
            {kActivity, name_of(activity.load())}};
  }
};

void RankMonitor::Shared::serve() {
  for (;;) {
    try {
      look();
    } catch (const NoAnswer&) {
      // A suspended host says nothing about the ranks on others.
      for (auto& [peer, seen] : watched) seen.silence = milliseconds(0);
    } catch (const std::exception& error) {
      return end_with("The Store can no longer be reached (" + first_line(error) +
                      "): whether ranks have fallen silent is unknown.");
    }
    std::unique_lock lock(mutex);
    changed.wait_for(lock, times.interval, [&] { return is_leaving || is_look_requested; });
    if (is_leaving) break;
  }
  say_goodbye();
  end_with("");
}

void RankMonitor::Shared::look() {
  const auto now = Clock::now();
  const auto since_last_look =
      std::chrono::duration_cast<milliseconds>(now - std::exchange(last_look, now));
  beat(/*has_left=*/false);
  read_news();
  // When the whole run stops, so do the heartbeats.
  if (activity != Activity::stopped) {
    watch_ring(std::min(since_last_look, kLateIntervals * times.interval));
  }
}

void RankMonitor::Shared::beat(bool has_left) {
  bool was_asked_for = false;
  auto heartbeat = here();
  {
    const std::lock_guard lock(mutex);
    was_asked_for = is_look_requested;
    if (was_asked_for) heartbeat = here();
  }
  heartbeat[kBeat] = beats++;
  if (has_left) heartbeat[kHasLeft] = true;
  if (!store->set(beat_key(rank), dump(heartbeat), limit())) throw NoAnswer{};
  const std::lock_guard lock(mutex);
  has_beaten = true;
  if (was_asked_for) is_look_requested = false;
  changed.notify_all();
}

void RankMonitor::Shared::read_news() {
  const auto before = lost_now();
  std::vector<std::int64_t> ends;
  for (; answered(store->has(news_key(news_read), limit())); ++news_read) {
    const auto news = nlohmann::json::parse(answered(store->get(news_key(news_read), limit())));
    apply(news);
    if (news.contains(kEndedBy)) ends.push_back(news_read);
  }
  if (const auto after = lost_now(); after != before) {
    {
      const std::lock_guard callback_lock(callback_mutex);
      if (on_change) on_change(after);
    }
    const std::lock_guard lock(mutex);
    changed.notify_all();
  }
  for (const auto number : ends) confirm(number);  // now that on_change has returned
}

void RankMonitor::Shared::confirm(std::int64_t news_number) {
  const auto confirmed = answered(store->count(confirmed_key(news_number, "count"), limit()));
  if (confirmed == size - 1 && !store->set(confirmed_key(news_number, "all"), "", limit())) {
    throw NoAnswer{};
  }
}

void RankMonitor::Shared::apply(const nlohmann::json& news) {
  auto found = lost_rank_from_json(news);
  const bool is_back = news.value(kIsBack, false);
  if (found.rank == rank) {  // the others were wrong, or this rank was stopped for long
    if (!is_back && !news.contains(kEndedBy)) {
      auto answer = here();
      answer[kIsBack] = true;
      publish(answer);
    }
    return;
  }
  watched.erase(found.rank);
  const std::lock_guard lock(mutex);
  if (is_back) {
    lost.erase(found.rank);
  } else {
    lost.insert_or_assign(found.rank, std::move(found));
  }
}

// Checks ranks behind this one until as many are on time as are late, and at least one.
void RankMonitor::Shared::watch_ring(milliseconds since_last_look) {
  int late = 0;
  int on_time = 0;
  for (int step = 1; step < size && on_time < std::max(1, late); ++step) {
    const int peer = (rank + step) % size;
    if (is_lost(peer) || watched[peer].has_left) continue;
    auto& seen = read_heartbeat(peer, since_last_look);
    const auto heartbeat = seen.heartbeat.empty() ? nlohmann::json{{kRank, peer}}
                                                  : nlohmann::json::parse(seen.heartbeat);
    seen.has_left = heartbeat.value(kHasLeft, false);
    if (seen.has_left || heartbeat.value(kActivity, "") == name_of(Activity::stopped)) continue;
    // Before its first heartbeat a rank connects to the Store, which may include name look-ups.
    if (seen.silence >= (seen.is_there ? 1 : kPatiencesToConnect) * times.patience) {
      seen.silence = milliseconds(0);
      publish(heartbeat);
    }
    ++(seen.silence > kLateIntervals * times.interval ? late : on_time);
  }
}

RankMonitor::Shared::Watched& RankMonitor::Shared::read_heartbeat(int peer,
                                                                  milliseconds since_last_look) {
  auto& seen = watched[peer];
  seen.is_there = seen.is_there || answered(store->has(beat_key(peer), limit()));
  auto heartbeat = seen.is_there ? answered(store->get(beat_key(peer), limit())) : std::string();
  if (!seen.is_known || heartbeat != seen.heartbeat) {
    seen.silence = milliseconds(0);
  } else {
    seen.silence += since_last_look;
  }
  seen.is_known = true;
  seen.heartbeat = std::move(heartbeat);
  return seen;
}

// Appends to the list; ranks that find something at the same time do not overwrite each other.
std::int64_t RankMonitor::Shared::publish(const nlohmann::json& news) {
  const auto text = dump(news);
  auto number = news_read;
  while (!answered(store->put_if_absent(news_key(number), text, limit()))) ++number;
  return number;
}

void RankMonitor::Shared::say_goodbye() {
  try {
    beat(/*has_left=*/true);
    // If others were lost before, this rank's end is their consequence.
    if (ended_by.empty() || !lost_now().empty()) return;
    auto news = here();
    news[kEndedBy] = ended_by;
    wait_until_all_have_read(publish(news));
  } catch (...) {
    // The Store went before this rank.
  }
}

// A launcher that sees one process end ends the others at once (torchrun after 0.1 s), so this
// waits until they have written their files. They read the news within one interval.
void RankMonitor::Shared::wait_until_all_have_read(std::int64_t news_number) {
  const auto deadline = Clock::now() + times.interval + kGoodbye;
  const auto key = confirmed_key(news_number, "all");
  while (Clock::now() < deadline && !answered(store->has(key, deadline))) {
    std::this_thread::sleep_for(kBetweenAsking);
  }
}

void RankMonitor::Shared::end_with(std::string reason) {
  const std::lock_guard lock(mutex);
  problem = std::move(reason);
  is_done = true;
  changed.notify_all();
}

RankMonitor::RankMonitor(std::unique_ptr<StoreClient> store, std::string prefix, int rank, int size,
                         RankPlace place, MonitorTimes times, OnChange on_change)
    : shared_(std::make_shared<Shared>()) {
  shared_->store = std::move(store);
  shared_->prefix = std::move(prefix);
  shared_->rank = rank;
  shared_->size = size;
  shared_->place = std::move(place);
  shared_->times = times;
  shared_->on_change = std::move(on_change);
  std::thread([shared = shared_] { shared->serve(); }).detach();
}

RankMonitor::~RankMonitor() {
  leave();
  const std::lock_guard lock(shared_->callback_mutex);
  shared_->on_change = nullptr;
}

void RankMonitor::now_in(Activity activity, std::int64_t iteration) noexcept {
  shared_->iteration = iteration;
  shared_->activity = activity;
}

void RankMonitor::stop(std::int64_t iteration) noexcept {
  now_in(Activity::stopped, iteration);
  std::unique_lock lock(shared_->mutex);
  shared_->is_look_requested = true;
  shared_->changed.notify_all();
  shared_->changed.wait_for(lock, kGoodbye,
                            [&] { return shared_->is_done || !shared_->is_look_requested; });
}

void RankMonitor::leave(const std::string& ended_by) noexcept {
  std::unique_lock lock(shared_->mutex);
  if (!shared_->is_leaving) {
    shared_->is_leaving = true;
    shared_->ended_by = ended_by;
    shared_->changed.notify_all();
  }
  const auto patience = kGoodbye + (ended_by.empty() ? milliseconds(0) : shared_->times.interval);
  shared_->changed.wait_for(lock, patience, [&] { return shared_->is_done; });
}

void RankMonitor::wait_for_first_heartbeat() const {
  std::unique_lock lock(shared_->mutex);
  shared_->changed.wait_for(lock, kPatiencesToConnect * shared_->times.patience,
                            [&] { return shared_->is_done || shared_->has_beaten; });
}

std::vector<LostRank> RankMonitor::lost() const {
  return shared_->lost_now();
}

bool RankMonitor::is_locating(int rank, std::int64_t iteration) const {
  if (shared_->is_lost(rank)) return false;
  try {
    const auto key = shared_->beat_key(rank);
    if (!shared_->store->has(key, shared_->limit()).value_or(false)) return false;
    const auto heartbeat =
        nlohmann::json::parse(shared_->store->get(key, shared_->limit()).value_or("{}"));
    const auto activity = heartbeat.value(kActivity, "");
    return heartbeat.value(kIteration, std::int64_t{-1}) == iteration &&
           (activity == name_of(Activity::rerun) || activity == name_of(Activity::gathering));
  } catch (const std::exception&) {
    return false;
  }
}

std::string RankMonitor::problem() const {
  const std::lock_guard lock(shared_->mutex);
  return shared_->problem;
}

std::vector<LostRank> RankMonitor::wait_for_loss(Deadline deadline) const {
  std::unique_lock lock(shared_->mutex);
  shared_->is_look_requested = true;  // there may be unread news
  shared_->changed.notify_all();
  shared_->changed.wait_until(lock, deadline,
                              [&] { return shared_->is_done || !shared_->lost.empty(); });
  return shared_->lost_in_order();
}

}  // namespace nanlocator::inline agree_room
