#include "nanlocator/scan/element_bits.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

#include "scan/reference_scan.hpp"

namespace nanlocator {
namespace {

using testing::decode;

template <DType dtype>
void expect_agreement_with_the_definition(ElementWord<dtype> bits) {
  const double expected = decode(bits, dtype);
  const double found = value_as_double<dtype>(bits);
  ElementClass expected_class = ElementClass::finite;
  if (std::isnan(expected)) {
    expected_class = ElementClass::nan;
    ASSERT_TRUE(std::isnan(found)) << std::hex << +bits;
  } else {
    if (std::isinf(expected)) {
      expected_class = expected > 0 ? ElementClass::pos_inf : ElementClass::neg_inf;
    }
    ASSERT_EQ(std::bit_cast<std::uint64_t>(found), std::bit_cast<std::uint64_t>(expected))
        << std::hex << +bits;
  }
  ASSERT_EQ(classify<dtype>(bits), expected_class) << std::hex << +bits;
  ASSERT_EQ(is_finite<dtype>(bits), std::isfinite(expected)) << std::hex << +bits;
  ASSERT_EQ(is_zero<dtype>(bits), expected == 0) << std::hex << +bits;
  if (!std::isnan(expected)) {
    ASSERT_EQ(is_negative<dtype>(bits), std::signbit(expected));
  }
}

template <DType dtype>
void expect_agreement_for_all_bits() {
  constexpr std::uint32_t kCount = 1u << (8 * sizeof(ElementWord<dtype>));
  for (std::uint32_t bits = 0; bits < kCount; ++bits) {
    expect_agreement_with_the_definition<dtype>(static_cast<ElementWord<dtype>>(bits));
    if (::testing::Test::HasFatalFailure()) return;
  }
}

TEST(ElementBits, AgreesWithTheDefinitionForAllFloat16Values) {
  expect_agreement_for_all_bits<DType::float16>();
}
TEST(ElementBits, AgreesWithTheDefinitionForAllBfloat16Values) {
  expect_agreement_for_all_bits<DType::bfloat16>();
}
TEST(ElementBits, AgreesWithTheDefinitionForAllFloat8E4m3fnValues) {
  expect_agreement_for_all_bits<DType::float8_e4m3fn>();
}
TEST(ElementBits, AgreesWithTheDefinitionForAllFloat8E5m2Values) {
  expect_agreement_for_all_bits<DType::float8_e5m2>();
}

TEST(ElementBits, AgreesWithTheMachineForFloat32AndFloat64) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 200000; ++i) {
    const std::uint64_t bits = random();
    expect_agreement_with_the_definition<DType::float64>(bits);
    expect_agreement_with_the_definition<DType::float32>(static_cast<std::uint32_t>(bits));
    // Subnormals, which random bits hardly ever hit.
    expect_agreement_with_the_definition<DType::float64>(bits & 0x800fffffffffffffu);
    expect_agreement_with_the_definition<DType::float32>(static_cast<std::uint32_t>(bits) &
                                                         0x807fffffu);
    if (HasFatalFailure()) return;
  }
  for (const float value :
       {0.0f, -0.0f, std::numeric_limits<float>::infinity(),
        -std::numeric_limits<float>::infinity(), std::numeric_limits<float>::max(),
        std::numeric_limits<float>::min(), std::numeric_limits<float>::quiet_NaN()}) {
    expect_agreement_with_the_definition<DType::float32>(std::bit_cast<std::uint32_t>(value));
    expect_agreement_with_the_definition<DType::float64>(
        std::bit_cast<std::uint64_t>(static_cast<double>(value)));
  }
}

TEST(ElementBits, KnowsThePublishedLimitsOfFloat8) {
  EXPECT_EQ(value_as_double<DType::float8_e4m3fn>(0x7e), 448.0);  // OFP8, table 1
  EXPECT_EQ(value_as_double<DType::float8_e4m3fn>(0x01), 0x1p-9);
  EXPECT_EQ(classify<DType::float8_e4m3fn>(0x7f), ElementClass::nan);
  EXPECT_EQ(classify<DType::float8_e4m3fn>(0xff), ElementClass::nan);
  EXPECT_EQ(value_as_double<DType::float8_e5m2>(0x7b), 57344.0);
  EXPECT_EQ(value_as_double<DType::float8_e5m2>(0x01), 0x1p-16);
  EXPECT_EQ(classify<DType::float8_e5m2>(0x7c), ElementClass::pos_inf);
  EXPECT_EQ(classify<DType::float8_e5m2>(0xfc), ElementClass::neg_inf);
  EXPECT_EQ(classify<DType::float8_e5m2>(0x7d), ElementClass::nan);
}

static_assert(value_as_double<DType::float16>(0x3c00) == 1.0, "usable in constant expressions");

}  // namespace
}  // namespace nanlocator
