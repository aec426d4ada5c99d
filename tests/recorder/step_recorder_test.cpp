#include "nanlocator/recorder/step_recorder.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <thread>

#include "nanlocator/error.hpp"

namespace nanlocator {
namespace {

using testing::HasSubstr;

/// Clears gradients and executes `events` again. `root` is the root of their only backward; `call`
/// executes each call.
void execute(
    const std::vector<std::shared_ptr<const RecordedEvent>>& events, const RecordedValue& root,
    const std::function<void(StepReplay&, const RecordedEvent&)>& call = [](auto&, auto&) {}) {
  StepReplay replay(events);
  for (const auto& event : replay.events()) {
    if (event->is_operator()) {
      replay.execute(*event);
    } else if (event->payload() != nullptr) {
      call(replay, *event);
    } else {
      replay.tensor(root).backward();
    }
    replay.leave(*event);
  }
}

class StepRecorderTest : public testing::Test {
 protected:
  /// The result of `make` as earlier data, or as the result of unrecorded code.
  at::Tensor unrecorded(const std::function<at::Tensor()>& make) {
    recorder.pause();
    at::Tensor made = make();
    recorder.resume();
    return made;
  }

  /// Backward of `loss`, as an integration records it.
  RecordedValue differentiate(const at::Tensor& loss) {
    const auto root = recorder.value_of(loss);
    recorder.pause();
    loss.backward();
    recorder.resume();
    recorder.add_backward(nullptr, std::vector<at::Tensor>{loss});
    return root.value();
  }

  at::Tensor weight = at::tensor({2.0, -3.0}).requires_grad_();
  StepRecorder recorder{RecorderOptions{}};
};

TEST_F(StepRecorderTest, ALossIsComputedAgainThoughItsBatchHasBeenOverwritten) {
  at::Tensor batch = unrecorded([] { return at::tensor({5.0, 7.0}); });
  const auto root = differentiate((weight * batch).sum());
  batch.fill_(100.0);  // the next batch, loaded into the same memory
  weight.mutable_grad().reset();

  ASSERT_EQ(recorder.problem(), "");
  execute(recorder.needed(), root);
  EXPECT_TRUE(at::equal(weight.grad(), at::tensor({5.0, 7.0})));
}

TEST_F(StepRecorderTest, RandomNumbersAreDrawnAgainAsTheyWereDrawn) {
  const auto root = differentiate(at::dropout(weight * at::ones(2), 0.5, true).sum());
  const at::Tensor first = weight.grad().clone();
  weight.mutable_grad().reset();

  execute(recorder.needed(), root);
  EXPECT_TRUE(at::equal(weight.grad(), first));
}

TEST_F(StepRecorderTest, WhatACallReturnsInTheReplayIsReadByTheOperatorsAfterIt) {
  const at::Tensor output = unrecorded([&] { return weight * 4.0; });
  recorder.add_call(std::make_shared<int>(1), std::vector<at::Tensor>{},
                    std::vector<at::Tensor>{output});
  const auto root = differentiate((output * at::tensor({1.0, 10.0})).sum());
  weight.mutable_grad().reset();

  int calls = 0;
  execute(recorder.needed(), root, [&](StepReplay& replay, const RecordedEvent& event) {
    ++calls;
    replay.set_outputs(event, std::vector<at::Tensor>{weight * 6.0});
  });
  EXPECT_EQ(calls, 1);
  EXPECT_TRUE(at::equal(weight.grad(), at::tensor({6.0, 60.0})));
}

TEST_F(StepRecorderTest, WhatIsComputedWithoutGradientForTheLossIsComputedAgain) {
  const at::Tensor batch = unrecorded([] { return at::tensor({5.0, 7.0}); });
  at::Tensor target;
  {
    const at::NoGradGuard no_grad;
    target = batch * 2.0;
  }
  const auto root = differentiate((weight * target).sum());
  const auto maker = recorder.value_of(target);
  ASSERT_TRUE(maker);
  EXPECT_THAT(recorder.needed(), testing::Contains(maker->event));
  weight.mutable_grad().reset();

  execute(recorder.needed(), root);
  EXPECT_TRUE(at::equal(weight.grad(), at::tensor({10.0, 14.0})));
}

TEST_F(StepRecorderTest, DataThatTheLoopWritesInPlaceIsWrittenAgain) {
  at::Tensor batch = unrecorded([] { return at::tensor({5.0, 7.0}); });
  batch.sub_(1.0).mul_(2.0);
  const auto root = differentiate((weight * batch).sum());
  ASSERT_EQ(recorder.problem(), "");
  for (int execution = 0; execution < 2; ++execution) {
    weight.mutable_grad().reset();
    execute(recorder.needed(), root);
    EXPECT_TRUE(at::equal(weight.grad(), at::tensor({8.0, 12.0})));
  }
  EXPECT_TRUE(at::equal(batch, at::tensor({8.0, 12.0})));
}

TEST_F(StepRecorderTest, StateThatTheLoopKeepsOverStepsIsNotCopiedInEachStep) {
  at::Tensor average = unrecorded([] { return at::zeros(2); });
  for (int step = 0; step < 3; ++step) {
    differentiate((weight * average).sum());
    recorder.begin_step();
    average.mul_(0.9).add_(1.0);
  }
  EXPECT_FALSE(recorder.value_of(average));
}

TEST_F(StepRecorderTest, OperatorsThatNoGradientNeedsAreNotExecutedAgain) {
  const at::Tensor logged = (weight * 3.0).sum();
  differentiate((weight * 2.0).sum());
  for (const auto& event : recorder.needed()) EXPECT_NE(event, recorder.value_of(logged)->event);
  EXPECT_EQ(recorder.needed().size(), 3U);  // mul, sum, and the backward
}

TEST_F(StepRecorderTest, TheOutputOfCodeThatWasNotRecordedIsAProblem) {
  differentiate(unrecorded([&] { return weight * 2.0; }).sum());
  EXPECT_THAT(recorder.problem(), HasSubstr("a tensor of MulBackward"));
}

TEST_F(StepRecorderTest, DataThatIsTooLargeForACopyIsAProblemOnceItIsOverwritten) {
  at::Tensor table = unrecorded([] { return at::ones({2, 200'000}, at::kDouble); });
  differentiate((weight.unsqueeze(1) * table).sum());
  ASSERT_EQ(recorder.problem(), "");
  table.zero_();
  EXPECT_THAT(recorder.problem(), HasSubstr("aten::mul has read was overwritten"));
}

TEST_F(StepRecorderTest, ANewStepBeginsWithoutTheEventsOfTheOneBefore) {
  differentiate((weight * 2.0).sum());
  recorder.begin_step();
  EXPECT_TRUE(recorder.needed().empty());
  EXPECT_EQ(recorder.backwards(), 0);
}

TEST(StepRecorderOfAThreadTest, IsDestroyedByAnother) {
  auto recorder = std::make_unique<StepRecorder>(RecorderOptions{});
  std::thread([&] { recorder.reset(); }).join();
  EXPECT_EQ((at::ones(2) + 1).sum().item<double>(), 4.0);  // observed by nobody

  StepRecorder next{RecorderOptions{}};
  EXPECT_TRUE(next.value_of(at::ones(2) + 1).has_value());
}

TEST_F(StepRecorderTest, AThreadHasOneRecorderAtATime) {
  EXPECT_THROW(StepRecorder{RecorderOptions{}}, UsageError);
  recorder.close();
  EXPECT_NO_THROW(StepRecorder{RecorderOptions{}});
}

}  // namespace
}  // namespace nanlocator
