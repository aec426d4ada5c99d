#include "nanlocator/tensor/look.hpp"

#include <ATen/ops/_values.h>

#include <mutex>

#include "nanlocator/tensor/scan_tensor.hpp"
#include "tensor/deferred_looks.hpp"
#include "tensor/tensor_access.hpp"

namespace nanlocator {

std::optional<TensorStats> look(const at::Tensor& tensor) {
  if (!DeferredLooks::can_look(tensor) || is_captured(tensor.device())) return std::nullopt;
  // One for the process: it owns slots on each device. Never destroyed, because CUDA may be gone
  // before the process ends.
  static auto& mutex = *new std::mutex;
  static auto& looks = *new DeferredLooks(1);
  const std::lock_guard lock(mutex);
  looks.clear();
  const auto id = looks.look(tensor);
  looks.read();
  const TensorStats stats = looks.stats(id);
  looks.clear();
  if (id != DeferredLooks::kFinite || tensor.numel() == 0) return stats;
  // In host memory, and found finite without its stats.
  const bool is_sparse = tensor.layout() != at::kStrided;
  return scan_tensors({is_sparse ? tensor.detach()._values() : tensor.detach()}).front();
}

}  // namespace nanlocator
