#include "nanlocator/tensor/tensor_looks.hpp"

#include <ATen/Parallel.h>

#include <mutex>

#include "nanlocator/tensor/scan_tensor.hpp"
#include "tensor/deferred_looks.hpp"

namespace nanlocator {
namespace {

bool can_be_read(const at::Tensor& tensor) {
  if (!DeferredLooks::can_look(tensor) || tensor.layout() != at::kStrided) return false;
  // FSDP frees the storage of parameters that it has gathered.
  return tensor.numel() == 0 || !tensor.has_storage() || tensor.storage().data() != nullptr;
}

}  // namespace

struct TensorLooks::Impl {
  std::mutex mutex;
  DeferredLooks looks{1};              // of tensors outside of host memory, where it has no threads
  std::vector<DeferredLooks::Id> ids;  // by number
};

TensorLooks::TensorLooks() : impl_(std::make_unique<Impl>()) {}
TensorLooks::~TensorLooks() = default;

TensorLooks::Look TensorLooks::enqueue(const at::Tensor& tensor) {
  if (!can_be_read(tensor)) return {};
  if (tensor.numel() == 0) return TensorStats{};
  if (tensor.device().is_cpu()) return scan_tensors({tensor}, at::get_num_threads()).front();
  const std::lock_guard lock(impl_->mutex);
  const auto id = impl_->looks.look_afresh(tensor);
  if (id == DeferredLooks::kFinite) return {};  // the stream is being captured
  impl_->ids.push_back(id);
  return static_cast<Number>(impl_->ids.size() - 1);
}

std::vector<TensorStats> TensorLooks::read() {
  const std::lock_guard lock(impl_->mutex);
  impl_->looks.read();
  std::vector<TensorStats> stats;
  stats.reserve(impl_->ids.size());
  for (const auto id : impl_->ids) stats.push_back(impl_->looks.stats(id));
  impl_->ids.clear();
  impl_->looks.clear();
  return stats;
}

}  // namespace nanlocator
