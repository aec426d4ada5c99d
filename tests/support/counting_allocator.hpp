// Counts Torch's host memory and refuses allocations beyond a limit. Tests and benchmarks install
// it in place of c10's CPU allocator. Any thread.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <malloc.h>

#include <atomic>
#include <cstdint>
#include <limits>

namespace nanlocator {

class CountingAllocator final : public c10::Allocator {
 public:
  /// Lives as long as the process, because its memory may be freed at any time.
  static CountingAllocator& instance() {
    static auto& allocator = *new CountingAllocator;
    return allocator;
  }
  /// In use until another allocator is set.
  static CountingAllocator& install() {
    c10::SetCPUAllocator(&instance());
    return instance();
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    TORCH_CHECK_WITH(OutOfMemoryError, static_cast<std::int64_t>(bytes) <= limit_.load(),
                     "CountingAllocator: ", bytes, " bytes refused");
    void* const memory = c10::alloc_cpu(bytes);
    if (memory != nullptr) {
      const auto now = current_ += size_of(memory);
      std::int64_t before = peak_;
      while (now > before && !peak_.compare_exchange_weak(before, now)) {
      }
    }
    return {memory, memory, &free_counted, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_counted; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  /// Bytes allocated since `install` and not freed.
  [[nodiscard]] std::int64_t current() const noexcept { return current_; }
  /// The maximum of `current` since `restart_peak`.
  [[nodiscard]] std::int64_t peak() const noexcept { return peak_; }
  void restart_peak() noexcept { peak_ = current_.load(); }
  /// A single allocation of more than `bytes` throws c10::OutOfMemoryError. (A limit on the total
  /// would depend on when another thread or the garbage collector frees memory.)
  void set_limit(std::int64_t bytes) noexcept { limit_ = bytes; }
  void remove_limit() noexcept { limit_ = kNoLimit; }

 private:
  static constexpr std::int64_t kNoLimit = std::numeric_limits<std::int64_t>::max();

  static std::int64_t size_of(void* memory) {
    return static_cast<std::int64_t>(malloc_usable_size(memory));
  }
  static void free_counted(void* memory) {
    if (memory == nullptr) return;
    instance().current_ -= size_of(memory);
    c10::free_cpu(memory);
  }

  std::atomic<std::int64_t> current_ = 0;
  std::atomic<std::int64_t> peak_ = 0;
  std::atomic<std::int64_t> limit_ = kNoLimit;
};

}  // namespace nanlocator
