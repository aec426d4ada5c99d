// Scans tensors while a step runs; their stats are available when it has ended.
//
// In: any tensor. Out: an id, resolved by `read`. In host memory a finite tensor costs one read of
// the fast predicate, and a bad one a full scan at once; on CUDA it costs a launch into its own
// slot, on the current stream; elsewhere a few ATen operators. Only `read` waits. Memory that was
// scanned and not written since (by its version counter) is not read again, nor is a view of it.
// One thread at a time.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "nanlocator/scan/slot_scanner.hpp"
#include "nanlocator/scan/tensor_stats.hpp"
#include "tensor/aten_scan.hpp"

namespace nanlocator::inline tensor_room {

class DeferredScans {
 public:
  using Id = std::uint32_t;
  /// Finite, known at once.
  static constexpr Id kFinite = 0;

  explicit DeferredScans(int threads);
  ~DeferredScans();
  DeferredScans(const DeferredScans&) = delete;  // owns device memory
  DeferredScans& operator=(const DeferredScans&) = delete;

  /// False for integers, for tensors without memory, and for subclasses and wrappers that hide it.
  [[nodiscard]] static bool can_scan(const at::Tensor& tensor);
  /// kFinite for tensors that cannot be scanned.
  [[nodiscard]] Id scan(const at::Tensor& tensor);
  /// Reads the memory even if it was scanned before: for writes that do not change the version, as
  /// by collectives.
  [[nodiscard]] Id scan_afresh(const at::Tensor& tensor);
  /// Waits for the enqueued scans; then `stats` are valid.
  void read();
  [[nodiscard]] const TensorStats& stats(Id id) const { return stats_[id]; }
  /// Forgets everything; ids start again.
  void clear();

 private:
  struct Device;
  struct Region;
  struct StorageScans;
  struct Pending {
    Id id;
    AtenStats stats;
  };

  [[nodiscard]] Id scan_real(const at::Tensor& real);
  [[nodiscard]] Device& device_of(const at::Tensor& tensor);
  /// Uses ATen's operators, for tensors that no kernel can read in place.
  [[nodiscard]] Id scan_in_chunks(const at::Tensor& tensor);
  [[nodiscard]] Id new_id();

  int threads_;
  std::vector<TensorStats> stats_;  // by id
  // The weak pointers reserve the addresses, not the memory.
  std::unordered_map<c10::StorageImpl*, StorageScans> seen_;
  std::vector<Pending> pending_;  // pending ATen scans
  std::vector<std::unique_ptr<Device>> devices_;
};

}  // namespace nanlocator::inline tensor_room
