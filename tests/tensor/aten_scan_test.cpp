#include "tensor/aten_scan.hpp"

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include "gradients/tensors.hpp"
#include "nanlocator/tensor/scan_tensor.hpp"
#include "tensor/device_slots.hpp"

namespace nanlocator::testing {
namespace {

// The two scans share only the fingerprint's arithmetic. They add squares in different orders, and
// the kernels use fp32 for narrow elements (eight at a time, then fp64).
void expect_equal_stats(const at::Tensor& tensor) {
  auto with_aten = read_stats(scan_with_aten(tensor));
  const auto with_kernels = scan_tensors({tensor}).at(0);
  const double tolerance = tensor.element_size() < 4 ? 1e-7 : 1e-12;
  EXPECT_NEAR(with_aten.sum_of_squares, with_kernels.sum_of_squares,
              tolerance * with_kernels.sum_of_squares);
  with_aten.sum_of_squares = with_kernels.sum_of_squares;
  EXPECT_EQ(with_aten, with_kernels);
  EXPECT_EQ(with_aten.first_bad, with_kernels.first_bad);
  EXPECT_EQ(with_aten.fingerprint, with_kernels.fingerprint);
}

class WarningCounter : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override {
    ++count;
    EXPECT_NE(warning.msg().find("without its CUDA kernels"), std::string::npos);
  }
  int count = 0;
};

TEST(AtenScanOfCudaTensors, WarnsOnceInABuildWithoutKernels) {
  WarningCounter warnings;
  const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
  warn_of_slow_path(at::kCPU);
  EXPECT_EQ(warnings.count, 0);
  for (int i = 0; i < 3; ++i) warn_of_slow_path(at::kCUDA);
  EXPECT_EQ(warnings.count, has_cuda_kernels() ? 0 : 1);
}

class AtenScan : public ::testing::TestWithParam<at::ScalarType> {};

TEST_P(AtenScan, EqualsTheKernelsOnEveryLengthOfALastWord) {
  for (const std::int64_t numel : {1, 2, 3, 4, 5, 63, 1001}) {
    auto tensor = at::linspace(-3, 3, numel, at::kDouble).to(GetParam());
    expect_equal_stats(tensor);
    tensor[numel / 2] = kNan;
    expect_equal_stats(tensor);
  }
}

TEST_P(AtenScan, EqualsTheKernelsOverSeveralChunks) {
  const std::int64_t numel = (std::int64_t{1} << 20) * 2 + 77;
  auto tensor = at::linspace(-5, 5, numel, at::kDouble).to(GetParam());
  tensor[numel - 1] = kNan;
  tensor[(std::int64_t{1} << 20) + 3] = kNan;
  expect_equal_stats(tensor);
}

TEST_P(AtenScan, EqualsTheKernelsOnViews) {
  auto base = at::linspace(-5, 5, 7 * 9 * 4, at::kDouble).to(GetParam()).view({7, 9, 4});
  base[2][3][1] = kNan;
  expect_equal_stats(base.permute({2, 0, 1}));
  expect_equal_stats(base.select(2, 1));
  expect_equal_stats(base.view(-1).narrow(0, 1, 101));  // begins between two 32-bit words
}

INSTANTIATE_TEST_SUITE_P(Dtypes, AtenScan,
                         ::testing::Values(at::kDouble, at::kFloat, at::kHalf, at::kBFloat16,
                                           at::kFloat8_e4m3fn, at::kFloat8_e5m2),
                         [](const auto& type) { return test_name(type.param); });

TEST(AtenScan, EqualsTheKernelsOnInfinitiesZerosAndNothingFinite) {
  auto mixed = at::linspace(-1, 1, 100);
  mixed[3] = kInfinity;
  mixed[4] = -kInfinity;
  mixed[5] = 0.0;
  mixed[6] = -0.0;
  expect_equal_stats(mixed);
  expect_equal_stats(at::full({5}, kInfinity));
  expect_equal_stats(at::ones({0}));
  expect_equal_stats(at::full({}, 4.0));
}

TEST(AtenSlots, FillTheirSlotsAndFlagAsTheKernelsDo) {
  auto bad = at::ones({9});
  bad[4] = kNan;
  const std::vector<at::Tensor> tensors{at::ones({3}), bad, at::ones({0})};
  for (const auto& slots : {make_aten_slots(at::kCPU), make_device_slots(at::kCPU, 1)}) {
    SlotBatch batch;
    slots->clear_flag();
    slots->prepare(batch, tensors);
    EXPECT_EQ(slots->flag().item<int>(), 0);
    slots->scan(batch, tensors);
    EXPECT_EQ(slots->flag().item<int>(), 1);
    const auto stats = slots->read();
    EXPECT_EQ(stats.at(batch.first_slot).numel, 3);
    EXPECT_EQ(stats.at(batch.first_slot + 1).first_bad, 4);
    EXPECT_EQ(stats.at(batch.first_slot + 2).numel, 0);
    slots->clear_flag();
    EXPECT_EQ(slots->flag().item<int>(), 0);
  }
}

}  // namespace
}  // namespace nanlocator::testing
