#include "netcheck/compute_check.hpp"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/log.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/tanh.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <numeric>
#include <optional>

#include "files/text.hpp"
#include "nanlocator/error.hpp"
#include "nanlocator/tensor/scan_tensor.hpp"
#include "replay/settings.hpp"
#include "tensor/dtypes.hpp"

namespace nanlocator::netcheck {
namespace {

constexpr int kRuns = 4;
// Reductions and softmax: rows x columns. 1024 squares of multiples of 2^-7 below 1 sum exactly in
// fp32 (they need 14 + 10 bits).
constexpr std::int64_t kRows = 64;
constexpr std::int64_t kColumns = 1024;
constexpr std::int64_t kNormColumns =
    256;  // softmax and layer norm; small, so that their bounds are narrow
constexpr double kLayerNormEpsilon = 1e-5;

/// Uses every streaming multiprocessor: 16 products of 16 tiles of 128 x 128 each.
struct GemmSize {
  std::int64_t batch, m, n, k;
};
constexpr GemmSize kGemmOnHost = {1, 96, 128, 192};
constexpr GemmSize kGemmOnDevice = {16, 512, 512, 192};

using Values = std::vector<double>;

/// Unit roundoff: half the distance from 1 to the next number (Higham, Accuracy and Stability of
/// Numerical Algorithms, 2nd ed., section 2.1).
double unit_roundoff(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return 0x1p-53;
    case at::kFloat:
      return 0x1p-24;
    case at::kHalf:
      return 0x1p-11;
    default:  // bf16
      return 0x1p-8;
  }
}

double smallest_positive(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return std::numeric_limits<double>::denorm_min();
    case at::kHalf:
      return 0x1p-24;
    case at::kBFloat16:
      return 0x1p-133;
    default:
      return std::numeric_limits<float>::denorm_min();
  }
}

/// The accumulator of bf16 and fp16: fp32, with reduced-precision reductions off.
double accumulator_roundoff(at::ScalarType dtype) {
  return dtype == at::kDouble ? 0x1p-53 : 0x1p-24;
}

/// gamma_n = n u / (1 - n u): the error of n operations in any order (Higham, Lemma 3.1).
double gamma(double n, double roundoff) {
  return n * roundoff / (1 - n * roundoff);
}

/// SplitMix64 (Steele, Lea, Flood 2014): the same numbers on every rank, device and version.
class FixedNumbers {
 public:
  explicit FixedNumbers(std::uint64_t seed) : state_(seed) {}
  /// In [-1, 1), all 53 bits in use.
  double next() { return static_cast<double>(bits() >> 11) * 0x1p-52 - 1; }
  /// A multiple of 2^-7 in [-1, 1): exact in every format, as are short sums of them.
  double next_on_grid() { return static_cast<double>(bits() >> 56) * 0x1p-7 - 1; }

