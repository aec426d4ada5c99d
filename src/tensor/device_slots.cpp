#include "tensor/device_slots.hpp"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <bit>
#include <optional>
#include <utility>

#include "nanlocator/tensor/scan_tensor.hpp"
#include "nanlocator/tensor/scan_work.hpp"
#include "tensor/aten_scan.hpp"
#include "tensor/cuda_scanner.hpp"

#ifdef NANLOCATOR_CUDA
#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace nanlocator::inline tensor_room {
namespace {

void count_scan_of(std::span<const at::Tensor> tensors) {
  std::int64_t bytes = 0;
  for (const auto& tensor : tensors) bytes += static_cast<std::int64_t>(tensor.nbytes());
  count_scan(static_cast<std::int64_t>(tensors.size()), bytes);
}

// Ranges of slots that are never reclaimed. A batch that outgrows its range gets one of twice the
// size, so all ranges of a batch together are at most four times its largest size.
class SlotRanges {
 public:
  void reserve(SlotBatch& batch, std::size_t tensors) {
    if (tensors <= batch.capacity) return;
    batch.capacity = std::bit_ceil(static_cast<std::uint32_t>(tensors));
    batch.first_slot = next_;
    next_ += batch.capacity;
    batch.plan.reset();
  }
  [[nodiscard]] std::uint32_t size() const noexcept { return next_; }

 private:
  std::uint32_t next_ = 0;
};

// Orders the kernels' work on one device by the calls, whatever streams are current: each call
// waits, on the device, for the work of the previous one, and for nothing else.
class StreamOrder {
 public:
  explicit StreamOrder(at::Device device) : device_(device) {}

#ifdef NANLOCATOR_CUDA
  /// Calls `enqueue(stream)` with the current stream.
  template <class Enqueue>
  void in_order(const Enqueue& enqueue) {
    if (!device_.is_cuda()) return enqueue(StreamHandle{});
    const auto stream = c10::cuda::getCurrentCUDAStream(device_.index());
    if (latest_ && *latest_ != stream) done_.block(stream);
    enqueue(StreamHandle{stream.stream()});
    done_.record(stream);
    latest_ = stream;
  }

  /// Tells the caching allocator that the current stream reads memory that another stream may own:
  /// if freed, it is reused only after the read.
  void keep_until_read(std::span<const at::Tensor> tensors) const {
    if (!device_.is_cuda()) return;
    const auto stream = c10::cuda::getCurrentCUDAStream(device_.index());
    for (const auto& tensor : tensors) {
      c10::cuda::CUDACachingAllocator::recordStream(tensor.storage().data_ptr(), stream);
    }
  }
#else
  template <class Enqueue>
  void in_order(const Enqueue& enqueue) {
    enqueue(StreamHandle{});
  }
  void keep_until_read(std::span<const at::Tensor>) const {}
#endif

 private:
  at::Device device_;
#ifdef NANLOCATOR_CUDA
  std::optional<c10::cuda::CUDAStream> latest_;
  at::cuda::CUDAEvent done_;
#endif
};

class KernelSlots : public DeviceSlots {
 public:
  KernelSlots(at::Device device, std::unique_ptr<SlotScanner> scanner)
      : device_(device), scanner_(std::move(scanner)), order_(device) {}

  void prepare(SlotBatch& batch, std::span<const at::Tensor> tensors) override {
    std::vector<TensorView> views;
    views.reserve(tensors.size());
    for (const auto& tensor : tensors) views.push_back(view_of(tensor));
    batch.tensors = static_cast<std::uint32_t>(tensors.size());
    if (batch.plan && batch.plan->matches(views)) return;
    // The device may still be reading the old plan's tables.
    if (batch.plan) retired_.push_back({steps_, std::move(batch.plan)});
    ranges_.reserve(batch, views.size());
    batch.plan = scanner_->plan(std::move(views), batch.first_slot);
    count_plan();
  }

