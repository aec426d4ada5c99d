#include "tensor/observed_tensor.hpp"

#include <ATen/SparseTensorImpl.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <span>
#include <utility>

#include "nanlocator/scan/cpu_scan.hpp"
#include "nanlocator/tensor/scan_tensor.hpp"
#include "tensor/aten_scan.hpp"
#include "tensor/chunks.hpp"
#include "tensor/deferred_scans.hpp"
#include "tensor/extent.hpp"
#include "tensor/own_work.hpp"
#include "tensor/tensor_access.hpp"

namespace nanlocator::inline tensor_room {
namespace {

/// Tensors with one of these keys are wrappers: operators on the wrapped tensors are also seen.
const c10::DispatchKeySet& wrapper_keys() {
  static const c10::DispatchKeySet keys({c10::DispatchKey::Python, c10::DispatchKey::Functionalize,
                                         c10::DispatchKey::FuncTorchBatched,
                                         c10::DispatchKey::BatchedNestedTensor,
                                         c10::DispatchKey::FuncTorchGradWrapper});
  return keys;
}

/// The dtype of an element's real parts; empty for dtypes that the scan does not know.
std::optional<DType> real_dtype(at::ScalarType type) noexcept {
  switch (type) {
    case at::kComplexHalf:
      return DType::float16;
    case at::kComplexFloat:
      return DType::float32;
    case at::kComplexDouble:
      return DType::float64;
    default:
      return scanned_dtype(type);
  }
}

/// A pending conjugation or negation changes no bit that matters here.
TensorView host_view(const at::Tensor& tensor) {
  TensorView view;
  view.dtype = real_dtype(tensor.scalar_type()).value();
  view.data = tensor.const_data_ptr();
  const std::int64_t parts = tensor.is_complex() ? 2 : 1;
  view.numel = tensor.numel() * parts;
  if (!tensor.is_non_overlapping_and_dense()) {
    view.sizes = tensor.sizes().vec();
    view.strides = tensor.strides().vec();
    for (auto& stride : view.strides) stride *= parts;
    if (parts == 2) {
      view.sizes.push_back(2);
      view.strides.push_back(1);
    }
  }
  return view;
}

/// Slots on one device, for one thread at a time.
struct DeviceScans {
  std::mutex mutex;
  DeferredScans scans{1};
};

/// One per device, for the process, and never destroyed: CUDA may be gone before the process ends.
/// Separate, so that a thread that waits for one device does not keep others from launching on
/// another.
DeviceScans& scans_on(at::Device device) {
  static auto& mutex = *new std::mutex;
  static auto& devices = *new std::map<std::string, DeviceScans>;
  const std::lock_guard lock(mutex);
  return devices[device.str()];
}

/// For tensors on one device, with one wait for all.
std::vector<TensorStats> stats_on_device(std::span<const at::Tensor* const> tensors) {
  DeviceScans& on = scans_on(tensors.front()->device());
  const std::lock_guard lock(on.mutex);
  struct Forget {
    ~Forget() { scans.clear(); }
    DeferredScans& scans;
  } const forget{on.scans};
  std::vector<DeferredScans::Id> ids;
  for (const at::Tensor* tensor : tensors) ids.push_back(on.scans.scan_afresh(*tensor));
  on.scans.read();
  std::vector<TensorStats> stats;
  for (const auto id : ids) stats.push_back(on.scans.stats(id));
  return stats;
}

bool has_kernels(at::Device device) {
  return device.is_cuda() && has_cuda_kernels();
}

}  // namespace

bool has_own_memory(const at::Tensor& tensor) noexcept {
  if (!tensor.defined()) return false;
  const auto keys = tensor.key_set();
  if (keys.has_any(wrapper_keys()) || keys.has(c10::DispatchKey::Meta)) return false;
  if (tensor.layout() != at::kStrided || !tensor.has_storage()) return false;
  if (tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides())
    return false;                                  // its sizes are not numbers
  if (is_captured(tensor.device())) return false;  // a scan would wait
  return tensor.numel() != 0 && tensor.storage().data() != nullptr;
}

bool is_plainly_observable(const at::Tensor& tensor) noexcept {
  return has_own_memory(tensor) && real_dtype(tensor.scalar_type());
}

at::Tensor values_of(const at::Tensor& tensor) {
  if (is_plainly_observable(tensor)) return tensor;
  if (!tensor.defined() || tensor.key_set().has_any(wrapper_keys())) return {};
  if (tensor.layout() != at::kSparse || tensor.is_meta()) return {};
  at::Tensor values =
      static_cast<const at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl())->values();
  return is_plainly_observable(values) ? values : at::Tensor();
}

