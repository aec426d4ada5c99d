#include "replay/poison.hpp"

#include <ATen/Context.h>
#include <c10/core/CPUAllocator.h>

#include <cstring>

namespace nanlocator::inline replay_room {
namespace {

/// Wraps the CPU allocator during a poisoned run. Lives as long as the process: tensors allocated
/// through it keep a pointer to it.
class PoisoningAllocator final : public at::Allocator {
 public:
  void stand_before(at::Allocator* base, std::uint8_t byte) noexcept {
    base_ = base;
    byte_ = byte;
  }

  at::DataPtr allocate(std::size_t bytes) override {
    auto memory = base_->allocate(bytes);
    if (memory.get() != nullptr) std::memset(memory.get(), byte_, bytes);
    return memory;
  }
  at::DeleterFnPtr raw_deleter() const override { return base_->raw_deleter(); }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    base_->copy_data(to, from, bytes);
  }

  [[nodiscard]] at::Allocator* base() const noexcept { return base_; }

 private:
  at::Allocator* base_ = nullptr;
  std::uint8_t byte_ = kNanByte;
};

PoisoningAllocator& poisoning_allocator() {
  static auto& allocator = *new PoisoningAllocator;
  return allocator;
}

}  // namespace

PoisonedAllocations::PoisonedAllocations(at::Device device, std::uint8_t byte) {
  poisoning_allocator().stand_before(c10::GetCPUAllocator(), byte);
  c10::SetCPUAllocator(&poisoning_allocator());
  if (!device.is_cpu()) {
    auto& context = at::globalContext();
    before_ = {context.deterministicAlgorithms(), context.deterministicAlgorithmsWarnOnly(),
               context.deterministicFillUninitializedMemory()};
    context.setDeterministicAlgorithms(true, /*warn_only=*/true);
    context.setDeterministicFillUninitializedMemory(true);
  }
}

PoisonedAllocations::~PoisonedAllocations() {
  c10::SetCPUAllocator(poisoning_allocator().base());
  if (before_) {
    auto& context = at::globalContext();
    context.setDeterministicAlgorithms(before_->is_on, before_->only_warns);
    context.setDeterministicFillUninitializedMemory(before_->fills);
  }
}

}  // namespace nanlocator::inline replay_room
