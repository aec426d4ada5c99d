// The re-run of a bad step, through the C++ LocatingOptimizer and its LossClosure.
#include "nanlocator/step/step_rerun.hpp"

#include <ATen/ops/dropout.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>

#include <limits>

#include "gradients/tensors.hpp"
#include "nanlocator/record/bundle.hpp"
#include "nanlocator/step/locating_optimizer.hpp"
#include "temporary_folder.hpp"

namespace nanlocator::testing {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;

struct Encoder : torch::nn::Module {
  Encoder() {
    weight = register_parameter("weight", at::full({3, 3}, 0.5));
    mean = register_buffer("mean", at::zeros({3}));
  }
  at::Tensor weight, mean;
};

struct Model : torch::nn::Module {
  Model() { encoder = register_module("encoder", std::make_shared<Encoder>()); }

  at::Tensor loss(const at::Tensor& input) const {
    {
      const at::NoGradGuard no_grad;
      encoder->mean.mul_(0.9).add_(input.mean(0), 0.1);
    }
    const auto hidden = at::dropout(input.matmul(encoder->weight), 0.5, true) - encoder->mean;
    return (hidden * gate).square().sum(1).sqrt().sum();
  }

  std::shared_ptr<Encoder> encoder;
  double gate = 1;  // 0: the root's argument is zero, so its gradient is Inf times zero
};

class StepRerunTest : public ::testing::Test {
 protected:
  LocatorOptions options(Policy policy = Policy::stop) const {
    return {.on_bad = policy, .output_dir = folder_.path() / "run"};
  }
  std::shared_ptr<torch::optim::SGD> sgd() const {
    return std::make_shared<torch::optim::SGD>(model_->parameters(), 0.01);
  }

  TemporaryFolder folder_;
  std::shared_ptr<Model> model_ = std::make_shared<Model>();
  at::Tensor input_ = at::ones({4, 3});
};

TEST_F(StepRerunTest, AClosureIsRepeatedAndTheOperatorOfTheBackwardFaultIsNamed) {
  LocatingOptimizer optimizer(sgd(), *model_, options());
  int calls = 0;
  const auto closure = [&] {
    ++calls;
    optimizer.zero_grad();
    auto loss = model_->loss(input_);
    loss.backward();
    return loss;
  };
  optimizer.step(closure);
  EXPECT_EQ(calls, 1);
  model_->gate = 0;
  try {
    optimizer.step(closure);
    FAIL() << "a bad step went on";
  } catch (const NonFiniteGradientError& error) {
    const auto& verdict = error.verdict();
    EXPECT_TRUE(verdict.rerun.done);
    EXPECT_EQ(verdict.rerun.reproduced, true);
    ASSERT_EQ(verdict.origins.size(), 1u);
    const auto& origin = verdict.origins.front();
    EXPECT_THAT(origin.op, HasSubstr("aten::div"));
    EXPECT_EQ(origin.direction, Direction::backward);
    EXPECT_EQ(origin.module, "encoder");  // owner of the last used parameter
    EXPECT_EQ(origin.cause, Cause::operator_undefined);
    const OpenBundle bundle(folder_.path() / "run" / "a0" / origin.bundle);
    EXPECT_EQ(bundle.bundle().operator_call->op, origin.op);
    EXPECT_TRUE(bundle.verify().empty());
  }
  EXPECT_EQ(calls, 4);  // the good step, the bad one, its repeat, and one with filled fresh memory
}

TEST_F(StepRerunTest, AFaultOfTheFirstPassAloneIsNotReproduced) {
  LocatingOptimizer optimizer(sgd(), *model_, options());
  int calls = 0;
  try {
    optimizer.step([&] {
      optimizer.zero_grad();
      auto loss = model_->loss(input_);
      loss.backward();
      if (++calls == 1) {
        model_->encoder->weight.mutable_grad().data_ptr<float>()[4] =
            std::numeric_limits<float>::quiet_NaN();
      }
      return loss;
    });
    FAIL() << "a bad step went on";
  } catch (const NonFiniteGradientError& error) {
    EXPECT_EQ(error.verdict().rerun.reproduced, false);
    ASSERT_EQ(error.verdict().origins.size(), 1u);
    EXPECT_EQ(error.verdict().origins[0].cause, Cause::not_reproduced);
    EXPECT_EQ(error.verdict().origins[0].parameter, "encoder.weight");
  }
  EXPECT_EQ(calls, 4);  // bad, traced, with filled fresh memory, control
}

TEST_F(StepRerunTest, RepeatingEveryStepLeavesWeightsBuffersAndGeneratorAsTheyWouldBe) {
  const auto train = [&](RerunPolicy policy) {
    at::manual_seed(5);
    auto model = std::make_shared<Model>();
    auto chosen = options();
    chosen.rerun = policy;
    LocatingOptimizer optimizer(std::make_shared<torch::optim::SGD>(model->parameters(), 0.01),
                                *model, chosen);
    for (int step = 0; step < 5; ++step) {
      optimizer.step([&] {
        optimizer.zero_grad();
        auto loss = model->loss(at::randn({4, 3}));
        loss.backward();
        return loss;
      });
    }
    return std::array{model->encoder->weight.detach().clone(), model->encoder->mean.clone(),
                      at::rand({4})};
  };
  const auto plain = train(RerunPolicy::never);
  ::testing::internal::CaptureStderr();
  const auto repeated = train(RerunPolicy::always);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
  for (std::size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(at::equal(plain[i], repeated[i])) << i;
}

TEST_F(StepRerunTest, WithoutAClosureTheNextBadStepIsTraced) {
  LocatingOptimizer optimizer(sgd(), *model_, options(Policy::report));
  model_->gate = 0;
  const auto bad_step = [&] {
    optimizer.zero_grad();
    model_->loss(input_).backward();
    optimizer.step();
  };
  bad_step();
  const auto first = optimizer.locator().verdicts().back();
  EXPECT_FALSE(first.rerun.done);
  EXPECT_EQ(first.origins.at(0).op, "");
  EXPECT_THAT(first.notes, Contains(HasSubstr("without a closure")));
  {
    const at::NoGradGuard no_grad;
    model_->encoder->weight.fill_(0.5);
  }
  bad_step();
  EXPECT_THAT(optimizer.locator().verdicts().back().origins.at(0).op, HasSubstr("aten::div"));
}

TEST_F(StepRerunTest, LevelModulesIsRefusedInCpp) {
  auto chosen = options();
  chosen.level = Level::modules;
  EXPECT_THROW(LocatingOptimizer(sgd(), *model_, chosen), UsageError);
}

TEST_F(StepRerunTest, BundlesStayWithinTheirBudget) {
  auto chosen = options();
  chosen.bundle_bytes = 8;
  LocatingOptimizer optimizer(sgd(), *model_, chosen);
  model_->gate = 0;
  try {
    optimizer.step([&] {
      optimizer.zero_grad();
      auto loss = model_->loss(input_);
      loss.backward();
      return loss;
    });
    FAIL() << "a bad step went on";
  } catch (const NonFiniteGradientError& error) {
    EXPECT_EQ(error.verdict().origins.at(0).bundle, "");
    EXPECT_THAT(error.verdict().notes, Contains(HasSubstr("budget")));
  }
  EXPECT_FALSE(std::filesystem::exists(folder_.path() / "run" / "a0" / "bundles"));
}

}  // namespace
}  // namespace nanlocator::testing
