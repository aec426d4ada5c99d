#include "nanlocator/tensor/scan_one.hpp"

#include <ATen/ops/_values.h>

#include <mutex>

#include "nanlocator/tensor/scan_tensor.hpp"
#include "tensor/deferred_scans.hpp"
#include "tensor/tensor_access.hpp"

namespace nanlocator::inline tensor_room {

std::optional<TensorStats> scan_one(const at::Tensor& tensor) {
  if (!DeferredScans::can_scan(tensor) || is_captured(tensor.device())) return std::nullopt;
  // One per process: it owns slots on each device. Never destroyed, because CUDA may be gone before
  // the process ends.
  static auto& mutex = *new std::mutex;
  static auto& scans = *new DeferredScans(1);
  const std::lock_guard lock(mutex);
  scans.clear();
  const auto id = scans.scan(tensor);
  scans.read();
  const TensorStats stats = scans.stats(id);
  scans.clear();
  if (id != DeferredScans::kFinite || tensor.numel() == 0) return stats;
  // In host memory, and found finite without stats.
  const bool is_sparse = tensor.layout() != at::kStrided;
  return scan_tensors({is_sparse ? tensor.detach()._values() : tensor.detach()}).front();
}

}  // namespace nanlocator::inline tensor_room
