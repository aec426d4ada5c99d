#include "tensor/deferred_scans.hpp"

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_values.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "nanlocator/error.hpp"
#include "nanlocator/scan/cpu_scan.hpp"
#include "nanlocator/tensor/scan_tensor.hpp"
#include "nanlocator/tensor/scan_work.hpp"
#include "tensor/cuda_scanner.hpp"
#include "tensor/tensor_access.hpp"

#ifdef NANLOCATOR_CUDA
#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace nanlocator::inline tensor_room {
namespace {

// Wrappers of vmap and grad, fake and subclass tensors have no memory or someone else's. Sparse
// ones are scanned by their values.
constexpr auto kHidesItsMemory =
    at::kFunctorchWrappedTensors |
    c10::DispatchKeySet({c10::DispatchKey::Batched, c10::DispatchKey::Python}) |
    c10::DispatchKeySet(c10::BackendComponent::MetaBit);

/// Readable in place by the scan.
bool is_plain(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && !tensor.is_complex() && !tensor.is_neg();
}

}  // namespace

/// A scanned region of memory.
struct DeferredScans::Region {
  const char* begin;
  const char* end;
  at::ScalarType type;
  std::uint32_t version;
  bool is_contiguous;
  Id id;
  c10::SmallVector<std::int64_t, 4> sizes, strides;  // empty if contiguous

  Region(const at::Tensor& tensor, std::uint32_t at_version)
      : begin(static_cast<const char*>(tensor.const_data_ptr())),
        type(tensor.scalar_type()),
        version(at_version),
        is_contiguous(tensor.is_contiguous()),
        id(kFinite) {
    if (!is_contiguous) {
      sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
      strides.assign(tensor.strides().begin(), tensor.strides().end());
    }
    const auto offset = tensor.storage_offset() * static_cast<std::int64_t>(tensor.element_size());
    end = begin + (end_in_storage(tensor) - offset);
  }

  /// Whether this scan also covers `other`: the same elements in the same order, or a subset of
  /// elements known to be finite.
  [[nodiscard]] bool answers(const Region& other) const {
    if (type != other.type || version != other.version) return false;
    if (id == kFinite && is_contiguous) return begin <= other.begin && other.end <= end;
    return begin == other.begin && end == other.end && is_contiguous == other.is_contiguous &&
           sizes == other.sizes && strides == other.strides;
  }
};

struct DeferredScans::StorageScans {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  c10::SmallVector<Region, 2> regions;
};

#ifdef NANLOCATOR_CUDA

/// The slots of one CUDA device.
struct DeferredScans::Device {
  explicit Device(at::Device of) : device(of), scanner(make_torch_cuda_scanner(of)) {}

  /// False for more dimensions than the kernel supports.
  [[nodiscard]] bool scan(const at::Tensor& tensor, Id id) {
    const auto stream = c10::cuda::getCurrentCUDAStream(device.index());
    // Memory owned by another stream is reused only after the scan has read it.
    c10::cuda::CUDACachingAllocator::recordStream(tensor.storage().data_ptr(), stream);
    const auto slot = static_cast<std::uint32_t>(ids.size());
    scanner->reserve(slot + 1);
    try {
      scanner->enqueue_one(view_of(tensor), slot, StreamHandle{stream.stream()});
    } catch (const UnsupportedError&) {
      return false;
    }
    ids.push_back(id);
    if (std::ranges::find(streams, stream) == streams.end()) streams.push_back(stream);
    return true;
  }

  void read(std::vector<TensorStats>& stats) {
    if (ids.empty()) return;
    const auto stream = c10::cuda::getCurrentCUDAStream(device.index());
    for (const auto& other : streams) {
      if (other == stream) continue;
      at::cuda::CUDAEvent done;
      done.record(other);
      done.block(stream);
    }
    const auto count = static_cast<std::uint32_t>(ids.size());
    scanner->enqueue_readback(0, count, StreamHandle{stream.stream()});
    const auto slots = scanner->wait(0, count);
    for (std::size_t slot = 0; slot < ids.size(); ++slot) stats[ids[slot]] = slots[slot];
  }

  void clear() {
    ids.clear();
    streams.clear();
  }

  at::Device device;
  std::unique_ptr<SlotScanner> scanner;
  std::vector<Id> ids;  // by slot
  std::vector<c10::cuda::CUDAStream> streams;
};