  void scan(SlotBatch& batch, std::span<const at::Tensor> tensors) override {
    count_scan_of(tensors);
    order_.keep_until_read(tensors);
    order_.in_order([&](StreamHandle stream) { scanner_->enqueue(*batch.plan, stream); });
  }

  void clear_flag() override {
    order_.in_order([&](StreamHandle stream) { scanner_->enqueue_clear_flag(stream); });
    // Two steps later the host has read a flag from after a retired plan's last scan.
    ++steps_;
    std::erase_if(retired_, [&](const auto& plan) { return plan.step + 2 < steps_; });
  }

  at::Tensor flag() override {
    order_.in_order([](StreamHandle) {});
    return at::from_blob(scanner_->bad_flag(), {1},
                         at::TensorOptions().dtype(at::kInt).device(device_));
  }

  std::vector<TensorStats> read() override {
    order_.in_order([&](StreamHandle stream) { scanner_->enqueue_readback(stream); });
    const auto slots = scanner_->wait();
    return {slots.begin(), slots.end()};
  }

  void start_reading(std::uint32_t first, std::uint32_t count) override {
    order_.in_order([&](StreamHandle stream) { scanner_->enqueue_readback(first, count, stream); });
  }

  std::optional<std::span<const TensorStats>> arrived(std::uint32_t first,
                                                      std::uint32_t count) override {
    if (!scanner_->is_ready()) return std::nullopt;
    return scanner_->wait(first, count);
  }

 private:
  struct RetiredPlan {
    std::uint64_t step;
    std::unique_ptr<ScanPlan> plan;
  };

  at::Device device_;
  std::unique_ptr<SlotScanner> scanner_;
  StreamOrder order_;
  SlotRanges ranges_;
  std::vector<RetiredPlan> retired_;
  std::uint64_t steps_ = 0;
};

class AtenSlots : public DeviceSlots {
 public:
  explicit AtenSlots(at::Device device)
      : flag_(at::zeros({1}, at::TensorOptions().dtype(at::kInt).device(device))) {}

  void prepare(SlotBatch& batch, std::span<const at::Tensor> tensors) override {
    batch.tensors = static_cast<std::uint32_t>(tensors.size());
    ranges_.reserve(batch, tensors.size());
    slots_.resize(ranges_.size());
  }

  void scan(SlotBatch& batch, std::span<const at::Tensor> tensors) override {
    count_scan_of(tensors);
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      auto& slot = slots_[batch.first_slot + i];
      slot = scan_with_aten(tensors[i]);
      if (slot.numel > 0) flag_.bitwise_or_(has_nonfinite(slot));
    }
  }

  void clear_flag() override { flag_.zero_(); }
  at::Tensor flag() override { return flag_; }

  std::vector<TensorStats> read() override {
    std::vector<TensorStats> stats;
    stats.reserve(slots_.size());
    for (const auto& slot : slots_) stats.push_back(read_stats(slot));
    return stats;
  }

  void start_reading(std::uint32_t, std::uint32_t) override {}
  std::optional<std::span<const TensorStats>> arrived(std::uint32_t, std::uint32_t) override {
    return std::nullopt;
  }

 private:
  at::Tensor flag_;
  SlotRanges ranges_;
  std::vector<AtenStats> slots_;
};

}  // namespace

std::unique_ptr<DeviceSlots> make_device_slots(at::Device device, int threads) {
  if (device.is_cpu()) return std::make_unique<KernelSlots>(device, make_cpu_slot_scanner(threads));
#ifdef NANLOCATOR_CUDA
  if (device.is_cuda()) {
    return std::make_unique<KernelSlots>(device, make_torch_cuda_scanner(device));
  }
#endif
  return make_aten_slots(device);
}

std::unique_ptr<DeviceSlots> make_aten_slots(at::Device device) {
  return std::make_unique<AtenSlots>(device);
}

}  // namespace nanlocator::inline tensor_room
