// Data that the ranks of a network check exchange, under "nanlocator/netcheck/" in a c10d Store.
//
// A slow Store is not gone. It is gone if it refuses several connections, or gives no answer for as
// long as a step may take: then StoreLost is thrown, and the rank is on its own.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "agree/store_client.hpp"
#include "nanlocator/error.hpp"

namespace nanlocator::netcheck {

struct StoreLost : Error {
  using Error::Error;
};

/// The key of a value that each rank has.
[[nodiscard]] inline std::string of_rank(const std::string& name, int rank) {
  return name + "/" + std::to_string(rank);
}

/// One thread's connection. All calls but the constructor throw StoreLost.
class CheckStore {
 public:
  /// Shares `store`. `patience`: how long a call waits for its answer.
  CheckStore(c10::intrusive_ptr<c10d::Store> store, std::chrono::milliseconds patience);
  /// A separate connection, for another thread.
  [[nodiscard]] CheckStore another() const;

  /// Opens the connection, which takes seconds if name lookup does.
  void connect();
  [[nodiscard]] bool has(const std::string& name);
  /// The value of a key that exists according to `has`.
  [[nodiscard]] std::string get(const std::string& name);
  void put(const std::string& name, const std::string& value);
  /// Whether this is the first write of `name`.
  [[nodiscard]] bool is_first_to_put(const std::string& name);
  /// Adds one to the counter `name`, and returns it.
  [[nodiscard]] std::int64_t count(const std::string& name);

 private:
  CheckStore(std::unique_ptr<StoreClient> client, std::chrono::milliseconds patience);
  template <typename Value>
  Value ask(const std::function<std::optional<Value>(StoreClient&, Deadline)>& call);

  std::unique_ptr<StoreClient> client_;
  std::chrono::milliseconds patience_;
};

}  // namespace nanlocator::netcheck
