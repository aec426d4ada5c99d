// The slots of one device, filled by nanlocator's kernels or by ATen operators.
//
// Tensors here are dense, of real floating point and on the slots' device; scans are enqueued on
// the device's current stream.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "nanlocator/scan/slot_scanner.hpp"
#include "nanlocator/scan/tensor_stats.hpp"

namespace nanlocator::inline tensor_room {

/// Tensors that are scanned together, and their slots.
struct SlotBatch {
  std::uint32_t first_slot = 0;
  std::uint32_t capacity = 0;      // slots reserved, from first_slot on
  std::uint32_t tensors = 0;       // in the latest `prepare`
  std::unique_ptr<ScanPlan> plan;  // of the kernels, kept while the storages do not move
};

class DeviceSlots {
 public:
  virtual ~DeviceSlots() = default;

  /// Reserves slots, and makes a plan if the batch's does not match. The only call that may throw.
  virtual void prepare(SlotBatch& batch, std::span<const at::Tensor> tensors) = 0;
  /// `batch` and `tensors` are those of the latest `prepare`.
  virtual void scan(SlotBatch& batch, std::span<const at::Tensor> tensors) = 0;
  virtual void clear_flag() = 0;
  /// int32 [1] on the device; valid until these slots are destroyed.
  [[nodiscard]] virtual at::Tensor flag() = 0;
  /// All slots; waits for the device.
  [[nodiscard]] virtual std::vector<TensorStats> read() = 0;
  /// Copies `count` slots from `first` on to the host, asynchronously, after the scans so far.
  virtual void start_reading(std::uint32_t first, std::uint32_t count) = 0;
  /// The slots that `start_reading`, or a later `read`, has copied; empty if the copy is still
  /// running, and on devices that offer no query without waiting. Never waits. Valid until the next
  /// call.
  [[nodiscard]] virtual std::optional<std::span<const TensorStats>> arrived(
      std::uint32_t first, std::uint32_t count) = 0;
};

/// Kernels on CPU and, in builds with CUDA, on CUDA devices; ATen elsewhere. `threads`: see
/// scan_cpu.
[[nodiscard]] std::unique_ptr<DeviceSlots> make_device_slots(at::Device device, int threads);
[[nodiscard]] std::unique_ptr<DeviceSlots> make_aten_slots(at::Device device);

}  // namespace nanlocator::inline tensor_room
