// Replays of kernels written here, each with its own bug.
#include "nanlocator/replay/kernel_replay.hpp"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linspace.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/sin.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <thread>
#include <utility>
#include <vector>

#include "nanlocator/error.hpp"
#include "support/counting_allocator.hpp"

namespace nanlocator {
namespace {

using Tensors = std::vector<at::Tensor>;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

at::Tensor input() {
  return at::linspace(-3, 3, 40);
}

/// The recorded call of `kernel` with `arguments`, the last of which it writes.
RecordedKernelCall recorded(const ExecuteKernel& kernel, Tensors arguments) {
  RecordedKernelCall call;
  call.name = "test::kernel";
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    call.names.push_back(i + 1 == arguments.size() ? "out" : "x");
    call.before.push_back(arguments[i].clone());
    call.beside.push_back(beside_of(arguments[i]));
  }
  call.results = kernel(arguments);
  call.after = std::move(arguments);
  return call;
}

KernelReplay replayed(const ExecuteKernel& kernel, Tensors arguments,
                      const std::vector<KernelReference>& references = {}) {
  return replay_kernel(recorded(kernel, std::move(arguments)), kernel, references, {.role = "out"});
}

float* data_of(const at::Tensor& tensor) {
  return tensor.mutable_data_ptr<float>();
}

/// silu of all but the last `left_out` elements.
ExecuteKernel silu_except(std::int64_t left_out) {
  return [left_out](const Tensors& arguments) {
    const auto count = arguments[0].numel() - left_out;
    arguments[1].narrow(0, 0, count).copy_(at::silu(arguments[0].narrow(0, 0, count)));
    return Tensors{};
  };
}

const KernelReference kSilu{"silu", [](const Tensors& in) { return Tensors{at::silu(in[0])}; }};

TEST(KernelReplay, WrongValuesAreReportedIfTheReferenceIsFinite) {
  const ExecuteKernel kernel = [](const Tensors& arguments) {
    (void)silu_except(0)(arguments);
    data_of(arguments[1])[5] = kNaN;
    return Tensors{};
  };
  const auto replay = replayed(kernel, {input(), at::full({40}, 0.0F)}, {kSilu});
  EXPECT_EQ(replay.conclusion, KernelConclusion::wrong_values);
  EXPECT_EQ(replay.bad, 1);
  EXPECT_EQ(replay.has_same_bits, true);
  EXPECT_EQ(replay.reference, "silu");
  EXPECT_EQ(replay.compared, 39);
  EXPECT_EQ(replay.agreeing, 39);
}

TEST(KernelReplay, AReferenceThatDisagreesElsewhereIsNotUsed) {
  const ExecuteKernel kernel = [](const Tensors& arguments) {
    (void)silu_except(0)(arguments);
    data_of(arguments[1])[5] = kNaN;
    return Tensors{};
  };
  const KernelReference sine{"sine", [](const Tensors& in) { return Tensors{at::sin(in[0])}; }};
  const KernelReference raising{"raising", [](const Tensors&) -> Tensors { throw Error("no"); }};
  const auto replay = replayed(kernel, {input(), at::full({40}, 0.0F)}, {sine, raising});
  EXPECT_EQ(replay.conclusion, KernelConclusion::bad_again);
  EXPECT_EQ(replay.reference, "");
}

TEST(KernelReplay, ElementsThatHoldBothPatternsAfterwardsAreUnwritten) {
  const auto replay = replayed(silu_except(8), {input(), at::full({40}, kNaN)}, {kSilu});
  EXPECT_EQ(replay.conclusion, KernelConclusion::leaves_unwritten);
  EXPECT_EQ(replay.bad, 8);
  ASSERT_TRUE(replay.extent);
  EXPECT_EQ(replay.extent->dimensions.front(), (BadExtent::Indices{32, 39, 8}));
  EXPECT_TRUE(replay.is_reference_finite);
}

TEST(KernelReplay, WithoutAReferenceTheyMayBeLeftUnwrittenOnPurpose) {
  const auto replay = replayed(silu_except(8), {input(), at::full({40}, kNaN)});
  EXPECT_EQ(replay.conclusion, KernelConclusion::leaves_unwritten);
  EXPECT_FALSE(replay.is_reference_finite);
}

TEST(KernelReplay, AWriteBeyondAnArgumentIsSeenInTheGuardZone) {
  auto call = recorded(silu_except(0), {input(), at::full({40}, 0.0F)});
  data_of(call.after[1])[3] = kNaN;
  const ExecuteKernel beyond = [](const Tensors& arguments) {
    (void)silu_except(0)(arguments);
    data_of(arguments[1])[40] = 1;
    return Tensors{};
  };
  const auto replay = replay_kernel(call, beyond, {}, {.role = "out"});
  EXPECT_EQ(replay.conclusion, KernelConclusion::writes_outside);
  EXPECT_EQ(replay.argument, "out");
}

/// Sums of rows, with one element after each.
Tensors sums_beyond(const Tensors& arguments) {
  const auto& x = arguments[0];
  for (std::int64_t r = 0; r < x.size(0); ++r) {
    float sum = 0;
    for (std::int64_t c = 0; c <= x.size(1); ++c) sum += data_of(x)[r * x.stride(0) + c];
    data_of(arguments[1])[r] = sum;
  }
  return {};
}

TEST(KernelReplay, AReadOutsideAnArgumentIsReportedIfThatMemoryWasBad) {
  const auto wide = at::full({10, 5}, kNaN);
  wide.narrow(1, 0, 4).fill_(1);
  const at::Tensor left = wide.narrow(1, 0, 4);
  EXPECT_EQ(beside_of(left), Beside::bad);
  RecordedKernelCall call = recorded(sums_beyond, {left, at::full({10}, 0.0F)});
  call.before[0] = left;  // including the memory between its rows
  const auto replay = replay_kernel(call, sums_beyond, {}, {.role = "out"});
  EXPECT_EQ(replay.conclusion, KernelConclusion::reads_outside);
  EXPECT_EQ(replay.bad, 10);
}

TEST(KernelReplay, OtherPartsOfAPackedTensorMayBeRead) {
  const auto packed = at::full({10, 5}, 1e30F);
  const at::Tensor left = packed.narrow(1, 0, 4);
  EXPECT_EQ(beside_of(left), Beside::finite);
  const ExecuteKernel kernel = [](const Tensors& arguments) {
    (void)sums_beyond(arguments);
    arguments[1].mul_(arguments[1]);  // an overflow of the memory that it has read
    return Tensors{};
  };
  RecordedKernelCall call = recorded(kernel, {left, at::full({10}, 0.0F)});
  call.before[0] = left;
  const auto replay = replay_kernel(call, kernel, {}, {.role = "out"});
  EXPECT_EQ(replay.conclusion, KernelConclusion::bad_again);
}

TEST(KernelReplay, AReadOfItsOwnUnwrittenMemoryIsReported) {
  const ExecuteKernel kernel = [](const Tensors& arguments) {
    arguments[1].copy_(arguments[0]);
    data_of(arguments[1])[7] += data_of(at::empty_like(arguments[0]))[7];
    return Tensors{};
  };
  auto call = recorded(kernel, {input(), at::full({40}, 0.0F)});
  data_of(call.after[1])[7] = kNaN;  // the value in that memory in training
  const auto replay = replay_kernel(call, kernel, {}, {.role = "out"});
  EXPECT_EQ(replay.conclusion, KernelConclusion::reads_unwritten);
}

TEST(KernelReplay, DifferentBadElementsEachTimeVary) {
  std::int64_t calls = 0;
  const ExecuteKernel kernel = [&](const Tensors& arguments) {
    (void)silu_except(0)(arguments);
    data_of(arguments[1])[calls++] = kNaN;
    return Tensors{};
  };
  const auto replay = replayed(kernel, {input(), at::full({40}, 0.0F)}, {kSilu});
  EXPECT_EQ(replay.conclusion, KernelConclusion::varies);
  EXPECT_EQ(replay.has_same_bits, false);
}

/// In float32: x / sqrt(mean(x^2)), and NaN if the mean is infinite.
Tensors norm(const Tensors& arguments) {
  const at::Tensor& x = arguments[0];
  const float mean = x.square().mean().item<float>();
  arguments[1].copy_(std::isinf(mean) ? x * kNaN : x / std::sqrt(mean));
  return {};
}

const KernelReference kNorm{
    "norm", [](const Tensors& in) { return Tensors{in[0] / in[0].square().mean().sqrt()}; }};

TEST(KernelReplay, AnIntermediateOverflowOfFloat32IsNotTheKernelsFault) {
  const auto replay = replayed(norm, {input() * 1e25F, at::full({40}, 0.0F)}, {kNorm});
  EXPECT_EQ(replay.conclusion, KernelConclusion::overflows);
  EXPECT_TRUE(replay.is_compared_scaled);
}

TEST(KernelReplay, AResultBeyondTheOutputsRangeIsNotTheKernelsFault) {
  const ExecuteKernel square = [](const Tensors& arguments) {
    arguments[1].copy_(arguments[0].square());
    return Tensors{};
  };
  const KernelReference reference{"square",
                                  [](const Tensors& in) { return Tensors{in[0].square()}; }};
  auto x = input();
  data_of(x)[3] = 1e30F;
  const auto replay = replayed(square, {x, at::full({40}, 0.0F)}, {reference});
  EXPECT_EQ(replay.conclusion, KernelConclusion::overflows);
}

TEST(KernelReplay, ABadInputIsNamed) {
  auto x = input();
  data_of(x)[3] = kNaN;
  const auto replay = replayed(silu_except(0), {x, at::full({40}, 0.0F)});
  EXPECT_EQ(replay.conclusion, KernelConclusion::given_bad);
  EXPECT_EQ(replay.argument, "x");
}

TEST(KernelReplay, TheArgumentsAreNotChanged) {
  const auto x = input();
  const auto call = recorded(silu_except(8), {x, at::full({40}, kNaN)});
  const auto before = call.before[0].clone();
  (void)replay_kernel(call, silu_except(8), {kSilu}, {.role = "out"});
  EXPECT_TRUE(call.before[0].equal(before));
  EXPECT_TRUE(call.before[1].isnan().all().item<bool>());
}

TEST(KernelReplay, ACallThatRaisesOrIsTooLargeIsNotReplayedAndSaysWhy) {
  const ExecuteKernel raising = [](const Tensors&) -> Tensors { throw Error("no such device"); };
  const auto call = recorded(silu_except(8), {input(), at::full({40}, kNaN)});
  const auto raised = replay_kernel(call, raising, {}, {.role = "out"});
  EXPECT_EQ(raised.conclusion, KernelConclusion::not_replayed);
  EXPECT_EQ(raised.problem, "no such device");
  const auto large = replay_kernel(call, silu_except(8), {}, {.role = "out", .bytes = 100});
  EXPECT_EQ(large.conclusion, KernelConclusion::not_replayed);
  EXPECT_NE(large.problem.find("take 320 bytes"), std::string::npos) << large.problem;
  EXPECT_THROW((void)replay_kernel(call, silu_except(8), {}, {.repeats = 0}), UsageError);
}

TEST(KernelReplay, ScansTheRestOfALargeBufferInBoundedMemory) {
  constexpr std::int64_t kMiB = std::int64_t{1} << 20;
  const at::Tensor buffer = at::full({16 * kMiB}, 0.0F);
  const at::Tensor part = buffer.narrow(0, 1000, 8 * kMiB).view({2048, 4096}).narrow(1, 0, 4000);
  const at::Tensor repeated = part.narrow(0, 7, 1).expand({50, 4000});
  auto& allocator = CountingAllocator::install();
  const auto before = allocator.current();
  allocator.restart_peak();
  EXPECT_EQ(beside_of(part), Beside::finite);
  data_of(repeated)[1] = kNaN;  // within both, in one of them 50 times
  EXPECT_EQ(beside_of(part), Beside::finite);
  EXPECT_EQ(beside_of(repeated), Beside::finite);
  data_of(buffer)[15 * kMiB] = kNaN;
  EXPECT_EQ(beside_of(part), Beside::bad);
  EXPECT_EQ(beside_of(repeated), Beside::bad);
  EXPECT_LE(allocator.peak() - before, kMiB);
}

TEST(KernelReplay, StopsAfterTheExecutionThatShowsThatAKernelIsTooSlow) {
  int calls = 0;
  const ExecuteKernel slow = [&](const Tensors& arguments) {
    ++calls;
    std::this_thread::sleep_for(std::chrono::milliseconds(400));
    return silu_except(8)(arguments);
  };
  const auto call = recorded(slow, {input(), at::full({40}, kNaN)});
  calls = 0;
  const auto replay = replay_kernel(call, slow, {}, {.role = "out", .seconds = 3});
  EXPECT_EQ(replay.conclusion, KernelConclusion::not_replayed);
  EXPECT_NE(replay.problem.find("9 are needed, and the limit is 3 s"), std::string::npos)
      << replay.problem;
  EXPECT_EQ(calls, 2);
}

/// Writes NaN where the product of its first two arguments is `kProduct`'s.
Tensors bad_product(const Tensors& arguments) {
  arguments[2].copy_(at::matmul(arguments[0], arguments[1]));
  data_of(arguments[2])[3] = kNaN;
  return {};
}

const KernelReference kProduct{"gemm",
                               [](const Tensors& in) { return Tensors{at::matmul(in[0], in[1])}; }};

KernelReplay replayed_within(const ReferenceLimit& limit) {
  const auto square = at::linspace(-1, 1, 400).view({20, 20});
  const auto call = recorded(bad_product, {square, square, at::full({20, 20}, 0.0F)});
  return replay_kernel(call, bad_product, {kProduct}, {.role = "out", .reference_limit = limit});
}

TEST(KernelReplay, AReferenceThatIsTooLargeIsSkippedAndSaysWhy) {
  EXPECT_EQ(replayed_within({}).conclusion, KernelConclusion::wrong_values);
  const auto slow = replayed_within({.flops_on_host = 15'000});
  EXPECT_EQ(slow.conclusion, KernelConclusion::bad_again);
  EXPECT_EQ(slow.reference, "");
  EXPECT_EQ(slow.problem, "gemm would compute 1.6e+04 FLOPs, more than the limit of 1.5e+04");
  const auto large = replayed_within({.bytes = 10'000});  // four matrices, and the comparison
  EXPECT_EQ(large.conclusion, KernelConclusion::bad_again);
  EXPECT_EQ(large.problem, "gemm would take 3.2e+04 bytes, more than the limit of 1e+04");
}

TEST(KernelReplay, NoReferenceIsExecutedWhenTheTimeIsUp) {
  const ExecuteKernel kernel = [](const Tensors& arguments) {
    (void)silu_except(0)(arguments);
    data_of(arguments[1])[5] = kNaN;
    return Tensors{};
  };
  const auto call = recorded(kernel, {input(), at::full({40}, 0.0F)});
  const auto began = std::chrono::steady_clock::now();
  (void)replay_kernel(call, kernel, {}, {.role = "out"});
  const std::chrono::duration<double> without = std::chrono::steady_clock::now() - began;
  const double seconds = std::max(1.0, 10 * without.count());  // enough even on a busy machine

  bool is_executed = false;
  const KernelReference slow{"slow", [&](const Tensors& in) {
                               std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
                               return Tensors{at::sin(in[0])};
                             }};
  const KernelReference late{"late", [&](const Tensors& in) {
                               is_executed = true;
                               return Tensors{at::silu(in[0])};
                             }};
  const auto replay =
      replay_kernel(call, kernel, {slow, late}, {.role = "out", .seconds = seconds});
  EXPECT_EQ(replay.conclusion, KernelConclusion::bad_again);
  EXPECT_EQ(replay.problem, "no time was left for late");
  EXPECT_FALSE(is_executed);
}

}  // namespace
}  // namespace nanlocator