#else

struct DeferredScans::Device {
  void read(std::vector<TensorStats>&) {}
  void clear() {}
};

#endif

DeferredScans::DeferredScans(int threads) : threads_(threads), stats_(1) {}
DeferredScans::~DeferredScans() = default;

DeferredScans::Id DeferredScans::new_id() {
  stats_.emplace_back();
  return static_cast<Id>(stats_.size() - 1);
}

bool DeferredScans::can_scan(const at::Tensor& tensor) {
  if (!tensor.defined()) return false;
  if (!(tensor.unsafeGetTensorImpl()->key_set() & kHidesItsMemory).empty()) return false;
  return why_not_scannable(tensor) == nullptr;
}

DeferredScans::Id DeferredScans::scan_afresh(const at::Tensor& tensor) {
  if (!can_scan(tensor) || tensor.numel() == 0) return kFinite;
  if (is_plain(tensor)) return scan_real(tensor);
  const at::RecordFunctionGuard unrecorded(false);
  const at::NoGradGuard no_grad;
  const at::Tensor values = tensor.layout() == at::kStrided ? tensor : tensor._values();
  if (values.is_neg() || values.is_conj()) return scan_in_chunks(values);
  return scan_real(as_real(values));
}

DeferredScans::Id DeferredScans::scan(const at::Tensor& tensor) {
  if (!can_scan(tensor) || tensor.numel() == 0) return kFinite;
  // Inference tensors have no version counter.
  if (!is_plain(tensor) || tensor.is_inference()) return scan_afresh(tensor);
  Region region(tensor, tensor.unsafeGetTensorImpl()->version_counter().current_version());
  auto* const storage = tensor.storage().unsafeGetStorageImpl();
  const auto entry =
      seen_.try_emplace(storage, StorageScans{tensor.storage().getWeakStorageImpl(), {}}).first;
  auto& regions = entry->second.regions;
  for (const Region& known : regions) {
    if (known.answers(region)) return known.id;
  }
  region.id = scan_real(tensor);
  const Id id = region.id;
  // Scans from before a write are useless.
  if (!regions.empty() && regions.back().version != region.version) regions.clear();
  regions.push_back(std::move(region));
  return id;
}

DeferredScans::Id DeferredScans::scan_real(const at::Tensor& real) {
  count_scan(1, static_cast<std::int64_t>(real.nbytes()));
  if (real.device().is_cpu()) {
    const TensorView view = view_of(real);
    if (!has_nonfinite(view)) return kFinite;
    const Id id = new_id();
    stats_[id] = scan_cpu(view, threads_);
    return id;
  }
#ifdef NANLOCATOR_CUDA
  if (real.device().is_cuda()) {
    // A graph would write the slot again at each replay, long after the slot has been reassigned.
    if (c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) {
      return kFinite;
    }
    const at::RecordFunctionGuard unrecorded(false);
    const at::NoGradGuard no_grad;
    const Id id = new_id();
    try {
      if (device_of(real).scan(real, id)) return id;
    } catch (const CudaError& error) {  // no memory for slots
      TORCH_WARN_ONCE("nanlocator: falls back to slow scans by ATen operators: ", error.what());
    }
  }
#endif
  return scan_in_chunks(real);
}

#ifdef NANLOCATOR_CUDA
DeferredScans::Device& DeferredScans::device_of(const at::Tensor& tensor) {
  for (const auto& device : devices_) {
    if (device->device == tensor.device()) return *device;
  }
  return *devices_.emplace_back(std::make_unique<Device>(tensor.device()));
}
#endif

DeferredScans::Id DeferredScans::scan_in_chunks(const at::Tensor& tensor) {
  const at::RecordFunctionGuard unrecorded(false);
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Id id = new_id();
  pending_.push_back({id, scan_with_aten(tensor)});
  return id;
}

void DeferredScans::read() {
  const at::RecordFunctionGuard unrecorded(false);
  for (const auto& device : devices_) device->read(stats_);
  for (const auto& pending : pending_) stats_[pending.id] = read_stats(pending.stats);
  pending_.clear();
}

void DeferredScans::clear() {
  stats_.assign(1, TensorStats{});
  seen_.clear();
  pending_.clear();
  for (const auto& device : devices_) device->clear();
}

}  // namespace nanlocator::inline tensor_room
