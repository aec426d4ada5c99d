#include "tensor/observed_tensor.hpp"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>

#include "nanlocator/tensor/scan_tensor.hpp"
#include "support/counting_allocator.hpp"
#include "tensor/aten_scan.hpp"
#include "tensor/extent.hpp"

namespace nanlocator {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr std::int64_t kMiB = std::int64_t{1} << 20;

/// Torch memory that `work` allocates at peak, beyond what is allocated before.
std::int64_t bytes_taken_by(const std::function<void()>& work) {
  auto& allocator = CountingAllocator::install();
  const std::int64_t before = allocator.current();
  allocator.restart_peak();
  work();
  return allocator.peak() - before;
}

/// A tensor of 64 MiB, and the transpose of every second column of it.
std::vector<at::Tensor> large_tensors(at::ScalarType dtype) {
  const auto columns = std::int64_t{8192} / static_cast<std::int64_t>(c10::elementSize(dtype));
  const auto whole = at::ones({8192, columns}, dtype);
  return {whole, whole.slice(1, 0, columns, 2).t()};
}

class LargeTensor : public ::testing::TestWithParam<at::ScalarType> {};

TEST_P(LargeTensor, IsScannedWithoutMemoryInProportionToIt) {
  for (const auto& tensor : large_tensors(GetParam())) {
    for (const float bad : {1.0F, NAN}) {  // nothing bad, then the last element
      if (GetParam() != at::kLong && GetParam() != at::kBool) tensor[-1][-1] = bad;
      SCOPED_TRACE(tensor.is_contiguous() ? "contiguous" : "strided");
      const bool is_observable = values_of(tensor).defined();
      const auto taken = bytes_taken_by([&] {
        if (is_observable) {
          EXPECT_EQ(any_is_bad({&tensor}), bad != 1);
          EXPECT_EQ(is_bad(tensor), bad != 1);
          EXPECT_EQ(content_of(tensor), bad == 1 ? Content::finite : Content::nan);
          EXPECT_EQ(stats_of(tensor, 1).nan, bad == 1 ? 0 : 1);
          EXPECT_EQ(extent_of(tensor, stats_of(tensor, 2).nan).has_value(), bad != 1);
          (void)count_negatives(tensor);
        }
        EXPECT_EQ(operand_of("self", tensor, 1).shape, tensor.sizes().vec());
      });
      EXPECT_LE(taken, 8 * kMiB);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, LargeTensor,
                         ::testing::Values(at::kDouble, at::kFloat, at::kHalf, at::kBFloat16,
                                           at::kFloat8_e4m3fn, at::kFloat8_e5m2, at::kComplexFloat,
                                           at::kComplexDouble, at::kLong, at::kBool),
                         [](const auto& info) { return std::string(c10::toString(info.param)); });

TEST(LargeIntegers, AreDescribedWithoutACopyInDoublePrecision) {
  const auto labels = at::arange(4 * kMiB, at::kInt).view({2048, 2048});
  for (const auto& tensor : {labels, labels.t()}) {
    Operand operand;
    EXPECT_LE(bytes_taken_by([&] { operand = operand_of("target", tensor, 1); }), 8 * kMiB);
    ASSERT_TRUE(operand.stats);
    EXPECT_EQ(operand.stats->finite_min, 0);
    EXPECT_EQ(operand.stats->finite_max, 4 * kMiB - 1);
    EXPECT_EQ(operand.stats->numel, 4 * kMiB);
    EXPECT_EQ(operand.stats->zeros, 1);
  }
}

TEST(LargeTensorElsewhere, IsScannedByAtenInChunksWhateverItsStrides) {
  const auto small = at::ones({2048, 1024});
  const auto large = at::ones({16384, 1024});  // 64 MiB
  large[16000][3] = -kInf;
  const auto taken = [](const at::Tensor& tensor) {
    return bytes_taken_by([&] {
      (void)scan_with_aten(tensor);
      (void)has_nonfinite_with_aten(tensor);
    });
  };
  EXPECT_LE(taken(large), taken(small) + kMiB);
  EXPECT_LE(taken(large.t()), taken(small.t()) + kMiB);
  EXPECT_TRUE(has_nonfinite_with_aten(large.t()).item<bool>());
  EXPECT_FALSE(has_nonfinite_with_aten(small.t()).item<bool>());
  const auto of_view = read_stats(scan_with_aten(large.t()));
  EXPECT_EQ(of_view.first_bad, 3 * 16384 + 16000);
  EXPECT_EQ(of_view.fingerprint, scan_tensors({large.t().contiguous()}).front().fingerprint);
}

TEST(Content, IsTheWorstValueOfATensorAnywhere) {
  const std::int64_t several_chunks = 3 * kMiB;
  const auto values = at::ones({several_chunks});
  EXPECT_EQ(content_of(values), Content::finite);
  values[7] = -kInf;
  EXPECT_EQ(content_of(values), Content::inf);
  values[several_chunks - 1] = NAN;
  EXPECT_EQ(content_of(values), Content::nan);
  EXPECT_EQ(content_of(values.slice(0, 0, several_chunks, 2)), Content::finite);
  EXPECT_EQ(content_of(values.slice(0, 1, several_chunks, 2)), Content::nan);
  EXPECT_EQ(content_of(values.slice(0, 0, 100)), Content::inf);
}

TEST(Stats, OfAPendingConjugationOrNegationAreThoseOfItsCopy) {
  const auto base = at::randn({5, 300'001}, at::kComplexFloat);  // three chunks, of odd rows
  base[4][7] = kInf;
  const auto conjugated = base.conj();
  for (const auto& view : {conjugated, conjugated.t(), at::imag(conjugated)}) {
    const auto copy = view.resolve_conj().resolve_neg().contiguous();
    auto stats = stats_of(view, 1);
    const auto expected = stats_of(copy, 1);
    EXPECT_NEAR(stats.sum_of_squares, expected.sum_of_squares, 1e-9 * expected.sum_of_squares);
    stats.sum_of_squares = expected.sum_of_squares;  // added in another order
    EXPECT_EQ(stats, expected);
  }
}

}  // namespace
}  // namespace nanlocator