 private:
  std::uint64_t bits() {
    std::uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  std::uint64_t state_;
};

Values full_precision(std::int64_t count, std::uint64_t seed) {
  FixedNumbers numbers(seed);
  Values values(count);
  for (auto& value : values) value = numbers.next();
  return values;
}

Values on_grid(std::int64_t count, std::uint64_t seed) {
  FixedNumbers numbers(seed);
  Values values(count);
  for (auto& value : values) value = numbers.next_on_grid();
  return values;
}

/// `values` rounded to `dtype`, on the host.
at::Tensor rounded(Values values, at::IntArrayRef shape, at::ScalarType dtype) {
  return at::from_blob(values.data(), shape, at::kDouble).to(dtype, false, /*copy=*/true);
}

Values values_of(const at::Tensor& tensor) {
  const auto wide = tensor.to(at::kDouble).contiguous();
  const auto* data = wide.const_data_ptr<double>();
  return {data, data + wide.numel()};
}

/// The expected values, and the allowed error of each. Shorter than the result if that repeats the
/// same product.
struct Reference {
  Values values;
  Values bounds;
  void add(double value, double bound) {
    values.push_back(value);
    bounds.push_back(bound);
  }
};

/// `add_row(row, reference)` for each row of `columns` values.
template <typename AddRow>
Reference reference_by_row(const Values& values, std::int64_t columns, const AddRow& add_row) {
  Reference reference;
  for (const double* row = values.data(); row < values.data() + values.size(); row += columns) {
    add_row(row, reference);
  }
  return reference;
}

/// One operator on given inputs, which are on the device.
struct Case {
  std::string name;
  at::ScalarType dtype;
  std::vector<at::Tensor> inputs;
  std::function<at::Tensor(const std::vector<at::Tensor>&)> run;
  Reference reference;
};

// --- the operators ------------------------------------------------------------------------------

/// |C - C'| <= gamma_k |A||B| (Higham, 3.13), in whatever order the products are summed, and one
/// rounding to the format. Tensor cores do not round their sums; they truncate them and keep few
/// extra bits (Fasi, Higham, Mikaitis, Pranesh, Numerical behavior of NVIDIA tensor cores, PeerJ CS
/// 7 (2021) e330): four times the accumulator's roundoff.
Case gemm(at::Device device, at::ScalarType dtype) {
  const auto& size = device.is_cpu() ? kGemmOnHost : kGemmOnDevice;
  const auto left = rounded(full_precision(size.m * size.k, 1), {size.m, size.k}, dtype);
  const auto right = rounded(full_precision(size.k * size.n, 2), {size.k, size.n}, dtype);
  const bool may_use_tensor_cores = !device.is_cpu();
  const double accumulated = gamma(static_cast<double>(size.k),
                                   accumulator_roundoff(dtype) * (may_use_tensor_cores ? 4 : 1));
  const double last = unit_roundoff(dtype);
  const auto a = values_of(left);
  const auto b = values_of(right);
  Reference reference;
  Values sums(size.n);
  Values magnitudes(size.n);
  for (std::int64_t i = 0; i < size.m; ++i) {
    std::fill(sums.begin(), sums.end(), 0.0);
    std::fill(magnitudes.begin(), magnitudes.end(), 0.0);
    for (std::int64_t l = 0; l < size.k; ++l) {
      const double factor = a[i * size.k + l];
      const double* row = &b[l * size.n];
      for (std::int64_t j = 0; j < size.n; ++j) {
        sums[j] += factor * row[j];
        magnitudes[j] += std::abs(factor * row[j]);
      }
    }
    for (std::int64_t j = 0; j < size.n; ++j) {
      reference.add(sums[j], accumulated * magnitudes[j] * (1 + last) + last * std::abs(sums[j]));
    }
  }
  const auto repeated = [&](const at::Tensor& matrix) {
    return matrix.unsqueeze(0).expand({size.batch, -1, -1}).contiguous().to(device);
  };
  return {"gemm",
          dtype,
          {repeated(left), repeated(right)},
          [](const auto& in) { return at::bmm(in[0], in[1]); },
          std::move(reference)};
}

/// Sums of multiples of 2^-7 are exact in fp32 in any order: only the last rounding remains.
Case sum(at::Device device, at::ScalarType dtype) {
  const auto input = rounded(on_grid(kRows * kColumns, 3), {kRows, kColumns}, dtype);
  auto reference = reference_by_row(values_of(input), kColumns, [&](const double* x, auto& out) {
    const double total = std::accumulate(x, x + kColumns, 0.0);
    out.add(total, unit_roundoff(dtype) * std::abs(total));
  });
  return {"sum",
          dtype,
          {input.to(device)},
          [](const auto& in) { return at::sum(in[0], {1}); },
          std::move(reference)};
}

Case maximum(at::Device device, at::ScalarType dtype) {
  const auto input = rounded(full_precision(kRows * kColumns, 4), {kRows, kColumns}, dtype);
  auto reference = reference_by_row(values_of(input), kColumns, [](const double* x, auto& out) {
    out.add(*std::max_element(x, x + kColumns), 0);
  });
  return {"max",
          dtype,
          {input.to(device)},
          [](const auto& in) { return at::amax(in[0], {1}); },
          std::move(reference)};
}

/// The squares sum exactly, as above; the root is within two units of the accumulator's last place.
Case norm(at::Device device, at::ScalarType dtype) {
  const auto input = rounded(on_grid(kRows * kColumns, 5), {kRows, kColumns}, dtype);
  auto reference = reference_by_row(values_of(input), kColumns, [&](const double* x, auto& out) {
    const double root = std::sqrt(std::inner_product(x, x + kColumns, x, 0.0));
    out.add(root, (4 * accumulator_roundoff(dtype) + unit_roundoff(dtype)) * root);
  });
  return {"norm",
          dtype,
          {input.to(device)},
          [](const auto& in) { return at::linalg_vector_norm(in[0], 2, at::IntArrayRef{1}); },
          std::move(reference)};
}

/// A sum of positive terms has a relative error of at most gamma_n, so the softmax is within (n +
/// c) u (Blanchard, Higham, Higham, Accurately computing the log-sum-exp and softmax functions, IMA
/// J. Numer. Anal. 41 (2021), theorem 4.3). c = 64 leaves room for exp within 20 units in the last
/// place, which Torch's CPU kernels demand of SLEEF.
Case softmax(at::Device device, at::ScalarType dtype) {
  auto values = on_grid(kRows * kNormColumns, 6);
  for (auto& value : values) value *= 4;
  const auto input = rounded(values, {kRows, kNormColumns}, dtype);
  const double relative = gamma(kNormColumns + 64, accumulator_roundoff(dtype));
  auto reference = reference_by_row(values, kNormColumns, [&](const double* x, auto& out) {
    const double largest = *std::max_element(x, x + kNormColumns);
    double total = 0;
    for (std::int64_t i = 0; i < kNormColumns; ++i) total += std::exp(x[i] - largest);
    for (std::int64_t i = 0; i < kNormColumns; ++i) {
      const double y = std::exp(x[i] - largest) / total;
      out.add(y, (relative + unit_roundoff(dtype)) * y + smallest_positive(dtype));
    }
  });
  return {"softmax",
          dtype,
          {input.to(device)},
          [](const auto& in) { return at::softmax(in[0], 1); },
          std::move(reference)};
}

/// A variance computed in one pass or by updating is within about n u kappa, kappa^2 = 1 + mean^2 /
/// variance, near 1 here (Chan, Golub, LeVeque, Algorithms for computing the sample variance, The
/// American Statistician 37 (1983)); the mean is within n u. With a factor of two for each: 4 n u.
Case layer_norm(at::Device device, at::ScalarType dtype) {
  const auto values = on_grid(kRows * kNormColumns, 7);
  const auto input = rounded(values, {kRows, kNormColumns}, dtype);
  const double absolute = 4 * kNormColumns * accumulator_roundoff(dtype);
  auto reference = reference_by_row(values, kNormColumns, [&](const double* x, auto& out) {
    const double mean = std::accumulate(x, x + kNormColumns, 0.0) / kNormColumns;
    double variance = 0;
    for (std::int64_t i = 0; i < kNormColumns; ++i) {
      variance += (x[i] - mean) * (x[i] - mean) / kNormColumns;
    }
    const double scale = 1 / std::sqrt(variance + kLayerNormEpsilon);
    for (std::int64_t i = 0; i < kNormColumns; ++i) {
      const double y = (x[i] - mean) * scale;
      out.add(y, absolute * (1 + std::abs(y)) + unit_roundoff(dtype) * std::abs(y));
    }
  });
  return {"layer_norm",
          dtype,
          {input.to(device)},
          [](const auto& in) {
            return at::layer_norm(in[0], {kNormColumns}, {}, {}, kLayerNormEpsilon);
          },
          std::move(reference)};
}

/// exp, log and tanh are within 2 units in the last place (CUDA C++ Programming Guide, Mathematical
/// Functions; SLEEF's u10 on the CPU); 4 units of the computing format are allowed.
Case elementwise(const char* name, double (*function)(double), at::Tensor (*run)(const at::Tensor&),
                 const Values& values, at::Device device, at::ScalarType dtype) {
  const auto input = rounded(values, {static_cast<std::int64_t>(values.size())}, dtype);
  const double relative = 8 * accumulator_roundoff(dtype) + unit_roundoff(dtype);
  Reference reference;
  for (const double x : values_of(input)) {
    const double y = function(x);
    reference.add(y, relative * std::abs(y) + smallest_positive(dtype));
  }
  return {name,
          dtype,
          {input.to(device)},
          [run](const auto& in) { return run(in[0]); },
          std::move(reference)};
}

Case exponential(at::Device device, at::ScalarType dtype) {
  auto values = full_precision(kRows * kColumns, 8);
  for (auto& value : values) value *= 8;
  return elementwise("exp", std::exp, at::exp, values, device, dtype);
}

Case logarithm(at::Device device, at::ScalarType dtype) {
  auto values = full_precision(kRows * kColumns, 9);
  for (auto& value : values) value = std::exp2(8 * value);
  return elementwise("log", std::log, at::log, values, device, dtype);
}

Case hyperbolic_tangent(at::Device device, at::ScalarType dtype) {
  auto values = full_precision(kRows * kColumns, 10);
  for (auto& value : values) value *= 3;
  return elementwise("tanh", std::tanh, at::tanh, values, device, dtype);
}

using MakeCase = Case (*)(at::Device, at::ScalarType);
constexpr MakeCase kOperators[] = {
    gemm, sum, maximum, norm, softmax, layer_norm, exponential, logarithm, hyperbolic_tangent};
constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble};

