#include "netcheck/check_store.hpp"

#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

namespace nanlocator::netcheck {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kConnects{60'000};
// A connection that was reset is reopened; a Store that is gone refuses that.
constexpr int kAttempts = 3;
constexpr milliseconds kBetweenAttempts{500};

std::string key(const std::string& name) {
  return "nanlocator/netcheck/" + name;
}

std::string seconds_text(milliseconds time) {
  return std::to_string(time.count() / 1000) + " s";
}

}  // namespace

CheckStore::CheckStore(c10::intrusive_ptr<c10d::Store> store, milliseconds patience)
    : CheckStore(std::make_unique<StoreClient>(std::move(store)), patience) {}

CheckStore::CheckStore(std::unique_ptr<StoreClient> client, milliseconds patience)
    : client_(std::move(client)), patience_(patience) {}

CheckStore CheckStore::another() const {
  return {client_->another(), patience_};
}

void CheckStore::connect() {
  try {
    if (client_->has(key("end"), Clock::now() + kConnects)) return;
  } catch (const std::exception& error) {
    throw StoreLost(first_line(error));
  }
  throw StoreLost("it gave no answer for " + seconds_text(kConnects));
}

template <typename Value>
Value CheckStore::ask(const std::function<std::optional<Value>(StoreClient&, Deadline)>& call) {
  for (int attempt = 1;; ++attempt) {
    try {
      if (auto answer = call(*client_, Clock::now() + patience_)) return *std::move(answer);
      throw StoreLost("it gave no answer for " + seconds_text(patience_));
    } catch (const StoreLost&) {
      throw;
    } catch (const std::exception& error) {
      if (attempt == kAttempts) throw StoreLost(first_line(error));
    }
    std::this_thread::sleep_for(kBetweenAttempts);
    client_ = client_->another();
  }
}

bool CheckStore::has(const std::string& name) {
  return ask<bool>([&](auto& client, Deadline limit) { return client.has(key(name), limit); });
}

std::string CheckStore::get(const std::string& name) {
  return ask<std::string>(
      [&](auto& client, Deadline limit) { return client.get(key(name), limit); });
}

void CheckStore::put(const std::string& name, const std::string& value) {
  ask<bool>([&](auto& client, Deadline limit) {
    return client.set(key(name), value, limit) ? std::optional(true) : std::nullopt;
  });
}

bool CheckStore::is_first_to_put(const std::string& name) {
  return ask<bool>(
      [&](auto& client, Deadline limit) { return client.put_if_absent(key(name), "", limit); });
}

std::int64_t CheckStore::count(const std::string& name) {
  return ask<std::int64_t>(
      [&](auto& client, Deadline limit) { return client.count(key(name), limit); });
}

}  // namespace nanlocator::netcheck
