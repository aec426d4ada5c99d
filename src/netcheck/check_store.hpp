// What the ranks of a network check exchange, below "nanlocator/netcheck/" of a c10d Store.
//
// A Store that answers late is not gone. One is gone that refuses several connections, or gives no
// answer for as long as a step may take: StoreLost, and the rank is left to itself.
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

/// The name of something that each rank has one of.
[[nodiscard]] inline std::string of_rank(const std::string& name, int rank) {
  return name + "/" + std::to_string(rank);
}

/// One thread's connection. All calls but the constructor throw StoreLost.
class CheckStore {
 public:
  /// Shares `store`. `patience`: how long a call waits for its answer.
  CheckStore(c10::intrusive_ptr<c10d::Store> store, std::chrono::milliseconds patience);
  /// A connection of its own, for another thread.
  [[nodiscard]] CheckStore another() const;

  /// Opens the connection, which takes seconds where name lookup does.
  void connect();
  [[nodiscard]] bool has(const std::string& name);
  /// The value of a name that `has` said is there.
  [[nodiscard]] std::string get(const std::string& name);
  void put(const std::string& name, const std::string& value);
  /// Whether nobody has written `name` before.
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
