// Scans that do not block: launched now, read once when the step ends.
//
// A ScanPlan lists tensors that are scanned together and the slots for their stats. `enqueue` puts
// the plan's work on a stream and returns; `enqueue_readback` copies all slots to the host in
// stream order; `wait` is the only call that blocks. The CPU backend fills the slots inside
// `enqueue`. One scanner serves one device and one thread at a time.
//
// A tensor whose address changes at every step (an activation) is scanned without a plan: by
// `enqueue_one`, into a slot that `reserve` has created.
//
// Cost: one read of the tensors' memory; per plan one launch (CUDA), no allocation after `plan`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "nanlocator/scan/tensor_stats.hpp"
#include "nanlocator/scan/tensor_view.hpp"

namespace nanlocator::inline scan_room {

/// A cudaStream_t for the CUDA backend (nullptr: the default stream); ignored by the CPU backend.
struct StreamHandle {
  void* handle = nullptr;
};

/// A fixed list of tensors and their slots, made by `SlotScanner::plan`. Reused every step while
/// `matches` says that the storages have not moved.
class ScanPlan {
 public:
  ScanPlan(std::vector<TensorView> tensors, std::uint32_t first_slot)
      : tensors_(std::move(tensors)), first_slot_(first_slot) {}
  virtual ~ScanPlan() = default;
  ScanPlan(const ScanPlan&) = delete;  // the device tables have one owner
  ScanPlan& operator=(const ScanPlan&) = delete;

  [[nodiscard]] std::span<const TensorView> tensors() const noexcept { return tensors_; }
  [[nodiscard]] std::uint32_t first_slot() const noexcept { return first_slot_; }
  /// True if `tensors` have the addresses, sizes and dtypes of this plan.
  [[nodiscard]] bool matches(std::span<const TensorView> tensors) const noexcept;

 private:
  std::vector<TensorView> tensors_;
  std::uint32_t first_slot_;
};

class SlotScanner {
 public:
  virtual ~SlotScanner() = default;

  /// Prepares the scan of `tensors[i]` into slot `first_slot + i`; the only call that allocates.
  /// Throws UnsupportedError or UsageError for an unusable view.
  [[nodiscard]] virtual std::unique_ptr<ScanPlan> plan(std::vector<TensorView> tensors,
                                                       std::uint32_t first_slot) = 0;

  /// Scans into the plan's slots, overwriting them, in stream order. `plan` must come from this
  /// scanner and outlive the enqueued work.
  virtual void enqueue(const ScanPlan& plan, StreamHandle stream) = 0;

  /// Creates the slots below `count` that do not exist yet. Allocates, as `plan` does.
  virtual void reserve(std::uint32_t count) = 0;
  /// Scans one tensor into an existing slot, overwriting it, in stream order. The tensor's
  /// description is an argument of the launch: no table, no copy, no wait; only the tensor's memory
  /// must be kept alive. Throws UnsupportedError or UsageError for an unusable view or slot.
  virtual void enqueue_one(const TensorView& tensor, std::uint32_t slot, StreamHandle stream) = 0;

  /// An int32 in this device's memory that every scan sets to 1 if it finds a NaN or Inf; only
  /// `enqueue_clear_flag` resets it. It may be all-reduced in place.
  [[nodiscard]] virtual std::int32_t* bad_flag() noexcept = 0;
  virtual void enqueue_clear_flag(StreamHandle stream) = 0;

  /// Copies every slot to the host, asynchronously, in stream order.
  virtual void enqueue_readback(StreamHandle stream) = 0;
  /// Copies `count` slots, beginning with `first`; cheap enough for a healthy step. Throws
  /// UsageError for slots that do not exist.
  virtual void enqueue_readback(std::uint32_t first, std::uint32_t count, StreamHandle stream) = 0;
  /// True once the last readback has arrived. Does not block.
  [[nodiscard]] virtual bool is_ready() const = 0;
  /// The slots as of the last readback, for which it waits. Valid until the next `enqueue_readback`
  /// or `plan`. Slots that no scan has filled hold empty stats.
  [[nodiscard]] virtual std::span<const TensorStats> wait() = 0;
  /// The same for `count` slots, beginning with `first`, which the last readback must have copied.
  [[nodiscard]] virtual std::span<const TensorStats> wait(std::uint32_t first,
                                                          std::uint32_t count) = 0;
};

/// The CPU backend; cpu_scan.hpp describes threads and instruction sets.
[[nodiscard]] std::unique_ptr<SlotScanner> make_cpu_slot_scanner(int threads);

/// The source of the CUDA backend's device memory. Called from any thread.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  /// Memory of the current device, usable on all of its streams at once and aligned to 256 bytes.
  /// May wait for the device. Throws CudaError if it cannot allocate.
  [[nodiscard]] virtual void* allocate(std::size_t bytes) = 0;
  /// Called with the device current and idle: all work that uses `memory` has ended.
  virtual void free(void* memory) noexcept = 0;
};

/// cudaMalloc and cudaFree, for programs without an allocator of their own.
[[nodiscard]] std::shared_ptr<DeviceMemory> make_cuda_memory();

/// The CUDA backend on device `device` (in nanlocator_cuda, which exists if NANLOCATOR_CUDA is on).
/// Throws UsageError for a missing device or a tensor in the wrong memory, CudaError if a call into
/// CUDA fails. The caller's current device is restored.
///
/// `plan` copies its tables to the device on a stream of its own and waits for the copy. If it
/// needs more slots or larger tables, it allocates from `memory`, which may wait for the whole
/// device and must not run during graph capture; if that throws, the scanner is unchanged. Slots
/// never move. The destructor waits for the device.
///
/// Calls named `enqueue...` do not block and may be captured in a graph; the graph's plans must
/// then stay alive. The caller must order scans of one plan with each other, and a readback after
/// the scans that it is to show, by the stream or by events. Scans of different plans may overlap,
/// and so may `enqueue_one` on different streams: it keeps scratch memory for each stream on which
/// it has been called, allocated for 16 streams at a time.
///
/// Integers and extremes equal the CPU's. `sum_of_squares` has the same bits in every run for a
/// tensor of the same layout and the same address modulo 16, but its last bits differ from the
/// CPU's.
[[nodiscard]] std::unique_ptr<SlotScanner> make_cuda_slot_scanner(
    int device, std::shared_ptr<DeviceMemory> memory);

}  // namespace nanlocator::inline scan_room
