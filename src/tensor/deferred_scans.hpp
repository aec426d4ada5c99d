// Scans tensors while a step runs, and tells when it has ended what was in them.
//
// In: any tensor. Out: an id, resolved by `read`. In host memory a finite tensor costs one read of
// the fast predicate, and a bad one a scan at once; on CUDA a launch into a slot of its own, on the
// current stream; elsewhere a few ATen operators. Only `read` waits. Memory that was scanned and
// not written since (by its version counter) is not read again, nor is a view of it.
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

  /// False for integers, for what has no memory, and for subclasses and wrappers that hide it.
  [[nodiscard]] static bool can_scan(const at::Tensor& tensor);
  /// kFinite for what cannot be scanned.
  [[nodiscard]] Id scan(const at::Tensor& tensor);
  /// Reads the memory whatever was seen of it before: for what is written without a new version
  /// (collectives do).
  [[nodiscard]] Id scan_afresh(const at::Tensor& tensor);
  /// Waits for what was enqueued; then `stats` are right.
  void read();
  [[nodiscard]] const TensorStats& stats(Id id) const { return stats_[id]; }
  /// Forgets everything; ids start anew.
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
  /// By ATen's operators, for what no kernel reads where it lies.
  [[nodiscard]] Id scan_in_chunks(const at::Tensor& tensor);
  [[nodiscard]] Id new_id();

  int threads_;
  std::vector<TensorStats> stats_;  // by id
  // The weak pointers keep the addresses, not the memory.
  std::unordered_map<c10::StorageImpl*, StorageScans> seen_;
  std::vector<Pending> pending_;  // ATen's scans
  std::vector<std::unique_ptr<Device>> devices_;
};

}  // namespace nanlocator::inline tensor_room
