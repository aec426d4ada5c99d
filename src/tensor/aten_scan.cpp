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

namespace nanlocator {
namespace {

// A multiple of four, so that chunks of 1-byte elements begin at a whole fingerprint word too.
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
  // Below 2^20 * 2^32: the products fit in int64, and taken modulo 2^32 so do their sums.
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
      "nanlocator was built without its CUDA kernels: scans of GPU tensors take the slow path, "
      "about "
      "20 operators for each 2^20 elements. Install nvcc (pip install nvidia-cuda-nvcc, or set "
      "CUDA_HOME) and build nanlocator again.");
}

AtenStats scan_with_aten(const at::Tensor& tensor) {
  warn_of_slow_path(tensor.device());
  AtenStats stats;
  stats.numel = tensor.numel();
  stats.element_size = static_cast<std::int64_t>(tensor.element_size());
  const auto flat = tensor.contiguous().view(-1);
  // MPS has no float64; every gradient there is float32 or narrower.
  const auto wide = tensor.device().is_mps() ? at::kFloat : at::kDouble;
  constexpr double infinity = std::numeric_limits<double>::infinity();
  std::vector<at::Tensor> counts;
  std::vector<at::Tensor> values;
  for (std::int64_t begin = 0; begin < stats.numel; begin += kChunk) {
    const auto chunk = flat.narrow(0, begin, std::min(kChunk, stats.numel - begin));
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
  }
  if (!counts.empty()) {
    stats.counts = at::stack(counts);
    stats.values = at::stack(values);
  }
  return stats;
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
    total.nan += count[chunk][0];
    total.pos_inf += count[chunk][1];
    total.neg_inf += count[chunk][2];
    total.zeros += count[chunk][3];
    if (total.first_bad < 0 && count[chunk][4] != kNoIndex) total.first_bad = count[chunk][4];
    const auto part = make_fingerprint(static_cast<std::uint32_t>(count[chunk][5]),
                                       static_cast<std::uint32_t>(count[chunk][6]));
    const auto first_word = static_cast<std::uint32_t>(chunk * kChunk * stats.element_size / 4);
    total.fingerprint = add_fingerprints(total.fingerprint, shift_fingerprint(part, first_word));
    total.finite_min = std::min(total.finite_min, value[chunk][0]);
    total.finite_max = std::max(total.finite_max, value[chunk][1]);
    total.absmin = std::min(total.absmin, value[chunk][2]);
    total.absmax = std::max(total.absmax, value[chunk][3]);
    total.sum_of_squares += value[chunk][4];
  }
  return total;
}

}  // namespace nanlocator
