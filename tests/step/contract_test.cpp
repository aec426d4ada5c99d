// The contract of a step, for the C++ LocatingOptimizer: the same cases, under the same names, as
// tests/step/test_contract.py checks for the Python adapters. Left out here: routine_overflow
// (libtorch has no GradScaler), remove_in_the_middle (there is no `remove`),
// torchs_clip_inside_the_pass (libtorch's is a template, which cannot be intercepted).
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/sgd.h>

#include <functional>
#include <limits>
#include <memory>
#include <stdexcept>

#include "nanlocator/step/locating_optimizer.hpp"
#include "temporary_folder.hpp"

namespace nanlocator::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

struct Linear : torch::nn::Module {
  Linear() {
    at::manual_seed(0);
    weight = register_parameter("weight", at::randn({1, 4}) * 0.3);
    bias = register_parameter("bias", at::zeros({1}));
  }
  at::Tensor weight, bias;
};

at::Tensor batch_of_eight(int number) {
  at::manual_seed(1000 + number);
  return at::randn({8, 4});
}

/// A loop of SGD steps; `fault` is called after each backward with the step (from 1) and the step's
/// execution (from 1).
class Loop {
 public:
  Loop(const TemporaryFolder& folder, bool with_closure, Policy policy, bool is_watched = true)
      : folder_(folder.path()), with_closure_(with_closure) {
    inner_ = std::make_shared<torch::optim::SGD>(model->parameters(),
                                                 torch::optim::SGDOptions(0.1).momentum(0.9));
    if (is_watched) watch({.on_bad = policy});
  }

  void watch(LocatorOptions options) {
    options.output_dir = folder_ / "run";
    optimizer.reset();
    optimizer = std::make_unique<LocatingOptimizer>(inner_, *model, options);
  }

  /// Forward and backward over `microbatches` batches, then the update.
  void step() {
    ++number;
    int execution = 0;
    const auto forward_backward = [&] {
      ++execution;
      optimizer ? optimizer->zero_grad() : inner_->zero_grad();
      at::Tensor total = at::zeros({});
      for (int i = 0; i < microbatches; ++i) {
        const auto input = batch_of_eight(100 * number + i);
        auto loss = (input.matmul(model->weight.t()) + model->bias - input.sum(1, true)).square();
        auto mean = loss.mean();
        mean.backward();
        total = total + mean.detach();
      }
      fault(number, execution);
      if (clip) clip();
      return total;
    };
    if (!with_closure_) {
      forward_backward();
      optimizer ? optimizer->step() : inner_->step();
    } else {
      optimizer ? optimizer->step(forward_backward) : inner_->step(forward_backward);
    }
  }

  [[nodiscard]] std::vector<float> weights() const {
    const auto flat = model->weight.detach();
    return {flat.const_data_ptr<float>(), flat.const_data_ptr<float>() + flat.numel()};
  }
  [[nodiscard]] std::vector<std::int64_t> found() const {
    std::vector<std::int64_t> iterations;
    for (const auto& verdict : optimizer->locator().verdicts()) {
      iterations.push_back(verdict.iteration);
    }
    return iterations;
  }
  /// A bit error: no operator writes it.
  void corrupt() const {
    model->weight.mutable_grad().mutable_data_ptr<float>()[2] =
        std::numeric_limits<float>::quiet_NaN();
  }
  /// Makes these steps bad, on their first execution or on each.
  void corrupt_in(std::vector<int> steps, bool each_time = true) {
    fault = [=, this](int step, int execution) {
      const bool is_due = std::ranges::find(steps, step) != steps.end();
      if (is_due && (each_time || execution == 1)) corrupt();
    };
  }

  std::shared_ptr<Linear> model = std::make_shared<Linear>();
  std::unique_ptr<LocatingOptimizer> optimizer;
  std::function<void(int, int)> fault = [](int, int) {};
  std::function<void()> clip;
  int microbatches = 1;
  int number = 0;

 private:
  std::filesystem::path folder_;
  bool with_closure_;
  std::shared_ptr<torch::optim::SGD> inner_;
};

class Contract : public ::testing::TestWithParam<bool> {
 protected:
  Loop loop(Policy policy = Policy::stop) const { return {folder_, GetParam(), policy}; }
  Loop unwatched() const { return {folder_, GetParam(), Policy::stop, false}; }

  TemporaryFolder folder_;
};

INSTANTIATE_TEST_SUITE_P(Cpp, Contract, ::testing::Bool(), [](const auto& info) {
  return info.param ? "with_closure" : "without_closure";
});

TEST_P(Contract, healthy) {
  auto watched = loop();
  auto alone = unwatched();
  for (int i = 0; i < 5; ++i) {
    watched.step();
    alone.step();
  }
  EXPECT_EQ(watched.weights(), alone.weights());
  EXPECT_THAT(watched.found(), IsEmpty());
}

TEST_P(Contract, bad) {
  auto watched = loop();
  watched.corrupt_in({2});
  watched.step();
  const auto before = watched.weights();
  try {
    watched.step();
    FAIL() << "a bad step went on";
  } catch (const NonFiniteGradientError& error) {
    EXPECT_EQ(error.verdict().iteration, 2);
    EXPECT_EQ(error.verdict().origins.at(0).parameter, "weight");
    EXPECT_EQ(error.verdict().rerun.done, GetParam());
  }
  EXPECT_EQ(watched.weights(), before);
}

TEST_P(Contract, bad_twice_in_a_row) {
  auto watched = loop(Policy::skip);
  watched.corrupt_in({2, 3});
  for (int i = 0; i < 4; ++i) watched.step();
  EXPECT_THAT(watched.found(), ElementsAre(2, 3));
}

