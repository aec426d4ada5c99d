#include "nanlocator/replay/operator_call.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/index.h>
#include <ATen/ops/native_dropout.h>
#include <ATen/ops/normal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <limits>

#include "captured_call.hpp"
#include "nanlocator/error.hpp"
#include "nanlocator/replay/replay.hpp"
#include "temporary_folder.hpp"

namespace nanlocator {
namespace {

using nanlocator::testing::message_of;
using testing::captured;
using ::testing::HasSubstr;
using testing::TemporaryFolder;

/// Writes `call` as a bundle in its own folder.
class Written {
 public:
  explicit Written(const OperatorCall& call) {
    Bundle bundle;
    bundle.birth.sighting.op = c10::toString(call.name);
    StorageCollector storages;
    add_to_bundle(call, bundle, storages);
    const auto contents = storages.finish(bundle);
    BundleStore store(folder_.path(), {});
    opened_.emplace(folder_.path() / store.write(bundle, contents));
  }
  [[nodiscard]] const OpenBundle& bundle() const { return *opened_; }
  [[nodiscard]] OperatorCall call() const { return operator_call_of(*opened_, at::kCPU); }

 private:
  TemporaryFolder folder_;
  std::optional<OpenBundle> opened_;
};

TEST(Bundle, NamesTheOriginalDeviceOfACopyInHostMemory) {
  const auto x = at::ones({4});
  auto call = captured("aten::add.Tensor", [&] { (void)x.add(x); });
  EXPECT_TRUE(call.came_from.empty());
  call.came_from = {
      {call.outputs[0].toTensor().storage().unsafeGetStorageImpl(), at::Device("cuda:3")}};
  const Written written(call);
  const auto& recorded = *written.bundle().bundle().operator_call;
  EXPECT_EQ(recorded.arguments[0].tensor.device, "cpu");
  EXPECT_EQ(recorded.outputs[0].tensor.device, "cuda:3");
}

TEST(Bundle, GivesBackStridesOffsetsAndValues) {
  const auto matrix = at::arange(100, at::kFloat).view({10, 10});
  const auto column = matrix.select(1, 7);
  const Written written(captured("aten::neg", [&] { (void)column.neg(); }));
  const auto call = written.call();
  EXPECT_EQ(call.name, c10::OperatorName("aten::neg", ""));
  EXPECT_EQ(call.arguments.at(0).toTensor().strides(), column.strides());
  EXPECT_TRUE(at::equal(call.arguments.at(0).toTensor(), column));
  EXPECT_TRUE(at::equal(call.outputs.at(0).toTensor(), -column));
}

TEST(Bundle, KeepsADenseTensorUnderItsNameWithItsShape) {
  const Written written(captured("aten::neg", [&] { (void)at::ones({2, 3}).neg(); }));
  const auto& entry = written.bundle().tensors().at("argument.0.self");
  EXPECT_EQ(entry.dtype, "F32");
  EXPECT_EQ(entry.shape, std::vector<std::int64_t>({2, 3}));
}

TEST(Bundle, StoresSharedMemoryOnceAndSharesItAgain) {
  const auto buffer = at::arange(6, at::kFloat);
  const auto head = buffer.narrow(0, 0, 4);
  const auto tail = buffer.narrow(0, 2, 4);
  const Written written(captured("aten::add.Tensor", [&] { (void)head.add(tail); }));
  std::size_t bytes = 0;
  for (const auto& entry : written.bundle().tensors().entries()) bytes += entry.bytes.size();
  EXPECT_EQ(bytes, (6 + 4) * sizeof(float));  // the buffer and the output
  const auto call = written.call();
  auto self = call.arguments.at(0).toTensor();
  self[3].fill_(77);
  EXPECT_EQ(call.arguments.at(1).toTensor()[1].item<float>(), 77);
}

TEST(Bundle, KeepsTheBitsOfNanAndMinusZeroInNumbersAndTensors) {
  const auto nan = std::bit_cast<double>(0x7FF8000000C0FFEEULL);
  const auto x = at::full({1}, -0.0F);
  auto call = captured("aten::add.Tensor", [&] { (void)x.add(x, 2.0); });
  call.arguments[2] = nan;
  const auto again = Written(call).call();
  EXPECT_EQ(std::bit_cast<std::uint64_t>(again.arguments.at(2).toDouble()), 0x7FF8000000C0FFEEULL);
  EXPECT_TRUE(std::signbit(again.arguments.at(0).toTensor().item<float>()));
}

TEST(Bundle, KeepsPythonNumbersOutOfTypePromotion) {
  const auto x = at::full({2}, 1.0, at::kHalf);
  const auto call = captured("aten::mul.Tensor", [&] { (void)x.mul(3.0); });
  const auto again = Written(call).call();
  EXPECT_TRUE(again.arguments.at(1).toTensor().unsafeGetTensorImpl()->is_wrapped_number());
  EXPECT_TRUE(replay(again).is_bit_exact);  // otherwise the product would be float64
}

TEST(Bundle, GivesBackListsOptionalTensorsAndDtypes) {
  const std::vector<at::Tensor> parts = {at::randn({2, 3}), at::randn({1, 3})};
  EXPECT_TRUE(
      replay(Written(captured("aten::cat", [&] { (void)at::cat(parts, 0); })).call()).is_bit_exact);
  const auto x = at::randn({4, 5});
  const c10::List<std::optional<at::Tensor>> indices({std::nullopt, at::tensor({0, 4}, at::kLong)});
  EXPECT_TRUE(
      replay(Written(captured("aten::index.Tensor", [&] { (void)at::index(x, indices); })).call())
          .is_bit_exact);
  const Written cast(captured("aten::_to_copy", [&] { (void)x.to(at::kBFloat16); }));
  EXPECT_EQ(cast.bundle().bundle().operator_call->arguments.at(1).text, "bfloat16");
  EXPECT_TRUE(replay(cast.call()).is_bit_exact);
}

TEST(Bundle, GivesBackLazyConjugation) {
  const auto x = at::complex(at::ones({3}), at::full({3}, 2.0F));
  const auto call = captured("aten::mul.Tensor", [&] { (void)x.mul(x.conj()); });
  const auto again = Written(call).call();
  EXPECT_TRUE(again.arguments.at(1).toTensor().is_conj());
  EXPECT_TRUE(replay(again).is_bit_exact);
}

TEST(Bundle, RepeatsRandomNumbersOfTheDefaultAndOfOtherGenerators) {
  const auto x = at::ones({500});
  const auto dropout =
      captured("aten::native_dropout", [&] { (void)at::native_dropout(x, 0.5, true); });
  EXPECT_TRUE(replay(Written(dropout).call()).is_bit_exact);
  auto generator = at::detail::createCPUGenerator(1234);
  const auto drawn = captured("aten::normal_", [&] {
    auto target = at::empty({500});
    target.normal_(0, 1, generator);
  });
  EXPECT_TRUE(replay(Written(drawn).call()).is_bit_exact);
}

TEST(Bundle, ReplaysAnOperatorThatWritesAListAndReturnsNothing) {
  std::vector<at::Tensor> tensors = {at::randn({2}), at::randn({3})};
  const std::vector<at::Tensor> others = {at::randn({2}), at::randn({3})};
  const auto call =
      captured("aten::_foreach_add_.List", [&] { at::_foreach_add_(tensors, others); });
  const auto report = replay(Written(call).call());
  EXPECT_TRUE(report.is_bit_exact);
  ASSERT_EQ(report.recorded.size(), 2u);
  EXPECT_EQ(report.recorded[1].name, "self after[1]");
}

TEST(Bundle, RefusesAnArgumentThatCouldNotBeKept) {
  auto call = captured("aten::neg", [&] { (void)at::ones({2, 2}).neg(); });
  call.arguments[0] = at::ones({2, 2}).to_sparse();
  const Written written(call);
  const auto message = message_of<UnsupportedError>([&] { (void)written.call(); });
  EXPECT_THAT(message, HasSubstr("argument 'self' of aten::neg"));
  EXPECT_THAT(message, HasSubstr("layout is Sparse"));
}

TEST(Bundle, RefusesTheSchemaOfAnotherVersion) {
  const auto call = captured("aten::neg", [&] { (void)at::ones({2}).neg(); });
  TemporaryFolder folder;
  Bundle bundle;
  StorageCollector storages;
  add_to_bundle(call, bundle, storages);
  bundle.operator_call->schema = "aten::neg(Tensor self, bool twice) -> Tensor";
  const auto contents = storages.finish(bundle);
  const OpenBundle opened(folder.path() / BundleStore(folder.path(), {}).write(bundle, contents));
  const auto message =
      message_of<UnsupportedError>([&] { (void)operator_call_of(opened, at::kCPU); });
  EXPECT_THAT(message, HasSubstr("bool twice"));
}

}  // namespace
}  // namespace nanlocator
