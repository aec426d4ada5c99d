#include <algorithm>
#include <string>
#include <utility>

#include "nanlocator/error.hpp"
#include "nanlocator/scan/cpu_scan.hpp"
#include "nanlocator/scan/slot_scanner.hpp"
#include "scan/tensor_view_check.hpp"

namespace nanlocator::inline scan_room {
namespace {

/// Fills the slots inside `enqueue`. A readback copies them, so that later scans do not change what
/// the host reads, as with a device.
class CpuSlotScanner final : public SlotScanner {
 public:
  explicit CpuSlotScanner(int threads) : threads_(threads) {
    if (threads < 1) {
      throw UsageError("make_cpu_slot_scanner: threads is " + std::to_string(threads) +
                       "; the calling thread is one of them, so give 1 or more");
    }
  }

  std::unique_ptr<ScanPlan> plan(std::vector<TensorView> tensors,
                                 std::uint32_t first_slot) override {
    for (const TensorView& tensor : tensors) check_view(tensor);
    make_slots(std::size_t{first_slot} + tensors.size());
    return std::make_unique<ScanPlan>(std::move(tensors), first_slot);
  }

  void enqueue(const ScanPlan& plan, StreamHandle /*stream*/) override {
    const std::span<const TensorView> tensors = plan.tensors();
    if (plan.first_slot() + tensors.size() > slots_.size()) {
      throw UsageError("enqueue: the plan fills slots up to " +
                       std::to_string(plan.first_slot() + tensors.size()) +
                       ", but this scanner has " + std::to_string(slots_.size()) +
                       "; use a plan made by this scanner");
    }
    const std::span<TensorStats> slots =
        std::span(slots_).subspan(plan.first_slot(), tensors.size());
    scan_cpu(tensors, slots, threads_);
    for (const TensorStats& stats : slots) {
      if (!stats.is_finite()) bad_flag_ = 1;
    }
  }

  void reserve(std::uint32_t count) override { make_slots(count); }

  void enqueue_one(const TensorView& tensor, std::uint32_t slot, StreamHandle /*stream*/) override {
    if (slot >= slots_.size()) {
      throw UsageError("enqueue_one: there is no slot " + std::to_string(slot) +
                       ", this scanner has " + std::to_string(slots_.size()) + "; reserve it");
    }
    slots_[slot] = scan_cpu(tensor, threads_);
    if (!slots_[slot].is_finite()) bad_flag_ = 1;
  }

  std::int32_t* bad_flag() noexcept override { return &bad_flag_; }
  void enqueue_clear_flag(StreamHandle /*stream*/) override { bad_flag_ = 0; }
  void enqueue_readback(StreamHandle /*stream*/) override { read_back_ = slots_; }
  void enqueue_readback(std::uint32_t first, std::uint32_t count,
                        StreamHandle /*stream*/) override {
    check_slots(first, count);
    std::copy_n(slots_.begin() + first, count, read_back_.begin() + first);
  }
  bool is_ready() const override { return true; }
  std::span<const TensorStats> wait() override { return read_back_; }
  std::span<const TensorStats> wait(std::uint32_t first, std::uint32_t count) override {
    check_slots(first, count);
    return std::span(read_back_).subspan(first, count);
  }

 private:
  void check_slots(std::uint32_t first, std::uint32_t count) const {
    if (std::size_t{first} + count <= slots_.size()) return;
    throw UsageError("slots " + std::to_string(first) + " to " +
                     std::to_string(std::size_t{first} + count) +
                     " cannot be read back, this scanner has " + std::to_string(slots_.size()));
  }

  void make_slots(std::size_t count) {
    if (count <= slots_.size()) return;
    slots_.resize(count);
    read_back_.resize(count);
  }

  int threads_;
  std::vector<TensorStats> slots_;
  std::vector<TensorStats> read_back_;
  std::int32_t bad_flag_ = 0;
};

}  // namespace

std::unique_ptr<SlotScanner> make_cpu_slot_scanner(int threads) {
  return std::make_unique<CpuSlotScanner>(threads);
}

}  // namespace nanlocator::inline scan_room
