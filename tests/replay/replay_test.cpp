#include "nanlocator/replay/replay.hpp"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/library.h>

#include <limits>
#include <nlohmann/json.hpp>

#include "captured_call.hpp"
#include "nanlocator/error.hpp"
#include "replay/work.hpp"

namespace nanlocator {
namespace {

using testing::captured;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Operators with planted faults.
at::Tensor kernel_bug(const at::Tensor& x) {
  auto result = x.clone();
  if (x.scalar_type() == at::kFloat) result.view(-1)[1] = NAN;  // only in this dtype's kernel
  return result;
}
int flaky_calls = 0;
at::Tensor flaky(const at::Tensor& x) {
  auto result = x.clone();
  if (flaky_calls++ == 0) result.view(-1)[0] = NAN;
  return result;
}
// Larger than any block that malloc reuses: fresh pages, which the operating system fills with
// zeros.
constexpr std::int64_t kFreshElements = std::int64_t{1} << 24;
at::Tensor forgets_to_write(const at::Tensor& x) {
  return at::empty({kFreshElements}, x.options()).narrow(0, 0, x.numel()).add(x);
}

/// From its second call on, the result's storage holds one element, as with
/// inductor::_reinterpret_tensor, which checks nothing.
int shrinking_calls = 0;
at::Tensor shrinks_its_storage(const at::Tensor& x) {
  auto result = x.clone();
  if (shrinking_calls++ > 0) {
    result.unsafeGetTensorImpl()->set_storage_keep_dtype(at::ones({1}, x.options()).storage());
  }
  return result;
}

at::Tensor reciprocal(const at::Tensor& x) {
  return 1 / x;
}

TORCH_LIBRARY(nanlocator_replay_test, m) {
  m.def("reciprocal(Tensor x) -> Tensor", &reciprocal);
  m.def("shrinks_its_storage(Tensor x) -> Tensor", &shrinks_its_storage);
  m.def("kernel_bug(Tensor x) -> Tensor", &kernel_bug);
  m.def("flaky(Tensor x) -> Tensor", &flaky);
  m.def("forgets_to_write(Tensor x) -> Tensor", &forgets_to_write);
}

at::Tensor call_operator(const char* name, const at::Tensor& x) {
  const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  std::vector<c10::IValue> stack = {x};
  handle.callBoxed(stack);
  return stack[0].toTensor();
}

const ReplayRun& run_of(const ReplayReport& report, ReplayVariant variant) {
  for (const auto& run : report.runs) {
    if (run.variant == variant) return run;
  }
  throw std::runtime_error("no such run");
}

ReplayReport replayed(const char* op, const std::function<void()>& compute) {
  return replay(captured(op, compute));
}

TEST(Replay, FindsTheLogarithmOfZeroUndefinedInEveryPrecision) {
  const auto x = at::tensor({1.0F, 0.0F, 4.0F});
  const auto report = replayed("aten::log", [&] { (void)x.log(); });
  EXPECT_TRUE(report.is_bit_exact);
  EXPECT_EQ(report.conclusion, ReplayConclusion::deterministic_undefined);
  ASSERT_EQ(report.inputs_at_first_bad.size(), 1u);
  EXPECT_EQ(report.inputs_at_first_bad[0].name, "self");
  EXPECT_EQ(report.inputs_at_first_bad[0].index, std::vector<std::int64_t>({1}));
  EXPECT_EQ(report.inputs_at_first_bad[0].value, 0.0);
}

TEST(Replay, DoesNotJudgeTheMathematicsOfACustomOperator) {
  const auto x = at::tensor({1.0F, 0.0F, 4.0F});
  const auto report = replayed("nanlocator_replay_test::reciprocal", [&] {
    (void)call_operator("nanlocator_replay_test::reciprocal", x);
  });
  EXPECT_EQ(report.conclusion, ReplayConclusion::deterministic_custom);
  EXPECT_THAT(report.sentences, Contains(HasSubstr("not PyTorch's")));
}

TEST(Replay, ShowsBothBroadcastOperandsOfZeroByZero) {
  auto numerator = at::ones({3, 4});
  auto denominator = at::ones({4});
  numerator[2][1] = 0;
  denominator[1] = 0;
  numerator[0][1] = 0;
  const auto report = replayed("aten::div.Tensor", [&] { (void)numerator.div(denominator); });
  EXPECT_EQ(report.conclusion, ReplayConclusion::deterministic_undefined);
  EXPECT_EQ(report.recorded[0].stats.nan, 2);
  EXPECT_EQ(report.recorded[0].stats.pos_inf, 1);
  ASSERT_EQ(report.inputs_at_first_bad.size(), 2u);
  EXPECT_EQ(report.inputs_at_first_bad[0].index, std::vector<std::int64_t>({0, 1}));
  EXPECT_EQ(report.inputs_at_first_bad[1].index, std::vector<std::int64_t>({1}));
  EXPECT_EQ(report.inputs_at_first_bad[1].value, 0.0);
}

TEST(Replay, CallsTheExponentialOfAHundredAnOverflowOfFloat32) {
  const auto x = at::tensor({1.0F, 100.0F});
  const auto report = replayed("aten::exp", [&] { (void)x.exp(); });
  EXPECT_EQ(report.conclusion, ReplayConclusion::deterministic_overflow);
  const auto& wide = run_of(report, ReplayVariant::float64).outputs.at(0);
  EXPECT_TRUE(wide.stats.is_finite());
  EXPECT_NEAR(wide.stats.absmax / 2.6881171418161356e43, 1, 1e-12);
  EXPECT_FALSE(wide.equals_recorded.has_value());
}

TEST(Replay, CallsTheExponentialOfTenThousandAnOverflowAlthoughFloat64OverflowsToo) {
  const auto x = at::tensor({1.0F, 1e4F});
  const auto report = replayed("aten::exp", [&] { (void)x.exp(); });
  EXPECT_EQ(report.conclusion, ReplayConclusion::deterministic_overflow);
}

TEST(Replay, CallsAMatrixProductBeyondFloat16AnOverflow) {
  const auto a = at::full({2, 8}, 200.0, at::kHalf);
  const auto report = replayed("aten::mm", [&] { (void)at::mm(a, a.t()); });  // 8 * 200^2 = 320000
  EXPECT_EQ(report.conclusion, ReplayConclusion::deterministic_overflow);
  EXPECT_EQ(run_of(report, ReplayVariant::float32).outputs.at(0).stats.absmax, 320000);
}

TEST(Replay, CallsANormWhoseSquaresOverflowAnOverflowAlthoughTheNormFits) {
  const auto x = at::full({16}, 1e30F);
  const auto report =
      replayed("aten::linalg_vector_norm", [&] { (void)at::linalg_vector_norm(x, 2); });
  EXPECT_EQ(report.recorded[0].stats.pos_inf, 1);
  EXPECT_EQ(report.conclusion, ReplayConclusion::deterministic_overflow);
}

TEST(Replay, FindsARowOfMinusInfinityUndefinedInSoftmaxAndShowsTheBadInput) {
  const auto x = at::full({2, 4}, -kInfinity);
  x[0].fill_(1);
  const auto report = replayed("aten::_softmax", [&] { (void)at::softmax(x, -1); });
  EXPECT_EQ(report.conclusion, ReplayConclusion::deterministic_undefined);
  ASSERT_EQ(report.inputs_at_first_bad.size(), 1u);
  EXPECT_EQ(report.inputs_at_first_bad[0].index, std::vector<std::int64_t>({1, 0}));
  EXPECT_EQ(report.inputs_at_first_bad[0].value, -kInfinity);
}

TEST(Replay, BlamesTheKernelIfTheResultFitsAndOnlyOneDtypeIsBad) {
  const auto x = at::tensor({1.0F, 2.0F, 3.0F});
  const auto report = replayed("nanlocator_replay_test::kernel_bug", [&] {
    (void)call_operator("nanlocator_replay_test::kernel_bug", x);
  });
  EXPECT_TRUE(report.is_bit_exact);
  EXPECT_EQ(report.conclusion, ReplayConclusion::deterministic_kernel);
}

TEST(Replay, SaysVariesIfTheFaultDoesNotRecur) {
  flaky_calls = 0;
  const auto x = at::tensor({1.0F, 2.0F, 3.0F});
  const auto report = replayed("nanlocator_replay_test::flaky",
                               [&] { (void)call_operator("nanlocator_replay_test::flaky", x); });
  EXPECT_FALSE(report.is_bit_exact);
  EXPECT_EQ(report.conclusion, ReplayConclusion::varies);
  EXPECT_THAT(report.sentences, Contains(HasSubstr("finite 3 times when executed again")));
}

TEST(Replay, FindsAnOperatorThatReadsUnwrittenMemory) {
  const auto x = at::ones({8});
  const auto report = replayed("nanlocator_replay_test::forgets_to_write", [&] {
    (void)call_operator("nanlocator_replay_test::forgets_to_write", x);
  });
  EXPECT_EQ(run_of(report, ReplayVariant::poisoned).outputs.at(0).stats.nan, 8);
  EXPECT_EQ(report.conclusion, ReplayConclusion::varies);
  EXPECT_THAT(report.sentences, Contains(HasSubstr("memory that was never written")));
}

TEST(Replay, SkipsWorkThatWouldTakeTheCpuTooLong) {
  auto x = at::full({300, 200}, NAN);
  const auto y = at::ones({200, 100});
  const auto call = captured("aten::mm", [&] { (void)at::mm(x, y); });
  const double flops = 2.0 * 300 * 200 * 100;
  EXPECT_NEAR(work_of(call).flops, flops, 1);
  EXPECT_EQ(work_of(call).bytes, 4.0 * (300 * 200 + 200 * 100 + 300 * 100));
  const auto too_large = replay(call, {.cpu_limit = CpuWorkLimit{.flops = flops / 2}});
  EXPECT_EQ(too_large.conclusion, ReplayConclusion::not_replayed);
  EXPECT_TRUE(too_large.runs.empty());
  EXPECT_THAT(too_large.sentences,
              ElementsAre(HasSubstr("Not replayed: too large for the CPU: 1.2e+07 FLOPs")));
  EXPECT_EQ(too_large.recorded.at(0).stats.nan, 300 * 100);
  EXPECT_THAT(replay(call, {.cpu_limit = CpuWorkLimit{.bytes = 1000}}).sentences,
              ElementsAre(HasSubstr("bytes")));
  EXPECT_FALSE(replay(call, {.cpu_limit = CpuWorkLimit{.flops = 2 * flops}}).runs.empty());
  EXPECT_FALSE(replay(call, {.cpu_limit = std::nullopt}).runs.empty());
}

TEST(Work, OfAConvolutionCountsTheFilterForEachElement) {
  const auto x = at::ones({2, 8, 16, 16});
  const auto weight = at::ones({4, 8, 3, 3});
  const auto call = captured("aten::convolution", [&] { (void)at::conv2d(x, weight, {}, 1, 1); });
  const double exact = 2.0 * (2 * 4 * 16 * 16) * (8 * 3 * 3);
  EXPECT_GE(work_of(call).flops, exact);
  EXPECT_LE(work_of(call).flops, 4 * exact);
}

TEST(Replay, ConcludesNothingFromAHealthyCall) {
  const auto x = at::randn({16, 16});
  const auto report = replayed("aten::mm", [&] { (void)at::mm(x, x); });
  EXPECT_TRUE(report.is_bit_exact);
  EXPECT_EQ(report.conclusion, ReplayConclusion::not_replayed);
}

TEST(Replay, CastsLikeAutocastIfTheCallWasMadeUnderIt) {
  const auto a = at::full({2, 2}, 1.00390625F);  // 1 + 2^-8 is not a bfloat16
  at::autocast::set_autocast_enabled(at::kCPU, true);
  at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  const auto outer = captured("aten::matmul", [&] { (void)at::Tensor(a).matmul(a); });
  at::autocast::set_autocast_enabled(at::kCPU, false);
  EXPECT_EQ(outer.settings.at("autocast"), "cpu bfloat16");
  EXPECT_EQ(outer.arguments[0].toTensor().scalar_type(), at::kFloat);
  EXPECT_EQ(outer.outputs[0].toTensor().scalar_type(), at::kBFloat16);
  const auto report = replay(outer);
  EXPECT_TRUE(report.is_bit_exact);
  EXPECT_EQ(run_of(report, ReplayVariant::float64).outputs.at(0).dtype, "float64");
}

TEST(Replay, CastsNothingIfAutocastHadCastAlready) {
  const auto a = at::full({2, 2}, 1.5F);
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const auto inner = captured("aten::mm", [&] { (void)at::Tensor(a).matmul(a); });
  at::autocast::set_autocast_enabled(at::kCPU, false);
  EXPECT_EQ(inner.settings.at("autocast"), "off");
  EXPECT_EQ(inner.arguments[0].toTensor().scalar_type(), at::kBFloat16);
  EXPECT_TRUE(replay(inner).is_bit_exact);
}

TEST(Replay, LeavesTheSettingsOfTheThreadAsTheyWere) {
  at::globalContext().setDeterministicAlgorithms(true, true);
  const auto x = at::randn({4, 4});
  auto call = captured("aten::mm", [&] { (void)at::mm(x, x); });
  at::globalContext().setDeterministicAlgorithms(false, false);
  call.settings["threads"] = "1";
  call.settings["autocast"] = "cpu float16";
  call.settings["grad_mode"] = "off";
  const auto before = current_settings();
  (void)replay(call);
  EXPECT_EQ(current_settings(), before);
}

TEST(Replay, SaysWhichSettingsItCouldNotRestore) {
  const auto x = at::randn({4, 4});
  auto call = captured("aten::mm", [&] { (void)at::mm(x, x); });
  call.settings["colour_of_the_kernel"] = "blue";
  call.settings["threads"] = "many";
  const auto report = replay(call);
  EXPECT_THAT(report.sentences, Contains(HasSubstr("colour_of_the_kernel")));
  EXPECT_THAT(report.sentences, Contains(HasSubstr("'many'")));
}

TEST(Replay, ReadsNothingBeyondTheStorageOfAResult) {
  const auto x = at::ones({4096});
  const auto call = captured("nanlocator_replay_test::shrinks_its_storage", [&] {
    (void)call_operator("nanlocator_replay_test::shrinks_its_storage", x);
  });
  const auto report = replay(call);
  ASSERT_FALSE(report.runs.empty());
  EXPECT_EQ(report.runs[0].outputs.at(0).shape, std::vector<std::int64_t>{4096});
  EXPECT_EQ(report.runs[0].outputs.at(0).equals_recorded, std::nullopt);
}

TEST(Replay, ReportsTheOperatorsError) {
  const auto x = at::ones({2, 3});
  auto call = captured("aten::mm", [&] { (void)at::mm(x, x.t()); });
  call.arguments[1] = x;
  const auto report = replay(call);
  EXPECT_EQ(report.conclusion, ReplayConclusion::not_replayed);
  EXPECT_THAT(report.runs[0].problem, HasSubstr("cannot be multiplied"));
}

TEST(Replay, RefusesZeroRepeats) {
  const auto x = at::ones({2, 2});
  const auto call = captured("aten::mm", [&] { (void)at::mm(x, x); });
  EXPECT_THROW((void)replay(call, {.repeats = 0}), UsageError);
}

TEST(ReplayText, IsOneJsonObjectWithEveryRun) {
  const auto x = at::tensor({1.0F, 100.0F});
  const auto report = replayed("aten::exp", [&] { (void)x.exp(); });
  const auto json = nlohmann::json::parse(to_json(report));
  EXPECT_EQ(json["op"], "aten::exp");
  EXPECT_EQ(json["conclusion"], "deterministic_overflow");
  EXPECT_EQ(json["recorded"][0]["first_bad"], nlohmann::json::array({1}));
  EXPECT_EQ(json["runs"].size(), 5u);  // recorded three times, poisoned, float64
  EXPECT_EQ(json["runs"][3]["variant"], "poisoned");
  EXPECT_EQ(json["runs"][0]["outputs"][0]["equals_recorded"], true);
  EXPECT_EQ(json["inputs_at_first_bad"][0]["value"], 100.0);
}

TEST(ReplayText, HasARowForEveryRunAndTheConclusion) {
  const auto x = at::tensor({1.0F, 100.0F});
  const auto text = format_replay(replayed("aten::exp", [&] { (void)x.exp(); }), {.width = 60});
  EXPECT_THAT(text, HasSubstr("seen in training  output[0]  float32    0    1  [1]"));
  EXPECT_THAT(text, HasSubstr("recorded 3"));
  EXPECT_THAT(text, HasSubstr("self[1] = 100 (float32)"));
  EXPECT_THAT(text, HasSubstr("conclusion: deterministic_overflow\n"));
}

}  // namespace
}  // namespace nanlocator
