#include "nanlocator/agree/communicator.hpp"

#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <thread>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

#include "agree/store_client.hpp"
#include "nanlocator/error.hpp"
#include "nanlocator/map/rank_coordinates.hpp"

namespace nanlocator::inline agree_room {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// A living Store answers within this time. A nearer deadline does not prevent reading a key that
// already exists.
constexpr milliseconds kStoreAnswers{1'000};
constexpr milliseconds kPublishPatience{10'000};
constexpr milliseconds kOthersEndInstall{1'000};
// The other ranks wait this much longer than rank 0 for its decision at the deadline.
constexpr milliseconds kOutcomeGrace{5'000};
// Polling: fast at first, because ranks usually come within a millisecond of each other, then at
// most 20 requests a second per rank, because thousands of ranks may share the Store.
constexpr milliseconds kFirstPause{1};
constexpr milliseconds kLongestPause{50};
// How often a waiting rank checks whether the rank it waits for is lost.
constexpr milliseconds kLossCheckInterval{250};
// Polling of a busy device: adds less than a step may lose.
constexpr std::chrono::microseconds kFirstFlagPause{10};
constexpr std::chrono::microseconds kLongestFlagPause{100};
constexpr const char* kWhole = "whole";  // every living rank has come to the barrier
constexpr int kErrorsInARow = 3;         // of the Store, before it counts as gone

Deadline answer_limit(Deadline deadline) {
  return std::max(deadline, Clock::now() + kStoreAnswers);
}

// True once `key` exists; false at the deadline, if the Store is gone, or if waiting `is_in_vain`.
bool wait_for_key(StoreClient& store, const std::string& key, Deadline deadline,
                  const std::function<bool()>& is_in_vain) {
  auto pause = kFirstPause;
  auto next_look = Clock::now() + kLossCheckInterval;
  for (int errors = 0; errors < kErrorsInARow;) {
    try {
      const auto is_there = store.has(key, answer_limit(deadline));
      if (!is_there) return false;
      if (*is_there) return true;
      errors = 0;
    } catch (const std::exception&) {
      ++errors;
    }
    const auto now = Clock::now();
    if (now >= deadline) return false;
    if (now >= next_look) {
      if (is_in_vain()) return false;
      next_look = now + kLossCheckInterval;
    }
    std::this_thread::sleep_for(std::min<Clock::duration>(pause, deadline - now));
    pause = std::min(pause * 2, kLongestPause);
  }
  return false;
}

nlohmann::json parse_statement(const std::string& text) {
  auto statement = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!statement.is_object()) return nullptr;
  return statement;
}

// Empty if all ranks came with equal statements.
std::string disagreement(const Gathered& statements) {
  std::vector<int> missing;
  std::vector<int> unreadable;
  std::vector<std::pair<int, nlohmann::json>> present;
  std::set<std::string> keys;
  for (int rank = 0; rank < static_cast<int>(statements.size()); ++rank) {
    if (!statements[rank]) {
      missing.push_back(rank);
      continue;
    }
    auto statement = parse_statement(*statements[rank]);
    if (statement.is_null()) {
      unreadable.push_back(rank);
      continue;
    }
    for (const auto& item : statement.items()) keys.insert(item.key());
    present.emplace_back(rank, std::move(statement));
  }
  std::ostringstream text;
  if (!missing.empty()) text << "\n  no answer in time from " << ranks_text(missing);
  if (!unreadable.empty()) text << "\n  no JSON object from " << ranks_text(unreadable);
  for (const auto& key : keys) {
    std::map<std::string, std::vector<int>> ranks_of_value;
    for (const auto& [rank, statement] : present) {
      const auto found = statement.find(key);
      ranks_of_value[found == statement.end() ? "nothing" : found->dump()].push_back(rank);
    }
    if (ranks_of_value.size() < 2) continue;
    text << "\n  " << key << " is ";
    const char* separator = "";
    for (const auto& [value, ranks] : ranks_of_value) {
      text << separator << value << " on " << ranks_text(ranks);
      separator = ", ";
    }
  }
  if (text.str().empty()) return {};
  return "The ranks do not agree:" + text.str() +
         "\nStart every rank with the same installation and the same options.";
}

}  // namespace

bool is_failure_of_peers(std::string_view error) noexcept {
  constexpr std::array<std::string_view, 5> kWords = {
      "gloo", "NCCL", "ProcessGroup", "Connection closed by peer", "Connection reset by peer"};
  return std::ranges::any_of(
      kWords, [&](std::string_view word) { return error.find(word) != std::string_view::npos; });
}

Communicator::Communicator(c10::intrusive_ptr<c10d::ProcessGroup> group,
                           c10::intrusive_ptr<c10d::Store> store, std::string prefix)
    : Communicator(flag_reduction_over(std::move(group)), std::move(store), std::move(prefix)) {}

Communicator::Communicator(std::unique_ptr<FlagReduction> reduction,
                           c10::intrusive_ptr<c10d::Store> store, std::string prefix)
    : reduction_(std::move(reduction)), prefix_(std::move(prefix)) {
  if (!reduction_ || !store) {
    throw UsageError(std::string("Communicator: the ") + (!reduction_ ? "reduction" : "Store") +
                     " is null. A single process passes no Communicator at all.");
  }
  store_ = StoreClient::sharing(std::move(store));
}

std::shared_ptr<Communicator> Communicator::from_group_name(const std::string& name,
                                                            c10::intrusive_ptr<c10d::Store> store,
                                                            std::string prefix) {
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  try {
    group = c10d::resolve_process_group(name);
  } catch (const std::exception& error) {
    throw UsageError("No process group is registered under the name '" + name +
                     "': " + first_line(error) + ". Pass ProcessGroup.group_name.");
  }
  return std::make_shared<Communicator>(std::move(group), std::move(store), std::move(prefix));
}

Communicator::~Communicator() = default;

int Communicator::rank() const noexcept {
  return reduction_->rank();
}

int Communicator::size() const noexcept {
  return reduction_->size();
}

bool Communicator::reduces_on(at::DeviceType device) const {
  return reduction_->reduces_on(device);
}

std::string Communicator::key_of(std::string_view key, int rank) const {
  return prefix_ + "/" + std::string(key) + "/" + std::to_string(rank);
}

void Communicator::handshake(const std::string& mine, Deadline deadline) {
  if (parse_statement(mine).is_null()) {
    throw UsageError("Communicator::handshake: expected a JSON object, got: " + mine);
  }
  const auto key = "handshake" + std::to_string(agreements_++);
  const auto outcome_key = key + "/outcome";
  const bool is_published = publish(key, mine);
  std::optional<std::string> outcome;
  if (rank() == 0) {
    outcome = disagreement(gather(key, deadline));
    (void)publish(outcome_key, *outcome);
  } else if (is_published) {
    outcome = fetch(outcome_key, 0, deadline + kOutcomeGrace);
  }
  if (!is_published) {
    throw AgreementError("Rank " + std::to_string(rank()) +
                         " cannot reach the Store. Is the process that hosts it alive?");
  }
  if (!outcome) {
    throw AgreementError("Rank " + std::to_string(rank()) +
                         " got no answer from rank 0 in the handshake. Has rank 0 ended, or did it "
                         "not reach this point?");
  }
  if (!outcome->empty()) throw AgreementError(*outcome);
}

std::string Communicator::broadcast(std::string_view key, const std::string& value,
                                    Deadline deadline) {
  const auto unique_key = std::string(key) + std::to_string(agreements_++);
  if (rank() == 0) {
    if (!publish(unique_key, value)) {
      throw AgreementError("Rank 0 cannot reach the Store to publish '" + std::string(key) +
                           "'. Is the process that hosts it alive?");
    }
    return value;
  }
  auto received = fetch(unique_key, 0, deadline);
  if (!received) {
    throw AgreementError("Rank " + std::to_string(rank()) + " waited for '" + std::string(key) +
                         "' from rank 0, which did not come in time. Has rank 0 ended?");
  }
  return *std::move(received);
}

void Communicator::start_flag(const at::Tensor& flag) {
  if (is_pending_) {
    throw UsageError("start_flag: the previous reduction is not finished. Call finish_flag first.");
  }
  if (!is_group_usable_) {
    throw UsageError(
        "start_flag: an earlier flag reduction failed, so the ranks no longer call in step. "
        "End the job.");
  }
  flag_ = flag;
  try {
    reduction_->start(flag_);
    is_pending_ = true;
  } catch (const std::exception& error) {
    is_group_usable_ = false;
    throw AgreementError("The flag reduction could not be started on rank " +
                         std::to_string(rank()) + ": " + first_line(error));
  }
}

// NCCL's kernels wait for a peer that is gone until the group's timeout. So the host polls whether
// the device got there, and whether a rank has ended.
std::int32_t Communicator::read_flag() {
  if (flag_.is_cpu()) return flag_.item<std::int32_t>();
  if (!host_flag_.defined()) {
    host_flag_ = at::empty({1}, at::TensorOptions().dtype(at::kInt).pinned_memory(true));
  }
  host_flag_.copy_(flag_, /*non_blocking=*/true);
  c10::Event is_copied(flag_.device().type());
  is_copied.record(c10::impl::VirtualGuardImpl(flag_.device().type()).getStream(flag_.device()));
  auto pause = kFirstFlagPause;
  for (auto next_look = Clock::now() + kLossCheckInterval; !is_copied.query();) {
    if (Clock::now() >= next_look) {
      reduction_->check();
      throw_where_a_rank_has_ended();
      next_look = Clock::now() + kLossCheckInterval;
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongestFlagPause);
  }
  return host_flag_.item<std::int32_t>();
}

/// A silent rank may only be slow; one that said how it ended will not come.
void Communicator::throw_where_a_rank_has_ended() const {
  if (!monitor_) return;
  for (const auto& each : monitor_->lost()) {
    if (!each.ended_by.empty()) throw std::runtime_error(each.describe());
  }
}

bool Communicator::finish_flag() {
  if (!std::exchange(is_pending_, false)) {
    throw UsageError("finish_flag: no reduction has been started. Call start_flag first.");
  }
  try {
    // On a device this only orders the current stream after the reduction.
    reduction_->finish();
    const bool is_set = read_flag() != 0;
    flag_.reset();
    return is_set;
  } catch (const std::exception& error) {
    is_group_usable_ = false;
    if (!flag_.is_cpu()) abort();  // a kernel waiting for a peer would delay the process's exit
    throw AgreementError("The flag reduction failed on rank " + std::to_string(rank()) + ": " +
                         first_line(error) + ". A peer has ended or does not answer.");
  }
}

// Beside the values of N ranks there is a counter; the rank that raises it to N sets a key "all",
// so that a gathering rank polls one key instead of N.
bool Communicator::publish(std::string_view key, const std::string& value) noexcept {
  try {
    const auto deadline = Clock::now() + kPublishPatience;
    if (!store_->set(key_of(key, rank()), value, deadline)) return false;
    if (!counted_.insert(std::string(key)).second) return true;  // published again: counts once
    const auto arrived = store_->count(prefix_ + "/" + std::string(key) + "/count", deadline);
    if (!arrived) return false;
    return *arrived < size() ||
           store_->set(prefix_ + "/" + std::string(key) + "/all", "", deadline);
  } catch (...) {
    return false;
  }
}

Gathered Communicator::gather(std::string_view key, Deadline deadline) noexcept {
  Gathered gathered;
  try {
    gathered.resize(size());
    (void)wait_for_key(*store_, prefix_ + "/" + std::string(key) + "/all", deadline,
                       [&] { return has_come_except(key, {}); });
    const auto limit = answer_limit(deadline);
    for (int peer = 0; peer < size(); ++peer) {
      const auto is_there = store_->has(key_of(key, peer), limit);
      if (!is_there) break;  // the Store no longer answers
      if (*is_there) gathered[peer] = store_->get(key_of(key, peer), limit);
    }
  } catch (...) {
    // The connection broke: earlier values count.
  }
  return gathered;
}

bool Communicator::has(std::string_view key, std::string_view what) noexcept {
  try {
    const auto full_key = prefix_ + "/" + std::string(key) + "/" + std::string(what);
    return store_->has(full_key, Clock::now() + kStoreAnswers).value_or(false);
  } catch (...) {
    return false;
  }
}

bool Communicator::has_any_published(std::string_view key) noexcept {
  return has(key, "count");
}

bool Communicator::have_all_published(std::string_view key) noexcept {
  return has(key, "all");
}

std::optional<std::string> Communicator::fetch(std::string_view key, int rank,
                                               Deadline deadline) noexcept {
  try {
    const auto full_key = key_of(key, rank);
    if (!wait_for_key(*store_, full_key, deadline, [&] { return is_lost(rank); })) {
      return std::nullopt;
    }
    return store_->get(full_key, answer_limit(deadline));
  } catch (...) {
    return std::nullopt;
  }
}

void Communicator::offer(std::string_view key, const std::string& value) noexcept {
  try {
    (void)store_->put_if_absent(prefix_ + "/" + std::string(key) + "/offer", value,
                                Clock::now() + kStoreAnswers);
  } catch (...) {
    // The value is lost.
  }
}

std::optional<std::string> Communicator::offered(std::string_view key) noexcept {
  if (!has(key, "offer")) return std::nullopt;
  try {
    return store_->get(prefix_ + "/" + std::string(key) + "/offer", Clock::now() + kStoreAnswers);
  } catch (...) {
    return std::nullopt;
  }
}

bool Communicator::pass_barrier(std::string_view key, const std::vector<int>& absent,
                                Deadline deadline,
                                const std::function<bool(int rank)>& is_at_work) noexcept {
  try {
    const auto patience = deadline - Clock::now();
    const auto opened = std::string(key) + "/opened";
    if (!publish(key, "")) return false;
    if (rank() != 0) {
      if (std::ranges::find(absent, 0) != absent.end()) return false;
      auto outcome = fetch(opened, 0, deadline + kOutcomeGrace);
      for (bool may_come = true; !outcome && may_come && is_at_work;) {
        may_come = is_at_work(0);  // if not, it may have opened since the last look
        outcome =
            fetch(opened, 0, Clock::now() + (may_come ? patience : patience * 0) + kOutcomeGrace);
      }
      return outcome == kWhole;
    }
    const auto all = prefix_ + "/" + std::string(key) + "/all";
    bool is_whole = false;
    for (Deadline limit = deadline; !is_whole; limit = Clock::now() + patience) {
      is_whole = wait_for_key(*store_, all, limit, [&] { return has_come_except(key, absent); });
      if (is_whole) break;
      const auto late = missing(key, absent);
      is_whole = late.empty();
      if (!is_whole && !(is_at_work && std::ranges::any_of(late, is_at_work))) break;
    }
    return publish(opened, is_whole ? kWhole : "") && is_whole;
  } catch (...) {
    return false;
  }
}

void Communicator::abort() noexcept {
  reduction_->abort();
}

// ------------------------------------------------------------------------------------- lost ranks

void Communicator::watch_ranks(RankPlace place, MonitorTimes times,
                               RankMonitor::OnChange on_change) {
  if (monitor_) throw UsageError("watch_ranks: the ranks are already watched.");
  auto monitors_store = store_->another();
  // The last part of an install. Its own connection cannot be blocked by another thread's blocking
  // get. It is made later, because all ranks would wait for each connection.
  monitors_store->connect_in(kOthersEndInstall);
  store_->connect_in(kOthersEndInstall);
  monitor_ = std::make_unique<RankMonitor>(std::move(monitors_store), prefix_ + "/monitor", rank(),
                                           size(), std::move(place), times, std::move(on_change));
  monitor_->wait_for_first_heartbeat();
}

std::vector<int> Communicator::lost() const {
  std::vector<int> ranks;
  if (!monitor_) return ranks;
  for (const auto& each : monitor_->lost()) ranks.push_back(each.rank);
  return ranks;
}

bool Communicator::is_lost(int rank) const {
  return std::ranges::binary_search(lost(), rank);
}

// The missing ranks that are neither absent nor lost. One Store request per rank.
std::vector<int> Communicator::missing(std::string_view key, std::vector<int> absent) const {
  const auto lost_ranks = lost();
  absent.insert(absent.end(), lost_ranks.begin(), lost_ranks.end());
  std::vector<int> ranks;
  for (int peer = 0; peer < size(); ++peer) {
    if (std::ranges::find(absent, peer) != absent.end()) continue;
    const auto is_there = store_->has(key_of(key, peer), Clock::now() + kStoreAnswers);
    if (!is_there.value_or(false)) ranks.push_back(peer);
    if (!is_there) break;  // the Store does not answer
  }
  return ranks;
}

// Checks rank by rank only if some rank is missing for good; otherwise the key "all" suffices.
bool Communicator::has_come_except(std::string_view key, const std::vector<int>& absent) const {
  return (!absent.empty() || !lost().empty()) && missing(key, absent).empty();
}

}  // namespace nanlocator::inline agree_room
