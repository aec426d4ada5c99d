#include "nanlocator/replay/capture.hpp"

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/native_dropout.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "captured_call.hpp"
#include "nanlocator/error.hpp"
#include "replay/execute.hpp"
#include "support/counting_allocator.hpp"

namespace nanlocator {
namespace {

using testing::captured;

std::vector<c10::IValue> execute(const OperatorCall& call) {
  std::vector<std::string> problems;
  auto outputs = nanlocator::execute(call, problems);
  EXPECT_TRUE(problems.empty()) << problems.front();
  return outputs;
}

std::vector<std::size_t> written(const char* name, const char* overload) {
  return call_facts({name, overload}).written;
}

TEST(CallFacts, ListsTheArgumentsThatAnOperatorWrites) {
  using Positions = std::vector<std::size_t>;
  EXPECT_EQ(written("aten::add", "Tensor"), Positions());
  EXPECT_EQ(written("aten::add_", "Tensor"), Positions({0}));
  EXPECT_EQ(written("aten::topk", "values"), Positions({5, 6}));
  EXPECT_EQ(written("aten::_foreach_add_", "List"), Positions({0}));
  EXPECT_TRUE(call_facts({"aten::add_", "Tensor"}).written_unreturned.empty());
  EXPECT_EQ(call_facts({"aten::_foreach_add_", "List"}).written_unreturned, Positions({0}));
}

TEST(CallFacts, KnowsThatBatchNormWritesItsRunningStatisticsWithoutAMarkInTheSchema) {
  using Positions = std::vector<std::size_t>;
  EXPECT_EQ(written("aten::native_batch_norm", ""), Positions({3, 4}));
  EXPECT_EQ(call_facts({"aten::native_batch_norm", ""}).written_unreturned, Positions({3, 4}));
}

TEST(CallFacts, KnowsWhichOperatorsDrawRandomNumbers) {
  EXPECT_TRUE(call_facts({"aten::native_dropout", ""}).draws_random_numbers);
  EXPECT_TRUE(call_facts({"aten::scaled_dot_product_attention", ""}).draws_random_numbers);
  EXPECT_FALSE(call_facts({"aten::mm", ""}).draws_random_numbers);
}

TEST(CallFacts, RefusesAnOperatorThatIsNotRegistered) {
  EXPECT_THROW((void)call_facts({"nobody::registered_this", ""}), UnsupportedError);
}

TEST(CallCapture, KeepsWhatAnInPlaceOperatorOverwrites) {
  auto tensor = at::full({4}, 3.0);
  const auto call = captured("aten::mul_.Tensor", [&] { tensor.mul_(tensor); });
  EXPECT_EQ(call.arguments[0].toTensor()[0].item<double>(), 3.0);
  EXPECT_EQ(call.outputs[0].toTensor()[0].item<double>(), 9.0);
}

TEST(CallCapture, KeepsTheValuesOfTheCallWhileTrainingReusesTheTensors) {
  auto input = at::full({4}, 3.0);
  at::Tensor output;
  const auto call = captured("aten::add.Tensor", [&] { output = input.add(input); });
  input.fill_(100);
  output.fill_(100);
  EXPECT_EQ(call.arguments[0].toTensor()[0].item<double>(), 3.0);
  EXPECT_EQ(call.outputs[0].toTensor()[0].item<double>(), 6.0);
}

TEST(CallCapture, CopiesTheTargetOfAnInPlaceOperatorOnce) {
  auto& allocator = CountingAllocator::install();
  const auto tensor = at::full({1 << 20}, 3.0, at::kFloat);
  const std::int64_t before = allocator.current();
  allocator.restart_peak();
  const auto call = captured("aten::mul_.Tensor", [&] { tensor.mul_(tensor); });
  const auto bytes = static_cast<std::int64_t>(tensor.nbytes());
  EXPECT_GT(allocator.peak() - before, bytes + bytes / 2);  // before the call, and after it
  EXPECT_LT(allocator.peak() - before, 2 * bytes + bytes / 2);
  EXPECT_EQ(call.arguments[0].toTensor()[7].item<double>(), 3.0);
}

TEST(CallCapture, LetsArgumentsShareTheMemoryThatTheyShared) {
  auto buffer = at::arange(6, at::kFloat);
  const auto head = buffer.narrow(0, 0, 4);
  const auto tail = buffer.narrow(0, 2, 4);
  const auto shared = captured("aten::add.Tensor", [&] { (void)head.add(tail); });
  const auto& self = shared.arguments[0].toTensor();
  const auto& other = shared.arguments[1].toTensor();
  EXPECT_EQ(self.storage().unsafeGetStorageImpl(), other.storage().unsafeGetStorageImpl());
  EXPECT_EQ(other.storage_offset() - self.storage_offset(), 2);
}

TEST(CallCapture, KeepsStridesAndOnlyTheReachableRange) {
  const auto matrix = at::arange(100, at::kFloat).view({10, 10});
  const auto column = matrix.select(1, 7);  // elements 7, 17, ..., 97
  const auto call = captured("aten::neg", [&] { (void)column.neg(); });
  const auto& kept = call.arguments[0].toTensor();
  EXPECT_EQ(kept.stride(0), 10);
  EXPECT_EQ(kept.storage().nbytes(), 91 * sizeof(float));
  EXPECT_TRUE(at::equal(kept, column));
}

TEST(CallCapture, RepeatsTheRandomNumbersOfTheCall) {
  const auto input = at::ones({1000});
  at::Tensor dropped;
  const auto call = captured("aten::native_dropout",
                             [&] { dropped = std::get<0>(at::native_dropout(input, 0.5, true)); });
  (void)at::randn({77});  // advances the default generator
  EXPECT_TRUE(at::equal(execute(call)[0].toTensor(), dropped));
}

TEST(CallCapture, KeepsWhatIsWrittenWithoutBeingReturned) {
  std::vector<at::Tensor> tensors = {at::full({2}, 1.0), at::full({3}, 2.0)};
  const std::vector<at::Tensor> others = {at::full({2}, 10.0), at::full({3}, 20.0)};
  const auto call =
      captured("aten::_foreach_add_.List", [&] { at::_foreach_add_(tensors, others); });
  ASSERT_EQ(call.outputs.size(), 1u);
  EXPECT_EQ(call.arguments[0].toTensorVector()[1][0].item<double>(), 2.0);
  EXPECT_EQ(call.outputs[0].toTensorVector()[1][0].item<double>(), 22.0);
}

TEST(Execute, LeavesTheRunningStatisticsOfBatchNormAlone) {
  const auto input = at::randn({8, 3});
  const auto mean = at::zeros({3});
  const auto variance = at::ones({3});
  auto call = captured("aten::native_batch_norm", [&] {
    (void)at::native_batch_norm(input, {}, {}, mean, variance, true, 0.1, 1e-5);
  });
  call.arguments[3] = mean;  // as in a process in which the model lives on
  const auto before = mean.clone();
  const auto outputs = execute(call);
  EXPECT_TRUE(at::equal(mean, before));
  EXPECT_FALSE(at::equal(outputs[3].toTensor(), before));
}

TEST(Execute, LeavesTheDefaultGeneratorAsItWas) {
  const auto input = at::ones({1000});
  const auto call =
      captured("aten::native_dropout", [&] { (void)at::native_dropout(input, 0.5, true); });
  auto generator = at::detail::getDefaultCPUGenerator();
  const auto before = generator.get_state();
  (void)execute(call);
  EXPECT_TRUE(at::equal(generator.get_state(), before));
}

}  // namespace
}  // namespace nanlocator
