// Scans whole tensors by the CUDA scan's chunks and thread shares, on the host, and compares with
// the slow reference.
#include "scan/cuda_chunk.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "scan/cuda_test_tensors.hpp"
#include "scan/reference_scan.hpp"

namespace nanlocator::testing {
namespace {

/// A scan adds squares in another order than the reference; all else must be equal.
void expect_as_reference(const TensorView& view, const TensorStats& stats) {
  expect_stats(stats, reference_scan(view), view.dtype);
}

void expect_host_scan_as_reference(const TensorView& view) {
  expect_as_reference(view, scan_on_host({view})[0]);
}

class CudaChunk : public ::testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(AllDTypes, CudaChunk, ::testing::ValuesIn(kAllDTypes),
                         [](const auto& dtype) { return std::string(name_of(dtype.param)); });

TEST_P(CudaChunk, AnyBitsOfAnyLengthAtAnyAlignmentGiveTheReferencesStats) {
  std::mt19937_64 random(1);
  for (int repeat = 0; repeat < 120; ++repeat) {
    const auto numel = static_cast<std::int64_t>(random() % (repeat < 80 ? 70 : 20000));
    const std::size_t offset = random() % 16 / size_of(GetParam()) * size_of(GetParam());
    RawTensor tensor(GetParam(), numel, offset);
    if (repeat % 2 == 0) {
      tensor.fill_with_any_bits(random);
    } else {
      tensor.fill_with_ordinary_numbers(random);
    }
    SCOPED_TRACE("numel " + std::to_string(numel) + ", offset " + std::to_string(offset));
    expect_host_scan_as_reference(tensor.view());
    if (HasFailure()) return;
  }
}

TEST_P(CudaChunk, OneBadElementIsFoundAnywhere) {
  const NamedBits bits = named_bits(GetParam());
  // A full batch of vectors is 256 threads * 64 bytes; this has one, a rest, a head and a tail.
  const std::int64_t numel = 20001 / static_cast<std::int64_t>(size_of(GetParam())) + 7;
  std::mt19937_64 random(2);
  RawTensor tensor(GetParam(), numel, size_of(GetParam()) < 4 ? 4 : size_of(GetParam()));
  tensor.fill_with_ordinary_numbers(random);
  std::vector<std::int64_t> places = {0, 1, 2, 3, 15, 16, 17, numel / 2, numel - 2, numel - 1};
  for (int i = 0; i < 20; ++i) places.push_back(static_cast<std::int64_t>(random() % numel));
  for (const std::int64_t place : places) {
    RawTensor broken = tensor;
    broken.set(place, bits.quiet_nan);
    TensorStats stats = scan_on_host({broken.view()})[0];
    EXPECT_EQ(stats.nan, 1);
    EXPECT_EQ(stats.first_bad, place);
    expect_as_reference(broken.view(), stats);
    if (!bits.has_infinity) continue;
    broken.set(place, bits.neg_inf);
    stats = scan_on_host({broken.view()})[0];
    EXPECT_EQ(stats.neg_inf, 1);
    EXPECT_EQ(stats.pos_inf, 0);
    EXPECT_EQ(stats.first_bad, place);
    broken.set(place, bits.pos_inf);
    stats = scan_on_host({broken.view()})[0];
    EXPECT_EQ(stats.pos_inf, 1);
    EXPECT_EQ(stats.nan, 0);
  }
}

TEST_P(CudaChunk, IndicesCountFromTheTensorsStartInEveryChunk) {
  const std::int64_t numel = 3 * cuda::kChunkElements + 12345;
  std::mt19937_64 random(3);
  RawTensor tensor(GetParam(), numel);
  tensor.fill_with_ordinary_numbers(random);
  expect_host_scan_as_reference(tensor.view());
  const std::int64_t place = 2 * cuda::kChunkElements + 99;
  tensor.set(place, named_bits(GetParam()).negative_nan);
  tensor.set(numel - 1, named_bits(GetParam()).quiet_nan);
  EXPECT_EQ(scan_on_host({tensor.view()})[0].first_bad, place);
  expect_host_scan_as_reference(tensor.view());
}

TEST_P(CudaChunk, AStridedViewIsReadInItsLogicalOrder) {
  std::mt19937_64 random(4);
  RawTensor storage(GetParam(), 6000);
  storage.fill_with_any_bits(random);
  TensorView view = storage.view();
  const std::vector<std::pair<std::vector<std::int64_t>, std::vector<std::int64_t>>> layouts = {
      {{50, 100}, {1, 50}},                                        // transposed
      {{40, 99}, {100, 1}},                                        // narrowed, odd row length
      {{3001 / 7}, {7}},                                           // every seventh
      {{300, 20}, {0, 1}},                                         // broadcast
      {{4, 5, 6}, {2, 30, 9}},                                     // overlapping
      {{2, 3, 2, 3, 2, 3, 2, 3}, {1, 7, 2, 31, 500, 11, 3, 200}},  // eight dimensions
      {{7, 1, 9}, {9, 1000, 1}},                                   // contiguous after all
  };
  for (const auto& [sizes, strides] : layouts) {
    view.sizes = sizes;
    view.strides = strides;
    view.numel = 1;
    for (const std::int64_t size : sizes) view.numel *= size;
    expect_host_scan_as_reference(view);
  }
}

TEST_P(CudaChunk, ElementsThatAreAllNegativeOrAllZeroHaveTheRightRange) {
  const NamedBits bits = named_bits(GetParam());
  const std::uint64_t sign = std::uint64_t{1} << (8 * size_of(GetParam()) - 1);
  RawTensor tensor(GetParam(), 5000);
  tensor.fill(bits.minus_two);
  TensorStats stats = scan_on_host({tensor.view()})[0];
  EXPECT_EQ(stats.finite_min, -2.0);
  EXPECT_EQ(stats.finite_max, -2.0);
  EXPECT_EQ(stats.absmin, 2.0);
  EXPECT_EQ(stats.absmax, 2.0);
  EXPECT_EQ(stats.sum_of_squares, 20000.0);
  tensor.fill(sign);
  stats = scan_on_host({tensor.view()})[0];
  EXPECT_EQ(stats.zeros, 5000);
  EXPECT_EQ(stats.finite_min, 0.0);
  EXPECT_FALSE(std::signbit(stats.finite_min));
  EXPECT_FALSE(std::signbit(stats.finite_max));
  EXPECT_EQ(stats.sum_of_squares, 0.0);
  tensor.fill(bits.quiet_nan);
  stats = scan_on_host({tensor.view()})[0];
  EXPECT_EQ(stats.nan, 5000);
  EXPECT_EQ(stats.first_bad, 0);
  EXPECT_FALSE(stats.has_finite());
  EXPECT_EQ(stats.absmax, 0.0);
  EXPECT_EQ(stats.absmin, std::numeric_limits<double>::infinity());
}

TEST_P(CudaChunk, AnEmptyTensorBetweenOthersHasEmptyStats) {
  RawTensor tensor(GetParam(), 100);
  tensor.fill(named_bits(GetParam()).one);
  TensorView empty;
  empty.dtype = GetParam();
  const std::vector<TensorStats> stats = scan_on_host({tensor.view(), empty, tensor.view()});
  ASSERT_EQ(stats.size(), 3u);
  EXPECT_EQ(stats[1], TensorStats{});
  EXPECT_EQ(stats[0].sum_of_squares, 100.0);
  EXPECT_EQ(stats[2], stats[0]);
}

TEST(CudaChunkSquares, LargeAndSmallBfloat16AndFloat32NeitherOverflowNorVanish) {
  for (const double value : {1e25, 1e-25, 3e38, 1e-38}) {
    for (const DType dtype : {DType::float32, DType::bfloat16}) {
      const auto as_float = static_cast<float>(value);
      std::uint32_t bits = 0;
      std::memcpy(&bits, &as_float, sizeof(bits));
      RawTensor tensor(dtype, 30000);
      tensor.fill(dtype == DType::float32 ? bits : bits >> 16);
      double exact = as_float;
      if (dtype == DType::bfloat16) {
        const std::uint32_t truncated = bits & 0xffff0000u;
        float kept = 0;
        std::memcpy(&kept, &truncated, sizeof(kept));
        exact = kept;
      }
      const TensorStats stats = scan_on_host({tensor.view()})[0];
      EXPECT_NEAR(stats.sum_of_squares / (30000 * exact * exact), 1.0, 1e-10) << value;
      EXPECT_TRUE(stats.is_finite());
    }
  }
}

}  // namespace
}  // namespace nanlocator::testing
