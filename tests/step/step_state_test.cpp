#include "nanlocator/step/step_state.hpp"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "nanlocator/error.hpp"

namespace nanlocator {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(StepState, TheSameRandomNumbersComeAgain) {
  StepState state;
  state.save();
  const auto first = at::rand({16});
  (void)at::rand({3});
  EXPECT_THAT(state.restore(), IsEmpty());
  EXPECT_TRUE(at::equal(at::rand({16}), first));
  EXPECT_THAT(state.restore(), IsEmpty());  // may be repeated
  EXPECT_TRUE(at::equal(at::rand({16}), first));
}

TEST(StepState, SmallBuffersComeBackThoughTheirVersionDoesNotTell) {
  auto running_mean = at::ones({4});
  StepState state;
  state.set_buffers([&] { return std::vector<NamedTensor>{{"running_mean", running_mean}}; });
  state.save();
  running_mean.data_ptr<float>()[2] = 7;  // as a kernel writes, without a new version
  EXPECT_THAT(state.restore(), IsEmpty());
  EXPECT_TRUE(at::equal(running_mean, at::ones({4})));
}

TEST(StepState, LargeBuffersComeBackToTheirContentsOfTheLatestSave) {
  auto table = at::arange(1 << 17).to(at::kFloat);
  const auto before = table.clone();
  StepState state;
  state.set_buffers([&] { return std::vector<NamedTensor>{{"table", table}}; });
  state.save();
  table.add_(1);
  state.save();  // a good step: its end is the state to restore
  const auto after_first_step = table.clone();
  table.mul_(0);
  EXPECT_THAT(state.restore(), IsEmpty());
  EXPECT_TRUE(at::equal(table, after_first_step));
  EXPECT_FALSE(at::equal(table, before));
}

TEST(StepState, ABufferThatWasGivenAnotherDtypeKeepsItsPrecision) {
  auto buffer = at::zeros({2}, at::kBFloat16);
  StepState state;
  state.set_buffers([&] { return std::vector<NamedTensor>{{"expert_bias", buffer}}; });
  state.save();
  buffer.set_data(at::full({2}, 1.0 / 3.0, at::kFloat));  // as a module does in its first forward
  state.save();
  buffer.zero_();
  EXPECT_TRUE(state.restore().empty());
  EXPECT_TRUE(at::equal(buffer, at::full({2}, 1.0 / 3.0, at::kFloat)));
}

TEST(StepState, OfABufferThatWasReplacedTheOneOfTheLastSaveIsPutBack) {
  auto average = at::ones({4});
  const auto scale = at::ones({4});
  StepState state;
  state.set_buffers([&] {
    return std::vector<NamedTensor>{{"nobody's", {}}, {"average", average}, {"scale", scale}};
  });
  state.save();
  average = average * 3;
  state.save();
  average.zero_();
  scale.zero_();
  EXPECT_THAT(state.restore(), IsEmpty());
  EXPECT_TRUE(at::equal(average, at::full({4}, 3.0)));
  EXPECT_TRUE(at::equal(scale, at::ones({4})));
}

TEST(StepState, WhatCannotBePutBackIsNamedAndTheRestIsPutBack) {
  int value = 1;
  int saved = 0;
  StepState state;
  state.add(
      "the sampler", [] {}, [] { throw UsageError("cannot seek"); });
  state.add(
      "the counter", [&] { saved = value; }, [&] { value = saved; });
  state.save();
  value = 5;
  EXPECT_THAT(state.restore(), ElementsAre("the sampler: cannot seek"));
  EXPECT_EQ(value, 1);
}

TEST(StepState, StateThatCouldNotBeSavedIsNotRestored) {
  bool was_called = false;
  StepState state;
  state.add(
      "the stream", [] { throw UsageError("not seekable"); }, [&] { was_called = true; });
  state.save();
  EXPECT_THAT(state.restore(), ElementsAre(HasSubstr("not seekable")));
  EXPECT_FALSE(was_called);
}

TEST(StepState, RestoreBeforeSaveIsWrongUse) {
  StepState state;
  EXPECT_THROW((void)state.restore(), UsageError);
}

}  // namespace
}  // namespace nanlocator
