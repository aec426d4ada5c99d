#include "nanlocator/tensor/tensor_scans.hpp"

#include <ATen/Parallel.h>

#include <mutex>

#include "nanlocator/tensor/scan_tensor.hpp"
#include "tensor/deferred_scans.hpp"

namespace nanlocator::inline tensor_room {
namespace {

bool can_be_read(const at::Tensor& tensor) {
  if (!DeferredScans::can_scan(tensor) || tensor.layout() != at::kStrided) return false;
  // FSDP frees the storage of parameters that it has gathered.
  return tensor.numel() == 0 || !tensor.has_storage() || tensor.storage().data() != nullptr;
}

}  // namespace

struct TensorScans::Impl {
  std::mutex mutex;
  DeferredScans scans{1};  // for tensors outside host memory, where threads do not matter
  std::vector<DeferredScans::Id> ids;  // by number
};

TensorScans::TensorScans() : impl_(std::make_unique<Impl>()) {}
TensorScans::~TensorScans() = default;

TensorScans::Scan TensorScans::enqueue(const at::Tensor& tensor) {
  if (!can_be_read(tensor)) return {};
  if (tensor.numel() == 0) return TensorStats{};
  if (tensor.device().is_cpu()) return scan_tensors({tensor}, at::get_num_threads()).front();
  const std::lock_guard lock(impl_->mutex);
  const auto id = impl_->scans.scan_afresh(tensor);
  if (id == DeferredScans::kFinite) return {};  // the stream is in capture
  impl_->ids.push_back(id);
  return static_cast<Number>(impl_->ids.size() - 1);
}

std::vector<TensorStats> TensorScans::read() {
  const std::lock_guard lock(impl_->mutex);
  impl_->scans.read();
  std::vector<TensorStats> stats;
  stats.reserve(impl_->ids.size());
  for (const auto id : impl_->ids) stats.push_back(impl_->scans.stats(id));
  impl_->ids.clear();
  impl_->scans.clear();
  return stats;
}

}  // namespace nanlocator::inline tensor_room
