// The CUDA scan's arithmetic, run by the host compiler: exhaustive over the bit patterns of the 16-
// and 8-bit formats in every position of a word.
#include "scan/cuda_word.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "scan/cuda_test_tensors.hpp"
#include "scan/reference_scan.hpp"

namespace nanlocator::cuda {
namespace {

/// One of the six dtypes as the parameter of a typed test.
template <DType value>
struct Of {
  static constexpr DType dtype = value;
};
using NarrowTypes = ::testing::Types<Of<DType::float16>, Of<DType::bfloat16>,
                                     Of<DType::float8_e4m3fn>, Of<DType::float8_e5m2>>;
using AllTypes =
    ::testing::Types<Of<DType::float64>, Of<DType::float32>, Of<DType::float16>,
                     Of<DType::bfloat16>, Of<DType::float8_e4m3fn>, Of<DType::float8_e5m2>>;

/// The value of raw bits, by the tests' own decoder.
template <DType dtype>
double decode(std::uint64_t bits) {
  return testing::decode(bits, dtype);
}

template <DType dtype>
std::uint64_t element_of(Unit<dtype> unit, std::uint32_t position) {
  const std::uint64_t mask = ~std::uint64_t{0} >> (64 - kElementBits<dtype>);
  return (static_cast<std::uint64_t>(unit) >> (position * kElementBits<dtype>)) & mask;
}

template <DType dtype>
Unit<dtype> with_element(Unit<dtype> unit, std::uint32_t position, std::uint64_t bits) {
  const std::uint64_t mask = ~std::uint64_t{0} >> (64 - kElementBits<dtype>);
  const std::uint64_t cleared = unit & ~(mask << (position * kElementBits<dtype>));
  return static_cast<Unit<dtype>>(cleared | (bits & mask) << (position * kElementBits<dtype>));
}

/// Minimum, maximum and smallest magnitude of finite values, decoded and compared as doubles.
struct Range {
  double minimum = INFINITY;
  double maximum = -INFINITY;
  double absmin = INFINITY;
};

template <DType dtype>
Range range_of(const std::vector<Unit<dtype>>& units) {
  Range range;
  for (const Unit<dtype> unit : units) {
    for (std::uint32_t k = 0; k < kElementsPerUnit<dtype>; ++k) {
      const double value = decode<dtype>(element_of<dtype>(unit, k));
      range.minimum = std::min(range.minimum, value);
      range.maximum = std::max(range.maximum, value);
      range.absmin = std::min(range.absmin, std::abs(value));
    }
  }
  return range;
}

/// The range that raw extremes describe, by the rule in the comment of `Extremes`.
template <DType dtype>
Range range_of(const Extremes<Unit<dtype>>& extremes) {
  Range range;
  range.absmin = decode<dtype>(extremes.magnitude_min);
  const bool any_negative = (extremes.unsigned_max >> (kElementBits<dtype> - 1)) != 0;
  const bool any_non_negative = extremes.signed_max >= 0;
  range.minimum = any_negative ? decode<dtype>(extremes.unsigned_max) : range.absmin;
  range.maximum = any_non_negative ? decode<dtype>(extremes.signed_max) : -range.absmin;
  return range;
}

template <DType dtype, class Scan>
void expect_the_range_of(const std::vector<Unit<dtype>>& units) {
  Scan scan;
  for (const Unit<dtype> unit : units) scan.add(unit);
  const Range found = range_of<dtype>(scan.settle());
  const Range expected = range_of<dtype>(units);
  ASSERT_EQ(found.minimum, expected.minimum) << std::hex << units[0];
  ASSERT_EQ(found.maximum, expected.maximum) << std::hex << units[0];
  ASSERT_EQ(found.absmin, expected.absmin) << std::hex << units[0];
}

/// Tests every finite pattern of a narrow format in every position of the first of two words whose
/// other elements are random finite ones, all positive, all negative or mixed.
template <DType dtype, class Scan>
void expect_the_range_of_every_pattern() {
  std::mt19937_64 random(1);
  const std::uint64_t sign = std::uint64_t{1} << (kElementBits<dtype> - 1);
  const auto random_units = [&](int kind) {
    std::vector<Unit<dtype>> units(2, 0);
    for (auto& unit : units) {
      for (std::uint32_t k = 0; k < kElementsPerUnit<dtype>; ++k) {
        std::uint64_t bits = 0;
        do {
          bits = random();
          if (kind == 0) bits &= ~sign;
          if (kind == 1) bits |= sign;
        } while (!std::isfinite(decode<dtype>(bits & (2 * sign - 1))));
        unit = with_element<dtype>(unit, k, bits);
      }
    }
    return units;
  };
  for (std::uint64_t bits = 0; bits < 2 * sign; ++bits) {
    if (!std::isfinite(decode<dtype>(bits))) continue;
    for (std::uint32_t k = 0; k < kElementsPerUnit<dtype>; ++k) {
      for (int kind = 0; kind < 3; ++kind) {
        std::vector<Unit<dtype>> units = random_units(kind);
        units[0] = with_element<dtype>(units[0], k, bits);
        ASSERT_NO_FATAL_FAILURE((expect_the_range_of<dtype, Scan>(units)));
      }
    }
  }
}

template <class T>
class CudaWordNarrow : public ::testing::Test {};
TYPED_TEST_SUITE(CudaWordNarrow, NarrowTypes);

template <class T>
class CudaWord : public ::testing::Test {};
TYPED_TEST_SUITE(CudaWord, AllTypes);

TYPED_TEST(CudaWordNarrow, TheSplitScanFindsTheRangeForEveryPatternInEveryPosition) {
  expect_the_range_of_every_pattern<TypeParam::dtype, SplitScan<TypeParam::dtype>>();
}

TYPED_TEST(CudaWordNarrow, ThePackedScanFindsTheRangeForEveryPatternInEveryPosition) {
  expect_the_range_of_every_pattern<TypeParam::dtype, PackedScan<TypeParam::dtype>>();
}

TYPED_TEST(CudaWord, TheSplitScanFindsTheRangeOfRandomFiniteNumbers) {
  constexpr DType dtype = TypeParam::dtype;
  std::mt19937_64 random(2);
  for (int repeat = 0; repeat < 2000; ++repeat) {
    std::vector<Unit<dtype>> units(1 + random() % 4);
    for (auto& unit : units) {
      for (std::uint32_t k = 0; k < kElementsPerUnit<dtype>; ++k) {
        do {
          unit = with_element<dtype>(unit, k, random());
        } while (!std::isfinite(decode<dtype>(element_of<dtype>(unit, k))));
      }
    }
    ASSERT_NO_FATAL_FAILURE((expect_the_range_of<dtype, SplitScan<dtype>>(units)));
  }
}

/// True if the scan of one unit of ordinary elements with `bits` in position k asks for care.
template <DType dtype, class Scan>
bool asks_for_care(std::uint64_t bits, std::uint32_t position) {
  Unit<dtype> unit = 0;
  for (std::uint32_t k = 0; k < kElementsPerUnit<dtype>; ++k) {
    unit = with_element<dtype>(unit, k, testing::named_bits(dtype).one);
  }
  Scan scan;
  scan.add(unit);
  scan.add(with_element<dtype>(unit, position, bits));
  return needs_care<dtype>(scan.settle());
}

TYPED_TEST(CudaWordNarrow, NeedsCareExactlyForPatternsThatAreNotFiniteOrTooLargeToSquare) {
  constexpr DType dtype = TypeParam::dtype;
  for (std::uint64_t bits = 0; bits < std::uint64_t{1} << kElementBits<dtype>; ++bits) {
    const double value = decode<dtype>(bits);
    const bool too_large = dtype == DType::bfloat16 && std::abs(value) >= 0x1p60;
    const bool expected = !std::isfinite(value) || too_large;
    for (std::uint32_t k = 0; k < kElementsPerUnit<dtype>; ++k) {
      ASSERT_EQ((asks_for_care<dtype, SplitScan<dtype>>(bits, k)), expected) << std::hex << bits;
      ASSERT_EQ((asks_for_care<dtype, PackedScan<dtype>>(bits, k)), expected) << std::hex << bits;
    }
  }
}

TYPED_TEST(CudaWord, NeedsCareAtTheEdgesOfTheFiniteRange) {
  constexpr DType dtype = TypeParam::dtype;
  const testing::NamedBits bits = testing::named_bits(dtype);
  const std::uint64_t sign = std::uint64_t{1} << (kElementBits<dtype> - 1);
  for (const std::uint64_t bad : {bits.quiet_nan, bits.negative_nan, bits.largest + 1,
                                  (bits.largest + 1) | sign, (2 * sign - 1), sign - 1}) {
    EXPECT_TRUE((asks_for_care<dtype, SplitScan<dtype>>(bad, 0))) << std::hex << bad;
  }
  if (dtype == DType::bfloat16) return;
  for (const std::uint64_t good : {bits.largest, bits.largest | sign, std::uint64_t{0}, sign}) {
    EXPECT_FALSE((asks_for_care<dtype, SplitScan<dtype>>(good, 0))) << std::hex << good;
  }
}

TEST(CudaWordBfloat16, NeedsCareIfAllSquaresAreTooSmallForFp32) {
  constexpr DType dtype = DType::bfloat16;
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const double value = std::abs(decode<dtype>(bits));
    const bool tiny = value > 0 && value < 0x1p-55;
    if (!std::isfinite(value) || value >= 0x1p60) continue;
    SplitScan<dtype> split;
    PackedScan<dtype> packed;
    for (const std::uint32_t unit : {bits, bits << 16, 0x80000000u}) {  // with zeros of both signs
      split.add(unit);
      packed.add(unit);
    }
    ASSERT_EQ(needs_care<dtype>(split.settle()), tiny) << std::hex << bits;
    ASSERT_EQ(needs_care<dtype>(packed.settle()), tiny) << std::hex << bits;
  }
}

TYPED_TEST(CudaWordNarrow, ZerosOfBothSignsAreCountedForEveryPatternInEveryPosition) {
  constexpr DType dtype = TypeParam::dtype;
  std::mt19937_64 random(3);
  for (std::uint64_t bits = 0; bits < std::uint64_t{1} << kElementBits<dtype>; ++bits) {
    for (std::uint32_t k = 0; k < kElementsPerUnit<dtype>; ++k) {
      auto unit = static_cast<std::uint32_t>(random());
      if (random() % 2 == 0) unit &= 0x80ff0000u;  // some neighbours are zeros
      unit = with_element<dtype>(unit, k, bits);
      std::uint32_t expected = 0;
      for (std::uint32_t i = 0; i < kElementsPerUnit<dtype>; ++i) {
        expected += decode<dtype>(element_of<dtype>(unit, i)) == 0 ? 1 : 0;
      }
      ASSERT_EQ(count_zeros<dtype>(unit), expected) << std::hex << unit;
    }
  }
}

TEST(CudaWordWide, ZerosOfBothSignsAreCounted) {
  EXPECT_EQ(count_zeros<DType::float32>(0u), 1u);
  EXPECT_EQ(count_zeros<DType::float32>(0x80000000u), 1u);
  EXPECT_EQ(count_zeros<DType::float32>(1u), 0u);
  EXPECT_EQ(count_zeros<DType::float32>(0x40000000u), 0u);
  EXPECT_EQ(count_zeros<DType::float64>(0u), 1u);
  EXPECT_EQ(count_zeros<DType::float64>(0x8000000000000000u), 1u);
  EXPECT_EQ(count_zeros<DType::float64>(0x0000000100000000u), 0u);
}

TYPED_TEST(CudaWordNarrow, TheSquareOfEveryPatternThatNeedsNoCareIsExact) {
  constexpr DType dtype = TypeParam::dtype;
  for (std::uint64_t bits = 0; bits < std::uint64_t{1} << kElementBits<dtype>; ++bits) {
    const double value = decode<dtype>(bits);
    if (!std::isfinite(value)) continue;
    if (dtype == DType::bfloat16 && (std::abs(value) >= 0x1p60 || std::abs(value) < 0x1p-55)) {
      continue;
    }
    for (std::uint32_t k = 0; k < kElementsPerUnit<dtype>; ++k) {
      const double square =
          add_squares<dtype>(with_element<dtype>(0, k, bits), 0.0f) * kSquareUnit<dtype>;
      ASSERT_EQ(square, value * value) << std::hex << bits << " in position " << k;
    }
  }
}

TYPED_TEST(CudaWordNarrow, AVectorOfTheLargestElementsHasAFiniteSumOfSquares) {
  constexpr DType dtype = TypeParam::dtype;
  double largest = 0;
  for (std::uint64_t bits = 0; bits < std::uint64_t{1} << kElementBits<dtype>; ++bits) {
    const double value = decode<dtype>(bits);
    if (std::isfinite(value) && !asks_for_care<dtype, SplitScan<dtype>>(bits, 0)) {
      largest = std::max(largest, value);
    }
  }
  ASSERT_GT(largest, 0);
  float sum = 0;
  for (int unit = 0; unit < 4; ++unit) {
    for (std::uint64_t bits = 0; bits < std::uint64_t{1} << kElementBits<dtype>; ++bits) {
      if (decode<dtype>(bits) != largest) continue;
      Unit<dtype> all = 0;
      for (std::uint32_t k = 0; k < kElementsPerUnit<dtype>; ++k) {
        all = with_element<dtype>(all, k, bits);
      }
      sum = add_squares<dtype>(all, sum);
    }
  }
  const double expected = 4 * kElementsPerUnit<dtype> * largest * largest;
  EXPECT_NEAR(sum * kSquareUnit<dtype> / expected, 1.0, 1e-6);
}

TEST(CudaWordWide, SquaresOfFloat32AreExactInDoubleAndDoNotOverflow) {
  std::mt19937_64 random(4);
  for (int repeat = 0; repeat < 100000; ++repeat) {
    const auto bits = static_cast<std::uint32_t>(random());
    const double value = decode<DType::float32>(bits);
    if (!std::isfinite(value)) continue;
    ASSERT_EQ(add_squares<DType::float32>(bits, 0.0), value * value) << std::hex << bits;
  }
  const double largest = decode<DType::float32>(0x7f7fffff);
  EXPECT_EQ(add_squares<DType::float32>(0x7f7fffffu, 1.0), largest * largest + 1.0);
}

TYPED_TEST(CudaWord, AVectorAddsTheFingerprintOfItsFourWords) {
  constexpr DType dtype = TypeParam::dtype;
  std::mt19937_64 random(5);
  for (int repeat = 0; repeat < 1000; ++repeat) {
    Vector vector;
    for (std::uint32_t& word : vector.words) word = static_cast<std::uint32_t>(random());
    const std::uint64_t first_unit = random();
    const auto first_word = static_cast<std::uint32_t>(first_unit * (sizeof(Unit<dtype>) / 4));
    std::uint32_t s0 = 0;
    std::uint32_t s1 = 0;
    for (std::uint32_t j = 0; j < 4; ++j) {
      s0 += mix_word(vector.words[j]);
      s1 += (first_word + j) * mix_word(vector.words[j]);
    }
    ChunkPartial<Unit<dtype>> by_vector;
    add_vector_to_fingerprint(vector, first_word, by_vector);
    EXPECT_EQ(by_vector.s0, s0);
    EXPECT_EQ(by_vector.s1, s1);
    ChunkPartial<Unit<dtype>> by_unit;
    for (std::uint32_t k = 0; k < kUnitsPerVector<dtype>; ++k) {
      add_unit_to_fingerprint<dtype>(unit_of<dtype>(vector, k), first_unit + k, by_unit);
    }
    EXPECT_EQ(by_unit.s0, s0);
    EXPECT_EQ(by_unit.s1, s1);
  }
}

TYPED_TEST(CudaWordNarrow, TheCarefulScanClassifiesEveryPattern) {
  constexpr DType dtype = TypeParam::dtype;
  for (std::uint64_t bits = 0; bits < std::uint64_t{1} << kElementBits<dtype>; ++bits) {
    const double value = decode<dtype>(bits);
    ChunkPartial<std::uint32_t> partial;
    add_element<dtype>(static_cast<ElementWord<dtype>>(bits), 7, partial);
    ASSERT_EQ(partial.nan, std::isnan(value) ? 1u : 0u) << std::hex << bits;
    ASSERT_EQ(partial.pos_inf, value == INFINITY ? 1u : 0u) << std::hex << bits;
    ASSERT_EQ(partial.neg_inf, value == -INFINITY ? 1u : 0u) << std::hex << bits;
    ASSERT_EQ(partial.zeros, value == 0 ? 1u : 0u) << std::hex << bits;
    ASSERT_EQ(partial.first_bad, std::isfinite(value) ? kNoIndex : 7u) << std::hex << bits;
    if (std::isfinite(value)) {
      const Range range = range_of<dtype>(partial.extremes);
      ASSERT_EQ(range.minimum, value);
      ASSERT_EQ(range.maximum, value);
      ASSERT_EQ(range.absmin, std::abs(value));
      ASSERT_EQ(partial.squares, value * value);
    } else {
      ASSERT_EQ(partial.extremes.magnitude_min, 0xffffffffu) << "a bad element is in no extreme";
      ASSERT_EQ(partial.squares, 0.0);
    }
  }
}

TYPED_TEST(CudaWord, TheCarefulScanOfAPartOfAUnitLeavesTheRestAlone) {
  constexpr DType dtype = TypeParam::dtype;
  Unit<dtype> unit = 0;
  for (std::uint32_t k = 0; k < kElementsPerUnit<dtype>; ++k) {
    unit = with_element<dtype>(unit, k, testing::named_bits(dtype).quiet_nan);
  }
  for (std::uint32_t count = 1; count <= kElementsPerUnit<dtype>; ++count) {
    ChunkPartial<Unit<dtype>> partial;
    add_unit_carefully<dtype>(unit, count, 100, partial);
    EXPECT_EQ(partial.nan, count);
    EXPECT_EQ(partial.first_bad, 100u);
  }
}

TEST(CudaWordPartials, MergingKeepsTheFirstBadIndexAndWideningAddsTheChunksStart) {
  ChunkPartial<std::uint32_t> clean;
  ChunkPartial<std::uint32_t> bad;
  bad.nan = 1;
  bad.first_bad = 5;
  ChunkPartial<std::uint32_t> later = bad;
  later.first_bad = 9;
  clean.merge(later);
  clean.merge(bad);
  EXPECT_EQ(clean.nan, 2u);
  EXPECT_EQ(clean.first_bad, 5u);
  const std::uint64_t start = std::uint64_t{1} << 33;
  EXPECT_EQ(widen(clean, start).first_bad, start + 5);
  EXPECT_EQ(widen(ChunkPartial<std::uint32_t>{}, start).first_bad, ~std::uint64_t{0});
  SlotPartial slot;  // an empty one has no bad element, not a bad element 0
  slot.merge(widen(clean, start));
  EXPECT_EQ(slot.first_bad, start + 5);
}

}  // namespace
}  // namespace nanlocator::cuda
