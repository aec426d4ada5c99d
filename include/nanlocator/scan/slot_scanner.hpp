// Scans that do not wait: launch now, read once when the step ends.
//
// A ScanPlan says which tensors are scanned together and into which slots. `enqueue` puts the
// plan's work on a stream and returns; `enqueue_readback` copies all slots to the host in stream
// order; `wait` is the only call that blocks. The CPU backend fills the slots inside `enqueue`,
// through the same calls. One scanner serves one device and one thread at a time.
//
// A tensor that has a new address at every step (an activation) is scanned without a plan, by
// `enqueue_one` into a slot that `reserve` has made.
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

/// A fixed list of tensors and their slots; made by `SlotScanner::plan`, reused every step for as
/// long as `matches` says that the storages have not moved.
class ScanPlan {
 public:
  ScanPlan(std::vector<TensorView> tensors, std::uint32_t first_slot)
      : tensors_(std::move(tensors)), first_slot_(first_slot) {}
  virtual ~ScanPlan() = default;
  ScanPlan(const ScanPlan&) = delete;  // owned device tables are not copied
  ScanPlan& operator=(const ScanPlan&) = delete;

  [[nodiscard]] std::span<const TensorView> tensors() const noexcept { return tensors_; }
  [[nodiscard]] std::uint32_t first_slot() const noexcept { return first_slot_; }
  /// True if scanning `tensors` now is what this plan does: same addresses, sizes and dtypes.
  [[nodiscard]] bool matches(std::span<const TensorView> tensors) const noexcept;

 private:
  std::vector<TensorView> tensors_;
  std::uint32_t first_slot_;
};

class SlotScanner {
 public:
  virtual ~SlotScanner() = default;

  /// Prepares the scan of `tensors[i]` into slot `first_slot + i`; the only call that allocates.
  /// Throws UnsupportedError or UsageError for a view that cannot be scanned.
  [[nodiscard]] virtual std::unique_ptr<ScanPlan> plan(std::vector<TensorView> tensors,
                                                       std::uint32_t first_slot) = 0;

  /// Scans into the plan's slots, overwriting them, in stream order. `plan` must come from this
  /// scanner and live until the work is done.
  virtual void enqueue(const ScanPlan& plan, StreamHandle stream) = 0;

  /// Makes the slots below `count`, where they are not there yet. Allocates, as `plan` does.
  virtual void reserve(std::uint32_t count) = 0;
  /// Scans one tensor into a slot that exists, overwriting it, in stream order. Its description
  /// travels with the launch: no table, no copy, no wait, and nothing to keep but the tensor's
  /// memory. Throws UnsupportedError or UsageError for a view or slot that cannot be used.
  virtual void enqueue_one(const TensorView& tensor, std::uint32_t slot, StreamHandle stream) = 0;

  /// An int32 in this device's memory, set to 1 by every scan that met a NaN or Inf and never reset
  /// but by `enqueue_clear_flag`. It may be reduced over ranks where it lies.
  [[nodiscard]] virtual std::int32_t* bad_flag() noexcept = 0;
  virtual void enqueue_clear_flag(StreamHandle stream) = 0;

  /// Copies every slot to the host, asynchronously, in stream order.
  virtual void enqueue_readback(StreamHandle stream) = 0;
  /// The same of `count` slots from `first` on: what a healthy step can afford. Throws UsageError
  /// for slots that do not exist.
  virtual void enqueue_readback(std::uint32_t first, std::uint32_t count, StreamHandle stream) = 0;
  /// True once the last readback has arrived; never waits.
  [[nodiscard]] virtual bool is_ready() const = 0;
  /// The slots as of the last readback; waits for it. Valid until the next `enqueue_readback` or
  /// `plan`. Slots that no scan has filled hold empty stats.
  [[nodiscard]] virtual std::span<const TensorStats> wait() = 0;
  /// The same of `count` slots from `first` on, which the last readback must have copied.
  [[nodiscard]] virtual std::span<const TensorStats> wait(std::uint32_t first,
                                                          std::uint32_t count) = 0;
};

/// The CPU backend: see cpu_scan.hpp for threads and instruction sets.
[[nodiscard]] std::unique_ptr<SlotScanner> make_cpu_slot_scanner(int threads);

/// Where the CUDA backend's device memory comes from. From any thread.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  /// Of the current device, for use on any of its streams at once; aligned to 256 bytes. May wait
  /// for the device. Throws CudaError where there is none.
  [[nodiscard]] virtual void* allocate(std::size_t bytes) = 0;
  /// The device has ended all work that uses it, and is current.
  virtual void free(void* memory) noexcept = 0;
};

/// cudaMalloc and cudaFree: for programs without an allocator of their own.
[[nodiscard]] std::shared_ptr<DeviceMemory> make_cuda_memory();

/// The CUDA backend on device `device` (in nanlocator_cuda; only there when NANLOCATOR_CUDA is on).
///
/// `plan` copies its tables to the device and waits for that copy, on a stream of its own; where it
/// needs more slots or larger tables than it has, it asks `memory`, which may wait for the whole
/// device and must not run while a graph is captured; where that throws, the scanner is as it was
/// before the call. Slots never move. Destroying it waits for the device. Everything named
/// `enqueue` may be captured in a graph, which then needs its plans alive, and waits for nothing.
/// Scans of one plan must be ordered with each other, and a readback after the scans that it is to
/// show, by the stream or by events of the caller; scans of different plans may overlap, and so may
/// those of `enqueue_one` on different streams. `enqueue_one` keeps scratch for each stream that it
/// has been used on, allocated 16 streams at a time. Integers and extremes equal the CPU's;
/// `sum_of_squares` has the same bits in every run, for a tensor of the same layout and of the same
/// address modulo 16, but not the CPU's last bits. Throws UsageError for a device that is not there
/// or a tensor in the wrong memory, CudaError where a call into CUDA fails. The caller's current
/// device is left as it was.
[[nodiscard]] std::unique_ptr<SlotScanner> make_cuda_slot_scanner(
    int device, std::shared_ptr<DeviceMemory> memory);

}  // namespace nanlocator::inline scan_room
