#include "tensor/aten_scan.hpp"

#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "nanlocator/scan/fingerprint.hpp"
#include "tensor/chunks.hpp"

namespace nanlocator::inline tensor_room {
namespace {

// A multiple of four, so that chunks of 1-byte elements also begin at a whole fingerprint word.
constexpr std::int64_t kChunk = std::int64_t{1} << 20;
constexpr std::int64_t kNoIndex = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kLow32 = 0xffffffff;

struct PartialFingerprint {
  at::Tensor s0;
  at::Tensor s1;
};

// fingerprint.hpp's sums over one chunk (1-D, contiguous), modulo 2^32 and counted from word 0.
PartialFingerprint fingerprint_of(const at::Tensor& chunk) {
  auto bytes = chunk.view(at::kByte);
  if (const auto rest = bytes.numel() % 4; rest != 0) {
    bytes = at::constant_pad_nd(bytes, {0, 4 - rest}, 0);
  } else if (bytes.storage_offset() % 4 != 0) {
    bytes = bytes.clone();  // a view as 32-bit words needs an aligned beginning
  }
  const auto words = bytes.view(at::kInt).to(at::kLong).bitwise_and(kLow32);
  const auto mixed = words.bitwise_xor(words.bitwise_right_shift(16));
  // Below 2^20 * 2^32: the products fit in int64, and modulo 2^32 so do their sums.
  const auto positions = at::arange(words.numel(), words.options());
  return {mixed.sum().bitwise_and(kLow32),
          mixed.mul(positions).bitwise_and(kLow32).sum().bitwise_and(kLow32)};
}

}  // namespace

bool has_cuda_kernels() {
#ifdef NANLOCATOR_CUDA
  return true;
#else
  return false;
#endif
}

void warn_of_slow_path(at::Device device) {
  if (!device.is_cuda() || has_cuda_kernels()) return;
  TORCH_WARN_ONCE(
      "nanlocator was built without its CUDA kernels: scans of GPU tensors take a slow path, "
      "about "
      "20 operators per 2^20 elements. Install nvcc (pip install nvidia-cuda-nvcc, or set "
      "CUDA_HOME) and build nanlocator again.");
}

AtenStats scan_with_aten(const at::Tensor& tensor) {
  warn_of_slow_path(tensor.device());
  const auto real_dtype = c10::toRealValueType(tensor.scalar_type());
  AtenStats stats;
  stats.numel = tensor.is_complex() ? 2 * tensor.numel() : tensor.numel();
  stats.element_size = static_cast<std::int64_t>(c10::elementSize(real_dtype));
  // MPS has no float64; every gradient there is float32 or narrower.
  const auto wide = tensor.device().is_mps() ? at::kFloat : at::kDouble;
  constexpr double infinity = std::numeric_limits<double>::infinity();
  std::vector<at::Tensor> counts;
  std::vector<at::Tensor> values;
  for_each_chunk(tensor, kChunk, [&](const at::Tensor& chunk, std::int64_t begin) {
    const auto x = chunk.to(wide);
    const auto finite = at::isfinite(x);
    const auto index = at::arange(begin, begin + chunk.numel(), x.options().dtype(at::kLong));
    const auto fingerprint = fingerprint_of(chunk);
    counts.push_back(
        at::stack({at::isnan(x).sum(), x.eq(infinity).sum(), x.eq(-infinity).sum(), x.eq(0).sum(),
                   at::where(finite, kNoIndex, index).min(), fingerprint.s0, fingerprint.s1}));
    const auto magnitude = x.abs();
    values.push_back(at::stack(
        {at::where(finite, x, infinity).min(), at::where(finite, x, -infinity).max(),
         at::where(finite, magnitude, infinity).min(), at::where(finite, magnitude, 0.0).max(),
         at::where(finite, magnitude, 0.0).square().sum()}));
  });
  if (!counts.empty()) {
    stats.counts = at::stack(counts);
    stats.values = at::stack(values);
  }
  return stats;
}

at::Tensor has_nonfinite_with_aten(const at::Tensor& tensor) {
  warn_of_slow_path(tensor.device());
  std::vector<at::Tensor> are_finite;
  for_each_chunk(tensor, kChunk, [&](const at::Tensor& chunk, std::int64_t) {
    // 8-bit floats have no comparison kernels.
    are_finite.push_back(
        at::isfinite(chunk.element_size() == 1 ? chunk.to(at::kFloat) : chunk).all());
  });
  if (are_finite.empty()) return at::zeros({}, tensor.options().dtype(at::kBool));
  return at::stack(are_finite).all().logical_not();
}

at::Tensor has_nonfinite(const AtenStats& stats) {
  if (!stats.counts.defined()) return at::zeros({1}, at::kInt);
  return stats.counts.narrow(1, 0, 3).sum().gt(0).to(at::kInt).view(1);
}

TensorStats read_stats(const AtenStats& stats) {
  TensorStats total;
  total.numel = stats.numel;
  if (!stats.counts.defined()) return total;
  const auto counts = stats.counts.cpu();
  const auto values = stats.values.cpu().to(at::kDouble);
  const auto count = counts.accessor<std::int64_t, 2>();
  const auto value = values.accessor<double, 2>();
  for (std::int64_t chunk = 0; chunk < counts.size(0); ++chunk) {
    TensorStats part;
    part.nan = count[chunk][0];
    part.pos_inf = count[chunk][1];
    part.neg_inf = count[chunk][2];
    part.zeros = count[chunk][3];
    const std::int64_t first = chunk * kChunk;
    if (count[chunk][4] != kNoIndex) part.first_bad = count[chunk][4] - first;
    part.fingerprint = make_fingerprint(static_cast<std::uint32_t>(count[chunk][5]),
                                        static_cast<std::uint32_t>(count[chunk][6]));
    part.finite_min = value[chunk][0];
    part.finite_max = value[chunk][1];
    part.absmin = value[chunk][2];
    part.absmax = value[chunk][3];
    part.sum_of_squares = value[chunk][4];
    add_part(total, part, first, static_cast<std::size_t>(stats.element_size));
  }
  total.numel = stats.numel;
  return total;
}

}  // namespace nanlocator::inline tensor_room
