#include "nanlocator/tensor/scan_work.hpp"

#include <atomic>

namespace nanlocator::inline tensor_room {
namespace {

struct {
  std::atomic<std::int64_t> launches, tensors, bytes, plans, waits;
} work;

void add(std::atomic<std::int64_t>& counter, std::int64_t amount) noexcept {
  counter.fetch_add(amount, std::memory_order_relaxed);
}

}  // namespace

ScanWork scan_work() noexcept {
  return {work.launches, work.tensors, work.bytes, work.plans, work.waits};
}

void count_scan(std::int64_t tensors, std::int64_t bytes) noexcept {
  add(work.launches, 1);
  add(work.tensors, tensors);
  add(work.bytes, bytes);
}

void count_plan() noexcept {
  add(work.plans, 1);
}
void count_wait() noexcept {
  add(work.waits, 1);
}

}  // namespace nanlocator::inline tensor_room
