// A c10d Store whose answers are waited for until a deadline and no longer.
//
// A Store call blocks in recv for as long as its server's host is silent: a frozen or powered-off
// host never resets the connection. So every call runs on one thread of this client, and the caller
// waits on a future. A thread that is stuck is left behind, never joined.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>

namespace c10d {
class Store;
}

namespace nanlocator::inline agree_room {

using Deadline = std::chrono::steady_clock::time_point;

class StoreClient {
 public:
  /// With a connection of its own, a clone of `store` that is made on the client's thread.
  explicit StoreClient(c10::intrusive_ptr<c10d::Store> store);
  /// Calls `store` itself until `connect_in`: to connect may take long, and as long for each rank
  /// (TCPStore's server asks for the name of each peer that connects, and serves nobody meanwhile).
  [[nodiscard]] static std::unique_ptr<StoreClient> sharing(c10::intrusive_ptr<c10d::Store> store);
  ~StoreClient();
  /// A second client of the same Store that shares it, with a thread of its own.
  [[nodiscard]] std::unique_ptr<StoreClient> another() const;
  /// Makes a connection of its own, `delay` from now.
  void connect_in(std::chrono::milliseconds delay);
  StoreClient(const StoreClient&) = delete;  // one connection, one thread
  StoreClient& operator=(const StoreClient&) = delete;

  /// Publishes `value` under `key`, in parts where it is long (see store_client.cpp). False: no
  /// answer in time. Throws what the Store throws, as do the calls below.
  [[nodiscard]] bool set(const std::string& key, const std::string& value, Deadline deadline);
  /// Publishes `value`, at most 4 MiB, where `key` does not exist; false where it does. Empty: no
  /// answer in time, here and below.
  [[nodiscard]] std::optional<bool> put_if_absent(const std::string& key, const std::string& value,
                                                  Deadline deadline);
  /// Adds one to the counter `key`.
  [[nodiscard]] std::optional<std::int64_t> count(const std::string& key, Deadline deadline);
  [[nodiscard]] std::optional<bool> has(const std::string& key, Deadline deadline);
  /// The value of a key that `has` said is there.
  [[nodiscard]] std::optional<std::string> get(const std::string& key, Deadline deadline);

 private:
  struct Shared;  // with the thread, which may outlive the client
  StoreClient(c10::intrusive_ptr<c10d::Store> store, Deadline connects_at);
  template <class Result>
  std::optional<Result> run(std::function<Result(c10d::Store&)> call, Deadline deadline);

  std::shared_ptr<Shared> shared_;
};

}  // namespace nanlocator::inline agree_room
