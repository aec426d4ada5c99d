#include "netcheck/compute_check.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <set>
#include <string>

#include "nanlocator/error.hpp"
#include "replay/torch_versions.hpp"

namespace nanlocator::netcheck {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// Applies `change` to element `index` of one result.
AfterOperator changed(const std::string& name, const std::string& dtype, int in_repeat,
                      std::int64_t index, double (*change)(double)) {
  return [=](const std::string& now, const std::string& now_dtype, int repeat,
             const at::Tensor& result) {
    if (now != name || now_dtype != dtype || repeat != in_repeat) return;
    auto element = result.flatten()[index];
    element.fill_(change(element.item<double>()));
  };
}

TEST(ComputeCheck, FindsNothingOnThisMachineAndTheSameFingerprintsTwice) {
  const auto first = check_compute(at::kCPU);
  const auto second = check_compute(at::kCPU);
  EXPECT_THAT(first.failures, ElementsAre());
  ASSERT_EQ(first.operators.size(), 9u * 4u);
  std::set<std::uint64_t> distinct;
  for (std::size_t i = 0; i < first.operators.size(); ++i) {
    EXPECT_EQ(first.operators[i].fingerprint, second.operators[i].fingerprint)
        << first.operators[i].name;
    EXPECT_LE(first.operators[i].worst, 1) << first.operators[i].name;
    distinct.insert(first.operators[i].fingerprint);
  }
  EXPECT_EQ(distinct.size(), first.operators.size());
}

TEST(ComputeCheck, ItsBoundsAreNarrowEnoughToShowTheFormatsErrors) {
  // The last rounding alone uses up to one unit roundoff: half a bound is reached somewhere in
  // every operator whose bound is little more than that rounding.
  for (const auto& checked : check_compute(at::kCPU).operators) {
    if (checked.dtype != "bfloat16" || checked.name == "max") continue;
    EXPECT_GT(checked.worst, 0.4) << checked.name;
  }
}

TEST(ComputeCheck, NamesTheOperatorTheFormatTheElementAndTheBound) {
  const auto outcome = check_compute(
      at::kCPU, changed("gemm", "float32", 0, 2 * 128 + 5, [](double x) { return x + 0.01; }));
  // The repetitions are right, so the first result also differs from them.
  ASSERT_EQ(outcome.failures.size(), 2u);
  EXPECT_THAT(outcome.failures[0],
              AllOf(HasSubstr("gemm in float32: 1 of 12288 elements are wrong, the first at "
                              "[0, 2, 5]"),
                    HasSubstr("off by 0.0"), HasSubstr("is allowed")));
  EXPECT_THAT(outcome.failures[1],
              HasSubstr("differs from its first result in re-run 1 at [0, 2, 5]"));
}

TEST(ComputeCheck, FindsARepetitionThatDiffersByOneUnitInTheLastPlace) {
  const auto outcome = check_compute(
      at::kCPU, changed("tanh", "float32", 3, 17, [](double x) { return x * (1 + 0x1p-23); }));
  ASSERT_EQ(outcome.failures.size(), 1u);
  EXPECT_THAT(outcome.failures[0],
              HasSubstr("tanh in float32: differs from its first result in re-run 3 at [17]"));
}

TEST(ComputeCheck, FindsAWrongElementInEachOperatorAndFormat) {
  std::set<std::pair<std::string, std::string>> planted;
  const auto outcome = check_compute(
      at::kCPU,
      [&](const std::string& name, const std::string& dtype, int, const at::Tensor& result) {
        planted.emplace(name, dtype);
        auto element = result.flatten()[result.numel() - 1];
        element.fill_(element.item<double>() *
                      1.25);  // in all repetitions: only the reference shows it
      });
  EXPECT_EQ(planted.size(), 9u * 4u);
  EXPECT_EQ(outcome.failures.size(), planted.size());
}

TEST(ComputeCheck, ANanIsWrong) {
  const auto outcome = check_compute(at::kCPU, changed("max", "float16", 0, 3, [](double) {
                                       return std::numeric_limits<double>::quiet_NaN();
                                     }));
  ASSERT_FALSE(outcome.is_right());
  EXPECT_THAT(outcome.failures[0], AllOf(HasSubstr("max in float16: 1 of 64 elements are wrong"),
                                         HasSubstr("is NaN instead of")));
}

TEST(ComputeCheck, TurnsReducedPrecisionOffAndRestoresIt) {
  constexpr auto kUse = Float32Use::mkldnn_matmul;
  const auto before = float32_precision(kUse);
  set_float32_precision(kUse, "bf16");
  std::string meanwhile;
  const auto outcome =
      check_compute(at::kCPU, [&](const std::string&, const std::string&, int, const at::Tensor&) {
        meanwhile = float32_precision(kUse);
      });
  const auto after = float32_precision(kUse);
  set_float32_precision(kUse, before);
  EXPECT_EQ(meanwhile, "ieee");
  EXPECT_EQ(after, "bf16");
  EXPECT_TRUE(outcome.is_right());
}

TEST(ComputeCheck, AnErrorOfTheDeviceIsTheLastFailure) {
  const auto outcome = check_compute(
      at::kCPU, [](const std::string& name, const std::string&, int, const at::Tensor&) {
        if (name == "norm") throw Error("an illegal memory access was encountered\nand more");
      });
  EXPECT_THAT(outcome.failures,
              ElementsAre("norm in float32 failed: an illegal memory access was encountered"));
  EXPECT_EQ(outcome.operators.size(), 3u * 4u);
}

TEST(ComputeCheck, RefusesAnUnsupportedDevice) {
  EXPECT_THROW((void)check_compute(at::Device(at::kMeta)), UsageError);
}

}  // namespace
}  // namespace nanlocator::netcheck
