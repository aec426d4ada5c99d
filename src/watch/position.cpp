#include "nanlocator/watch/position.hpp"

#include <ATen/record_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <atomic>

namespace nanlocator::inline watch_room {
namespace {

std::atomic<const PositionCounter*> counting = nullptr;  // only compared
std::atomic<std::int64_t> position = 0;
std::atomic<std::uint64_t> step_thread = 0;

/// The thread that began the pass, or one of autograd's, for which that thread waits.
bool is_of_step() noexcept {
  return step_thread.load(std::memory_order_relaxed) == at::RecordFunction::currentThreadId() ||
         torch::autograd::get_current_graph_task_id() != -1;
}

}  // namespace

std::optional<std::int64_t> current_position() noexcept {
  if (counting.load(std::memory_order_relaxed) == nullptr || !is_of_step()) return std::nullopt;
  return position.load(std::memory_order_relaxed);
}

void forget_position() noexcept {
  counting.store(nullptr, std::memory_order_relaxed);
}

PositionCounter::~PositionCounter() {
  const PositionCounter* own = this;
  counting.compare_exchange_strong(own, nullptr, std::memory_order_relaxed);
}

void PositionCounter::begin() noexcept {
  order_ = {};
  step_thread.store(at::RecordFunction::currentThreadId(), std::memory_order_relaxed);
  position.store(0, std::memory_order_relaxed);
  counting.store(this, std::memory_order_relaxed);
}

void PositionCounter::add(std::uint64_t kind) noexcept {
  if (counting.load(std::memory_order_relaxed) != this || !is_of_step()) return;
  constexpr std::uint64_t kOdd = 0x9e3779b97f4a7c15;  // 2^64 / golden ratio: spreads all bits
  order_.hash = (order_.hash ^ (kind + 1)) * kOdd;
  order_.hash ^= order_.hash >> 32;
  position.store(++order_.count, std::memory_order_relaxed);
}

}  // namespace nanlocator::inline watch_room
