// A c10d Store whose callers wait until a deadline and no longer.
//
// A Store call blocks in recv while its server's host is silent: a frozen or powered-off host never
// resets the connection. So every call runs on one thread of this client, and the caller waits on a
// future. A stuck thread is abandoned, never joined.
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
  /// Uses its own connection, a clone of `store` made on the client's thread.
  explicit StoreClient(c10::intrusive_ptr<c10d::Store> store);
  /// Uses `store` itself until `connect_in`. Connecting may take long, once for each rank:
  /// TCPStore's server looks up the name of each peer that connects, and serves nothing meanwhile.
  [[nodiscard]] static std::unique_ptr<StoreClient> sharing(c10::intrusive_ptr<c10d::Store> store);
  ~StoreClient();
  /// A second client of the same shared Store, with its own thread.
  [[nodiscard]] std::unique_ptr<StoreClient> another() const;
  /// Makes its own connection, `delay` from now.
  void connect_in(std::chrono::milliseconds delay);
  StoreClient(const StoreClient&) = delete;  // one connection, one thread
  StoreClient& operator=(const StoreClient&) = delete;

  /// Publishes `value` under `key`, in parts if it is long (see store_client.cpp). False: no answer
  /// in time. Throws the Store's errors, as do the calls below.
  [[nodiscard]] bool set(const std::string& key, const std::string& value, Deadline deadline);
  /// Publishes `value`, at most 4 MiB, if `key` does not exist; false if it does. Empty: no answer
  /// in time, here and below.
  [[nodiscard]] std::optional<bool> put_if_absent(const std::string& key, const std::string& value,
                                                  Deadline deadline);
  /// Adds one to the counter `key`.
  [[nodiscard]] std::optional<std::int64_t> count(const std::string& key, Deadline deadline);
  [[nodiscard]] std::optional<bool> has(const std::string& key, Deadline deadline);
  /// The value of a key that exists according to `has`.
  [[nodiscard]] std::optional<std::string> get(const std::string& key, Deadline deadline);

 private:
  struct Shared;  // shared with the thread, which may outlive the client
  StoreClient(c10::intrusive_ptr<c10d::Store> store, Deadline connects_at);
  template <class Result>
  std::optional<Result> run(std::function<Result(c10d::Store&)> call, Deadline deadline);

  std::shared_ptr<Shared> shared_;
};

}  // namespace nanlocator::inline agree_room