// --- comparing results -------------------------------------------------------------------------

std::string index_text(std::int64_t flat, const at::Tensor& tensor) {
  return describe_shape(unravel_index(flat, tensor.sizes().vec()));
}

std::string title(const Case& checked) {
  return checked.name + " in " + std::string(torch_name(checked.dtype));
}

/// |error| / bound, above 1 if wrong; infinite for a NaN.
double excess(double found, double expected, double bound) {
  const double error = std::abs(found - expected);
  if (std::isnan(error)) return std::numeric_limits<double>::infinity();
  if (error == 0) return 0;
  return bound == 0 ? std::numeric_limits<double>::infinity() : error / bound;
}

/// Fills in `worst`; returns a sentence if an element is outside its bound.
std::optional<std::string> compare(const Case& checked, const at::Tensor& result,
                                   OperatorCheck& outcome) {
  // The reference's doubles have the same roundoff as an fp64 result: both may err.
  const double slack = checked.dtype == at::kDouble ? 2 : 1;
  const auto found = values_of(result);
  const auto& [expected, bounds] = checked.reference;
  std::int64_t first = -1;
  std::int64_t worst = 0;
  std::int64_t count = 0;
  for (std::size_t i = 0; i < found.size(); ++i) {
    const auto place = i % expected.size();
    const double here = excess(found[i], expected[place], slack * bounds[place]);
    if (here > outcome.worst) {
      outcome.worst = here;
      worst = static_cast<std::int64_t>(i);
    }
    if (here <= 1) continue;
    if (first < 0) first = static_cast<std::int64_t>(i);
    ++count;
  }
  if (first < 0) return std::nullopt;
  const auto place = worst % expected.size();
  return title(checked) + ": " + std::to_string(count) + " of " + std::to_string(found.size()) +
         " elements are wrong, the first at " + index_text(first, result) + "; the worst at " +
         index_text(worst, result) + " is " + number_text(found[worst], 9) + " instead of " +
         number_text(expected[place], 9) + ", off by " +
         number_text(std::abs(found[worst] - expected[place]), 9) + " where " +
         number_text(slack * bounds[place], 9) + " is allowed";
}

