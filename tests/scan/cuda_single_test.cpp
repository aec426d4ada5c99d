// The CUDA scan of one tensor without a plan, on the host, compared with the slow reference and
// with the scan of a plan.
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "nanlocator/error.hpp"
#include "scan/cuda_test_tensors.hpp"
#include "scan/reference_scan.hpp"

namespace nanlocator::testing {
namespace {

class CudaSingleScan : public ::testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(AllDTypes, CudaSingleScan, ::testing::ValuesIn(kAllDTypes),
                         [](const auto& dtype) { return std::string(name_of(dtype.param)); });

TEST_P(CudaSingleScan, ATensorOfSeveralChunksHasTheBitsThatAPlanGivesIt) {
  std::mt19937_64 random(1);
  for (const std::int64_t numel : {1, 77, 65536, 65537, 3 * 65536 + 12345}) {
    RawTensor tensor(GetParam(), numel, size_of(GetParam()));
    tensor.fill_with_ordinary_numbers(random);
    tensor.set(numel / 2, named_bits(GetParam()).quiet_nan);
    const TensorStats stats = scan_single_on_host(tensor.view());
    expect_stats(stats, reference_scan(tensor.view()), GetParam());
    EXPECT_EQ(stats.nan, 1);
    EXPECT_EQ(stats.first_bad, numel / 2);
    EXPECT_TRUE(same_bits(stats, scan_on_host({tensor.view()})[0])) << numel;
  }
}

TEST_P(CudaSingleScan, AStridedTensorIsWalkedInLogicalOrder) {
  std::mt19937_64 random(2);
  RawTensor tensor(GetParam(), 300 * 400);
  tensor.fill_with_ordinary_numbers(random);
  tensor.set(5 * 400 + 7, named_bits(GetParam()).quiet_nan);
  TensorView view = tensor.view();
  view.sizes = {400, 300};  // transposed
  view.strides = {1, 400};
  const TensorStats stats = scan_single_on_host(view);
  expect_stats(stats, reference_scan(view), GetParam());
  EXPECT_EQ(stats.first_bad, 7 * 300 + 5);
}

TEST(CudaSingleScan, MoreChunksThanPartialsAreMergedIntoThem) {
  constexpr std::int64_t kNumel =
      std::int64_t{cuda::kSinglePartials + 2} * cuda::kChunkElements + 11;
  RawTensor tensor(DType::float8_e5m2, kNumel);
  std::memset(tensor.data(), 0x3c, tensor.bytes());  // 1.0
  const NamedBits bits = named_bits(DType::float8_e5m2);
  // In the second chunk of partial 1, and in the only one of partial 700.
  constexpr std::int64_t kLate = std::int64_t{cuda::kSinglePartials + 1} * cuda::kChunkElements + 3;
  constexpr std::int64_t kEarly = std::int64_t{700} * cuda::kChunkElements + 9;
  tensor.set(kLate, bits.quiet_nan);
  tensor.set(kEarly, bits.pos_inf);
  tensor.set(kNumel - 1, bits.minus_two);
  const TensorStats stats = scan_single_on_host(tensor.view());
  EXPECT_EQ(stats.numel, kNumel);
  EXPECT_EQ(stats.nan, 1);
  EXPECT_EQ(stats.pos_inf, 1);
  EXPECT_EQ(stats.first_bad, kEarly);
  EXPECT_EQ(stats.finite_min, -2.0);
  EXPECT_EQ(stats.finite_max, 1.0);
  EXPECT_EQ(stats.sum_of_squares, static_cast<double>(kNumel - 3) + 4.0);
}

TEST(CudaSingleScan, AnEmptyTensorHasEmptyStats) {
  TensorView view;
  EXPECT_TRUE(same_bits(scan_single_on_host(view), TensorStats{}));
}

TEST(CudaSingleScan, AViewOfTooManyDimensionsIsRefused) {
  RawTensor tensor(DType::float32, 1 << 12);
  TensorView view = tensor.view();
  view.numel = 1 << 9;
  for (int d = 8; d >= 0; --d) {
    view.sizes.push_back(2);
    view.strides.push_back(std::int64_t{1} << (d % 2 == 0 ? d + 2 : d));
  }
  EXPECT_THROW((void)cuda::make_tensor_entry(view), UnsupportedError);
}

}  // namespace
}  // namespace nanlocator::testing
