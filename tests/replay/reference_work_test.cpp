#include "replay/reference_work.hpp"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <vector>

#include "support/counting_allocator.hpp"

namespace nanlocator {
namespace {

using Tensors = std::vector<at::Tensor>;

const KernelReference kAttention{"attention", [](const Tensors& in) {
                                   const at::Tensor scores =
                                       at::matmul(in[0], in[1].transpose(-1, -2)) * 0.125;
                                   return Tensors{at::matmul(at::softmax(scores, -1), in[2])};
                                 }};

TEST(ReferenceWork, OfAttentionIncludesItsScores) {
  const double heads = 2 * 4, rows = 512, columns = 1024, width = 64;
  const Tensors arguments{at::zeros({2, 4, 512, 64}, at::kBFloat16),
                          at::zeros({2, 4, 1024, 64}, at::kBFloat16),
                          at::zeros({2, 4, 1024, 64}, at::kBFloat16)};
  auto& allocator = CountingAllocator::install();
  const auto before = allocator.current();
  allocator.restart_peak();
  const Work work = work_of_reference(kAttention, arguments);
  EXPECT_LE(allocator.peak() - before, 10'000);
  EXPECT_NEAR(work.flops, 2 * 2 * heads * rows * columns * width, 1e6);
  const double scores = 8 * heads * rows * columns;
  EXPECT_GT(work.bytes, 2 * scores);
  EXPECT_LT(work.bytes, 4 * scores);
}

TEST(ReferenceWork, OfABackwardIncludesSavedTensorsAndComputation) {
  const KernelReference backward{"gemm backward", [](const Tensors& in) {
                                   const c10::AutoGradMode with_gradients(true);
                                   const at::Tensor x = in[0].detach().requires_grad_();
                                   const at::Tensor sum = at::matmul(x, in[1]).sin().sum();
                                   return torch::autograd::grad({sum}, {x});
                                 }};
  const auto square = at::zeros({100, 100});
  const Work work = work_of_reference(backward, {square, square});
  EXPECT_NEAR(work.flops, 2 * 2e6, 1);
  EXPECT_GE(work.bytes, 4 * 8e4);
}

TEST(ReferenceWork, OfAReferenceThatAsksForValuesIsAFewTimesItsArguments) {
  const KernelReference asking{
      "asking", [](const Tensors& in) { return Tensors{in[0] * in[0].max().item<double>()}; }};
  const Work work = work_of_reference(asking, {at::zeros({1000}), at::zeros({10}, at::kLong)});
  EXPECT_EQ(work.flops, 0);
  EXPECT_EQ(work.bytes, 6 * 8 * 1000);
}

TEST(ReferenceWork, IntegersKeepTheirValues) {
  const KernelReference packed{"packed", [](const Tensors& in) {
                                 const auto end = in[1][1].item<std::int64_t>();
                                 const at::Tensor x = in[0].narrow(0, 0, end);
                                 return Tensors{at::matmul(x, x.t())};
                               }};
  const auto ends = at::tensor({0, 30});
  EXPECT_NEAR(work_of_reference(packed, {at::zeros({50, 8}), ends}).flops, 2 * 30 * 30 * 8, 1);
}

}  // namespace
}  // namespace nanlocator