std::optional<std::string> differs_in_rerun(const Case& checked, const at::Tensor& first,
                                            const at::Tensor& again, int rerun) {
  const auto* left = static_cast<const char*>(first.const_data_ptr());
  const auto* right = static_cast<const char*>(again.const_data_ptr());
  if (std::memcmp(left, right, first.nbytes()) == 0) return std::nullopt;
  const auto size = static_cast<std::int64_t>(first.element_size());
  std::int64_t count = 0;
  std::int64_t place = -1;
  for (std::int64_t i = 0; i < first.numel(); ++i) {
    if (std::memcmp(left + i * size, right + i * size, size) == 0) continue;
    if (place < 0) place = i;
    ++count;
  }
  const auto value_at = [&](const at::Tensor& tensor) {
    return number_text(tensor.flatten()[place].to(at::kDouble).item<double>(), 9);
  };
  return title(checked) + ": differs from its first result in re-run " + std::to_string(rerun) +
         " at " + index_text(place, first) + ": " + value_at(first) + ", then " + value_at(again) +
         " (" + std::to_string(count) + " of " + std::to_string(first.numel()) +
         " elements differ)";
}

void check(const Case& checked, const AfterOperator& after, ComputeCheck& outcome) {
  const std::string dtype(torch_name(checked.dtype));
  const auto run = [&](int rerun) {
    const auto result = checked.run(checked.inputs).to(at::kCPU).contiguous();
    if (after) after(checked.name, dtype, rerun, result);
    return result;
  };
  const auto first = run(0);
  OperatorCheck summary{checked.name, dtype, 0, scan_tensors({first}).front().fingerprint};
  if (const auto failure = compare(checked, first, summary)) outcome.failures.push_back(*failure);
  for (int rerun = 1; rerun < kRuns; ++rerun) {
    if (const auto failure = differs_in_rerun(checked, first, run(rerun), rerun)) {
      outcome.failures.push_back(*failure);
      break;
    }
  }
  outcome.operators.push_back(summary);
}

/// Turns off user settings that would make a result less exact than its format. Only those that
/// this device knows: a build without CUDA refuses the others.
std::map<std::string, std::string> exact_settings(at::Device device) {
  if (device.is_cpu()) return {{"float32_precision.mkldnn_matmul", "ieee"}, {"autocast", "off"}};
  return {{"autocast", "off"},
          {"float32_precision.cuda_matmul", "ieee"},
          {"bf16_reduced_precision_reduction", "off"},
          {"fp16_accumulation", "off"},
          {"fp16_reduced_precision_reduction", "off"}};
}

}  // namespace

ComputeCheck check_compute(at::Device device, const AfterOperator& after) {
  if (!device.is_cpu() && !device.is_cuda()) {
    throw UsageError("check_compute supports CPU and CUDA devices, not " + device.str());
  }
  const auto start = std::chrono::steady_clock::now();
  ComputeCheck outcome;
  const at::NoGradGuard no_grad;
  const ScopedSettings exact(exact_settings(device));
  std::string name;
  try {
    for (const auto make : kOperators) {
      for (const auto dtype : kDtypes) {
        name = "preparing the inputs on " + device.str();
        const auto checked = make(device, dtype);
        name = title(checked);
        check(checked, after, outcome);
      }
    }
  } catch (const std::exception& error) {
    outcome.failures.push_back(name + " failed: " + first_line(error));
  }
  outcome.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return outcome;
}

}  // namespace nanlocator::netcheck