TEST_P(Contract, policy_stop) {
  auto watched = loop();
  watched.corrupt_in({1, 3});
  EXPECT_THROW(watched.step(), NonFiniteGradientError);
  const auto before = watched.weights();
  watched.step();  // a caller that continues gets a fresh step
  EXPECT_NE(watched.weights(), before);
  EXPECT_THROW(watched.step(), NonFiniteGradientError);
  EXPECT_THAT(watched.found(), ElementsAre(1, 3));
}

TEST_P(Contract, policy_report) {
  auto watched = loop(Policy::report);
  watched.corrupt_in({2});
  watched.step();
  watched.step();
  EXPECT_THAT(watched.found(), ElementsAre(2));
  EXPECT_TRUE(std::isnan(watched.weights().at(2)));
}

TEST_P(Contract, policy_skip) {
  auto watched = loop(Policy::skip);
  watched.corrupt_in({2});
  watched.step();
  const auto before = watched.weights();
  watched.step();
  EXPECT_EQ(watched.weights(), before);
  watched.step();
  EXPECT_NE(watched.weights(), before);
  EXPECT_THAT(watched.found(), ElementsAre(2));
}

TEST_P(Contract, policy_recover) {
  auto watched = loop(Policy::recover);
  watched.corrupt_in({2}, /*each_time=*/false);
  watched.step();
  if (!GetParam()) {  // no pass to execute again
    EXPECT_THROW(watched.step(), NonFiniteGradientError);
    return;
  }
  auto alone = unwatched();
  alone.step();
  for (int i = 0; i < 2; ++i) {
    watched.step();
    alone.step();
  }
  EXPECT_EQ(watched.weights(), alone.weights());
  EXPECT_THAT(watched.found(), ElementsAre(2));
}

TEST_P(Contract, policy_recover_stops_where_it_repeats) {
  auto watched = loop(Policy::recover);
  watched.corrupt_in({1});
  EXPECT_THROW(watched.step(), NonFiniteGradientError);
}

TEST_P(Contract, exception_in_the_pass) {
  auto watched = loop();
  watched.step();
  watched.fault = [](int step, int) {
    if (step == 2) throw std::runtime_error("the user's own");
  };
  EXPECT_THROW(watched.step(), std::runtime_error);
  watched.corrupt_in({4});
  watched.step();
  EXPECT_THROW(watched.step(), NonFiniteGradientError);
  EXPECT_THAT(watched.found(), ElementsAre(3));  // not counting the one that raised
}

TEST_P(Contract, exception_in_the_pass_does_not_leave_its_closure_behind) {
  auto watched = loop();
  watched.corrupt_in({1});
  EXPECT_THROW(watched.step(), NonFiniteGradientError);
  // If step 1's destroyed closure still existed, this bad step would be executed again with it.
  watched.optimizer->zero_grad();
  watched.corrupt_in({});
  (watched.model->weight.sum() + watched.model->bias.sum()).backward();
  watched.corrupt();
  try {
    watched.optimizer->step();
    FAIL() << "a bad step went on";
  } catch (const NonFiniteGradientError& error) {
    EXPECT_FALSE(error.verdict().rerun.done);
  }
}

TEST_P(Contract, options_changed) {
  auto watched = loop(Policy::report);
  watched.corrupt_in({1, 2});
  watched.step();
  watched.model->weight.mutable_grad().zero_();
  watched.watch({.on_bad = Policy::skip, .rerun = RerunPolicy::never});
  const auto before = watched.weights();
  watched.step();
  EXPECT_EQ(std::isnan(watched.weights().at(0)), std::isnan(before.at(0)));
  EXPECT_THAT(watched.found(), ElementsAre(1));  // of the new optimizer
}

TEST_P(Contract, two_optimizers) {
  auto one = loop(Policy::skip);
  auto other = loop(Policy::skip);
  one.corrupt_in({2});
  other.corrupt_in({3});
  for (int i = 0; i < 4; ++i) {
    one.step();
    other.step();
  }
  EXPECT_THAT(one.found(), ElementsAre(2));
  EXPECT_THAT(other.found(), ElementsAre(3));
}

TEST_P(Contract, gradient_accumulation) {
  auto watched = loop(Policy::recover);
  auto alone = unwatched();
  watched.microbatches = alone.microbatches = 3;
  if (GetParam()) watched.corrupt_in({2}, /*each_time=*/false);
  for (int i = 0; i < 3; ++i) {
    watched.step();
    alone.step();
  }
  EXPECT_EQ(watched.weights(), alone.weights());
}

TEST_P(Contract, clip_inside_the_pass) {
  auto watched = loop(Policy::recover);
  auto alone = unwatched();
  watched.clip = [&] { (void)watched.optimizer->clip_grad_norm(0.1); };
  alone.clip = [&] { (void)torch::nn::utils::clip_grad_norm_(alone.model->parameters(), 0.1); };
  if (GetParam()) watched.corrupt_in({2}, /*each_time=*/false);
  for (int i = 0; i < 3; ++i) {
    watched.step();
    alone.step();
  }
  EXPECT_EQ(watched.weights(), alone.weights());
  watched.corrupt_in({4});
  try {
    watched.step();
    FAIL() << "a bad step went on";
  } catch (const NonFiniteGradientError& error) {
    const auto& origin = error.verdict().origins.at(0);
    EXPECT_EQ(origin.parameter, "weight");
    EXPECT_EQ(origin.tensor.value().nan, 1);  // not the value after the clip
    EXPECT_EQ(error.verdict().rerun.done, GetParam());
    if (GetParam()) EXPECT_EQ(error.verdict().rerun.reproduced, true);
  }
}

}  // namespace
}  // namespace nanlocator::testing
