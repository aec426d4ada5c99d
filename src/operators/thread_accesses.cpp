#include "operators/thread_accesses.hpp"

#include <ATen/record_function.h>

#include <algorithm>
#include <chrono>
#include <utility>

namespace nanlocator::inline operators_room {
namespace {

constexpr std::size_t kMostOrders = 16;
constexpr std::chrono::milliseconds kPatience{500};

bool is_same(const ThreadOrder::Place& a, const ThreadOrder::Place& b) {
  return a.is_steps == b.is_steps && a.line.code == b.line.code && a.line.line == b.line.line &&
         a.op == b.op;
}

}  // namespace

void ThreadAccesses::begin_pass() {
  std::unordered_map<const c10::StorageImpl*, Memory> old;
  const std::lock_guard lock(mutex_);
  std::swap(old, memory_);
  orders_.clear();
  executions_.clear();
  step_thread_ = at::RecordFunction::currentThreadId();
}

bool ThreadAccesses::is_of_step(const ThreadFrames& frames) const {
  // The step waits for the engine's threads, and for what is to be done after a transfer.
  if (frames.backward_depth > 0 || frames.is_of_gloo) return true;
  const std::lock_guard lock(mutex_);
  return step_thread_ == at::RecordFunction::currentThreadId();
}

bool ThreadAccesses::is_known(const at::Tensor& tensor) const {
  const std::lock_guard lock(mutex_);
  return memory_.contains(tensor.storage().unsafeGetStorageImpl());
}

std::vector<std::size_t> ThreadAccesses::add(const at::Tensor& tensor,
                                             const ThreadOrder::Place& place) {
  const auto* storage = tensor.storage().unsafeGetStorageImpl();
  const ByteRange range = range_of(tensor);
  std::vector<std::size_t> seen;
  const std::lock_guard lock(mutex_);
  auto found = memory_.find(storage);
  if (found == memory_.end()) {
    found =
        memory_.emplace(storage, Memory{tensor.storage().getWeakStorageImpl(), {}, {}, {}}).first;
  }
  Memory& memory = found->second;
  for (const Access& before : place.is_steps ? memory.of_others : memory.of_step) {
    if (!before.range.overlaps(range)) continue;
    if (!(place.is_steps ? before.place : place).is_write) continue;  // a thread that reads
    if (orders_.size() == kMostOrders) break;
    const bool is_new = std::ranges::none_of(orders_, [&](const ThreadOrder& order) {
      return is_same(order.first, before.place) && is_same(order.second, place) &&
             order.first.execution == before.place.execution;
    });
    if (!is_new) continue;
    seen.push_back(orders_.size());
    orders_.push_back({.first = before.place, .second = place, .access = {}});
  }
  auto& known = memory.known[{key_of(place), place.is_write}];
  if (std::ranges::any_of(known, [&](ByteRange each) { return each.contains(range); })) return seen;
  known.push_back(range);
  (place.is_steps ? memory.of_step : memory.of_others).push_back({place, range});
  return seen;
}

ThreadAccesses::PlaceKey ThreadAccesses::key_of(const ThreadOrder::Place& place) {
  return {place.is_steps, place.line.code, place.line.line, place.op};
}

int ThreadAccesses::count(const ThreadOrder::Place& place) {
  const std::lock_guard lock(mutex_);
  return executions_[key_of(place)]++;
}

std::vector<ThreadOrder> ThreadAccesses::orders() const {
  const std::lock_guard lock(mutex_);
  return orders_;
}

void ThreadAccesses::set_access(std::size_t order, UnorderedAccess access) {
  const std::lock_guard lock(mutex_);
  if (order < orders_.size()) orders_[order].access = std::move(access);
}

void Turn::begin_pass() {
  const std::lock_guard lock(mutex_);
  state_ = State::not_come;
  executions_ = 0;
}

void Turn::await(const ThreadOrder& order, const ThreadOrder::Place& place,
                 const std::vector<at::Tensor>& tensors) {
  if (!is_same(order.first, place)) return;
  std::unique_lock lock(mutex_);
  if (executions_++ != order.first.execution || state_ != State::not_come) return;
  state_ = State::awaited;
  memory_.clear();
  for (const auto& tensor : tensors) {
    memory_.push_back({tensor.storage().unsafeGetStorageImpl(), range_of(tensor)});
  }
  changed_.wait_for(lock, kPatience, [&] { return state_ == State::has_come; });
  if (state_ != State::has_come) state_ = State::is_over;
}

void Turn::give(const ThreadOrder& order, const ThreadOrder::Place& place,
                const std::vector<at::Tensor>& tensors) {
  if (!is_same(order.second, place)) return;
  const std::lock_guard lock(mutex_);
  if (state_ != State::awaited) return;
  const bool is_used = std::ranges::any_of(tensors, [&](const at::Tensor& tensor) {
    const auto* storage = tensor.storage().unsafeGetStorageImpl();
    const ByteRange range = range_of(tensor);
    return std::ranges::any_of(memory_, [&](const Memory& each) {
      return each.storage == storage && each.range.overlaps(range);
    });
  });
  if (!is_used) return;
  state_ = State::has_come;
  changed_.notify_all();
}

bool Turn::has_come() const {
  const std::lock_guard lock(mutex_);
  return state_ == State::has_come;
}

}  // namespace nanlocator::inline operators_room