bool is_bad(const at::Tensor& observable) {
  if (observable.device().is_cpu()) return has_nonfinite(host_view(observable));
  return any_is_bad({&observable});
}

bool any_is_bad(const std::vector<const at::Tensor*>& tensors) {
  std::vector<const at::Tensor*> on_device;
  for (const at::Tensor* tensor : tensors) {
    if (!tensor->device().is_cpu()) {
      on_device.push_back(tensor);
    } else if (has_nonfinite(host_view(*tensor))) {
      return true;
    }
  }
  while (!on_device.empty()) {
    const at::Device device = on_device.front()->device();
    const auto others =
        std::ranges::partition(on_device, [&](const auto* t) { return t->device() == device; });
    const std::span here(on_device.begin(), others.begin());
    const OwnWork own_work;
    if (has_kernels(device)) {
      const auto stats = stats_on_device(here);
      if (std::ranges::any_of(stats, [](const auto& s) { return !s.is_finite(); })) return true;
    } else {
      auto is_any = has_nonfinite_with_aten(here.front()->detach());
      for (const at::Tensor* tensor : here.subspan(1)) {
        is_any.logical_or_(has_nonfinite_with_aten(tensor->detach()));
      }
      if (is_any.item<bool>()) return true;
    }
    on_device.erase(on_device.begin(), others.begin());
  }
  return false;
}

Content content_of(const at::Tensor& observable) {
  if (observable.device().is_cpu()) return content_of(host_view(observable));
  return content_of(stats_of(observable, 1));
}

TensorStats stats_of(const at::Tensor& observable, int threads) {
  const OwnWork own_work;
  const at::Tensor values = observable.detach();
  if (values.is_neg() || values.is_conj()) return read_stats(scan_with_aten(values));
  if (values.device().is_cpu()) return scan_tensors({values}, threads).front();
  const at::Tensor* const one[] = {&values};
  if (has_kernels(values.device())) return stats_on_device(one).front();
  return read_stats(scan_with_aten(values));
}

/// Labels, indices and masks are never bad, but their values may explain what is.
static std::optional<TensorStats> stats_of_integers(const at::Tensor& tensor, int threads) {
  constexpr std::int64_t kMostElements = std::int64_t{1} << 22;
  constexpr std::int64_t kChunk = std::int64_t{1} << 18;
  const bool is_integral = c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/true);
  if (!is_integral || !has_own_memory(tensor) || tensor.numel() > kMostElements)
    return std::nullopt;
  const OwnWork own_work;
  TensorStats stats;
  for_each_chunk(tensor.detach(), kChunk, [&](const at::Tensor& chunk, std::int64_t first) {
    add_part(stats, stats_of(chunk.to(at::kDouble), threads), first, sizeof(double));
  });
  return stats;
}

Operand operand_of(std::string name, const at::Tensor& tensor, int threads) {
  Operand operand;
  operand.name = std::move(name);
  operand.dtype = dtype_name(tensor.scalar_type());
  operand.shape = tensor.sizes().vec();
  const at::Tensor values = values_of(tensor);
  if (!values.defined()) {
    operand.stats = stats_of_integers(tensor, threads);
    return operand;
  }
  operand.stats = stats_of(values, threads);
  const bool has_negatives = operand.stats->finite_min < 0 || operand.stats->neg_inf > 0;
  operand.negatives = has_negatives ? count_negatives(values) : std::optional<std::int64_t>(0);
  return operand;
}

ByteRange range_of(const at::Tensor& observable) noexcept {
  const auto element = static_cast<std::int64_t>(observable.element_size());
  ByteRange range;
  range.begin = observable.storage_offset() * element;
  range.is_dense = observable.is_non_overlapping_and_dense();
  range.end = end_in_storage(observable);
  return range;
}

}  // namespace nanlocator::inline tensor_room
