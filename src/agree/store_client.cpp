#include "agree/store_client.hpp"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

#include "agree/torch_versions.hpp"

namespace nanlocator::inline agree_room {
namespace {

// TCPStore's libuv server, the default, closes the connection on a value of more than 8 MiB (tried
// with torch 2.11: 7 MiB pass, 9 MiB give "Connection reset by peer").
constexpr std::size_t kPartBytes = std::size_t{4} << 20;

using Clock = std::chrono::steady_clock;
constexpr Deadline kNever = Deadline::max();

std::string part_key(const std::string& key, std::size_t part) {
  return part == 0 ? key : key + "/part" + std::to_string(part);
}

// A second client, so that another thread's blocking get on the given one does not block ours
// (TCPStore serialises the calls of one client). A FileStore counts destroyed objects, and the last
// of its `numWorkers` deletes the file: a clone would delete it too early. A Store that cannot be
// cloned is used as it is.
c10::intrusive_ptr<c10d::Store> own_connection(const c10::intrusive_ptr<c10d::Store>& store) {
  const c10d::Store* base = store.get();
  c10::intrusive_ptr<c10d::Store> unwrapped;
  if (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get())) {
    unwrapped = prefixed->getUnderlyingNonPrefixStore();
    base = unwrapped.get();
  }
  if (dynamic_cast<const c10d::FileStore*>(base) != nullptr) return store;
  try {
    return clone_of(store);
  } catch (const std::exception&) {
    return store;
  }
}

}  // namespace

struct StoreClient::Shared {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void(c10d::Store&)>> calls;
  bool is_closing = false;
  bool is_done = false;
  Deadline connects_at;  // only once
  c10::intrusive_ptr<c10d::Store> given;

  void serve() {
    auto connection = given;
    std::unique_lock lock(mutex);
    for (;;) {
      while (!is_closing && calls.empty() && Clock::now() < connects_at) {
        if (connects_at == kNever) {
          changed.wait(lock);
        } else {
          changed.wait_until(lock, Deadline(connects_at));
        }
      }
      if (is_closing) break;
      if (Clock::now() >= connects_at) {
        connects_at = kNever;
        lock.unlock();
        connection = own_connection(given);
        lock.lock();
        continue;
      }
      auto call = std::move(calls.front());
      calls.pop_front();
      lock.unlock();
      call(*connection);
      call = nullptr;  // frees its captures outside the lock
      lock.lock();
    }
    auto unstarted = std::exchange(calls, {});
    auto last = std::exchange(given, {});
    lock.unlock();
    unstarted.clear();
    connection.reset();
    last.reset();
    lock.lock();
    is_done = true;
    changed.notify_all();
  }
};

StoreClient::StoreClient(c10::intrusive_ptr<c10d::Store> store, Deadline connects_at)
    : shared_(std::make_shared<Shared>()) {
  shared_->given = std::move(store);
  shared_->connects_at = connects_at;
  std::thread([shared = shared_] { shared->serve(); }).detach();
}

StoreClient::StoreClient(c10::intrusive_ptr<c10d::Store> store)
    : StoreClient(std::move(store), Clock::now()) {}

std::unique_ptr<StoreClient> StoreClient::sharing(c10::intrusive_ptr<c10d::Store> store) {
  return std::unique_ptr<StoreClient>(new StoreClient(std::move(store), kNever));
}

void StoreClient::connect_in(std::chrono::milliseconds delay) {
  const std::lock_guard lock(shared_->mutex);
  shared_->connects_at = Clock::now() + delay;
  shared_->changed.notify_all();
}

StoreClient::~StoreClient() {
  // Long enough for a pending call to a living Store. Not joined: the thread may be stuck in recv,
  // or wait for the GIL (a Store written in Python) that our caller holds.
  constexpr auto patience = std::chrono::milliseconds(200);
  std::unique_lock lock(shared_->mutex);
  shared_->is_closing = true;
  shared_->changed.notify_all();
  shared_->changed.wait_for(lock, patience, [&] { return shared_->is_done; });
}

std::unique_ptr<StoreClient> StoreClient::another() const {
  const std::lock_guard lock(shared_->mutex);
  return sharing(shared_->given);
}

template <class Result>
std::optional<Result> StoreClient::run(std::function<Result(c10d::Store&)> call,
                                       Deadline deadline) {
  auto task = std::make_shared<std::packaged_task<Result(c10d::Store&)>>(std::move(call));
  auto answer = task->get_future();
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->calls.push_back([task](c10d::Store& store) { (*task)(store); });
    shared_->changed.notify_all();
  }
  if (answer.wait_until(deadline) != std::future_status::ready) return std::nullopt;
  return answer.get();
}

bool StoreClient::set(const std::string& key, const std::string& value, Deadline deadline) {
  // The value of `key` is the number of parts, a line feed and part 0. It is written last, so that
  // a reader who sees it finds the other parts. Everything is copied: the call may outlive its
  // caller's wait.
  const auto write = [key, value](c10d::Store& store) {
    const std::size_t parts =
        std::max<std::size_t>(1, (value.size() + kPartBytes - 1) / kPartBytes);
    for (std::size_t part = parts; part-- > 0;) {
      auto bytes = value.substr(part * kPartBytes, kPartBytes);
      if (part == 0) bytes.insert(0, std::to_string(parts) + "\n");
      store.set(part_key(key, part), std::vector<std::uint8_t>(bytes.begin(), bytes.end()));
    }
    return true;
  };
  return run<bool>(write, deadline).has_value();
}

std::optional<bool> StoreClient::put_if_absent(const std::string& key, const std::string& value,
                                               Deadline deadline) {
  return run<bool>(
      [key, bytes = "1\n" + value](c10d::Store& store) {
        // compare_set with an empty expected value sets an absent key, and returns the current
        // value.
        const std::vector<std::uint8_t> wanted(bytes.begin(), bytes.end());
        if (store.check({key})) return false;
        return store.compareSet(key, {}, wanted) == wanted;
      },
      deadline);
}

std::optional<std::int64_t> StoreClient::count(const std::string& key, Deadline deadline) {
  return run<std::int64_t>([key](c10d::Store& store) { return store.add(key, 1); }, deadline);
}

std::optional<bool> StoreClient::has(const std::string& key, Deadline deadline) {
  return run<bool>([key](c10d::Store& store) { return store.check({key}); }, deadline);
}

std::optional<std::string> StoreClient::get(const std::string& key, Deadline deadline) {
  return run<std::string>(
      [key](c10d::Store& store) {
        auto value = store.get_to_str(key);
        const auto line_end = value.find('\n');
        const auto parts = std::stoul(value.substr(0, line_end));
        value.erase(0, line_end + 1);
        for (std::size_t part = 1; part < parts; ++part) {
          value += store.get_to_str(part_key(key, part));
        }
        return value;
      },
      deadline);
}

}  // namespace nanlocator::inline agree_room
