#include "nanlocator/tensor/scan_tensor.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/view_as_real.h>

#include <sstream>

#include "nanlocator/error.hpp"
#include "nanlocator/scan/cpu_scan.hpp"
#include "tensor/dtypes.hpp"
#include "tensor/tensor_access.hpp"

#ifdef NANLOCATOR_CUDA
#include <c10/cuda/CUDAGraphsC10Utils.h>
#endif

namespace nanlocator::inline tensor_room {
namespace {

bool has_pending_operation(const at::Tensor& tensor) {
  return tensor.is_conj() || tensor.is_neg();
}

void require_strided(const at::Tensor& tensor, const std::string& what) {
  if (const char* reason = why_not_scannable(tensor)) refuse(tensor, what, reason);
  if (tensor.layout() != at::kStrided) refuse(tensor, what, "it is not strided");
}

}  // namespace

std::optional<DType> scanned_dtype(at::ScalarType type) noexcept {
  switch (type) {
    case at::kDouble:
      return DType::float64;
    case at::kFloat:
      return DType::float32;
    case at::kHalf:
      return DType::float16;
    case at::kBFloat16:
      return DType::bfloat16;
    case at::kFloat8_e4m3fn:
      return DType::float8_e4m3fn;
    case at::kFloat8_e5m2:
      return DType::float8_e5m2;
    default:
      return std::nullopt;
  }
}

std::string_view dtype_name(at::ScalarType type) noexcept {
  const auto name = torch_name(type);
  return name.empty() ? c10::toString(type) : name;
}

void refuse(const at::Tensor& tensor, const std::string& what, const char* reason) {
  std::ostringstream text;
  text << "Cannot scan " << what << " (" << dtype_name(tensor.scalar_type()) << ", layout "
       << tensor.layout() << ", on " << tensor.device() << "): " << reason
       << ". Supported are float64, float32, float16, bfloat16, float8_e4m3fn, float8_e5m2 and "
          "complex "
          "tensors, strided or sparse COO. Leave it out, or pass a copy in one of these forms.";
  throw UnsupportedError(text.str());
}

bool has_memory(const at::Tensor& tensor) {
  if (tensor.is_meta()) return false;
  if (tensor.layout() != at::kStrided || tensor.numel() == 0) return true;
  return tensor.has_storage() && tensor.const_data_ptr() != nullptr && is_backed(tensor);
}

bool is_backed(const at::Tensor& tensor) {
  return end_in_storage(tensor) <= static_cast<std::int64_t>(tensor.storage().nbytes());
}

std::int64_t end_in_storage(const at::Tensor& tensor) {
  std::int64_t end = tensor.storage_offset();
  if (tensor.is_contiguous()) {
    end += tensor.numel();
  } else if (tensor.numel() > 0) {
    ++end;
    for (std::int64_t d = 0; d < tensor.dim(); ++d) end += (tensor.size(d) - 1) * tensor.stride(d);
  }
  return end * static_cast<std::int64_t>(tensor.element_size());
}

bool is_captured([[maybe_unused]] at::Device device) noexcept {
#ifdef NANLOCATOR_CUDA
  try {
    return device.is_cuda() &&
           c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
  } catch (const c10::Error&) {
    // Training reports a failed device.
  }
#endif
  return false;
}

const char* why_not_scannable(const at::Tensor& tensor) {
  if (tensor.is_nested()) return "a nested tensor has no single shape";
  if (tensor.layout() != at::kStrided && tensor.layout() != at::kSparse) {
    return "its layout is not supported";
  }
  if (!scanned_dtype(tensor.scalar_type()) && !tensor.is_complex()) {
    return "its dtype is not a floating-point type that the scan knows";
  }
  return has_memory(tensor) ? nullptr : "it has no memory of its own";
}

at::Tensor as_real(const at::Tensor& tensor) {
  auto plain = tensor.is_neg() ? tensor.resolve_neg() : tensor;
  if (plain.is_conj()) plain = plain.resolve_conj();
  return plain.is_complex() ? at::view_as_real(plain) : plain;
}

TensorView view_of(const at::Tensor& tensor) {
  require_strided(tensor, "a tensor");
  if (has_pending_operation(tensor)) {
    refuse(tensor, "a tensor",
           "a conjugation or negation is pending; call resolve_conj, resolve_neg");
  }
  const at::NoGradGuard no_grad;
  const auto real = as_real(tensor);
  TensorView view;
  view.numel = real.numel();
  view.data = view.numel == 0 ? nullptr : real.const_data_ptr();
  view.dtype = scanned_dtype(real.scalar_type()).value();
  if (!real.is_contiguous()) {
    view.sizes = real.sizes().vec();
    view.strides = real.strides().vec();
  }
  return view;
}

std::vector<TensorStats> scan_tensors(const std::vector<at::Tensor>& tensors, int threads) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> real;  // kept until the scan has run
  std::vector<TensorView> views;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto what = "tensor " + std::to_string(i);
    require_strided(tensors[i], what);
    if (!tensors[i].device().is_cpu()) refuse(tensors[i], what, "it is not in host memory");
    real.push_back(as_real(tensors[i]));
    views.push_back(view_of(real.back()));
  }
  std::vector<TensorStats> results(tensors.size());
  scan_cpu(views, results, threads);
  return results;
}

}  // namespace nanlocator::inline tensor_room
