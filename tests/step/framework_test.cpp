// A StepDriver over a minimal framework: the defaults of the contract.
#include "nanlocator/step/framework.hpp"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "nanlocator/step/step_driver.hpp"
#include "temporary_folder.hpp"

namespace nanlocator::testing {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;

class OneWeight final : public Framework {
 public:
  ParameterMap parameter_map() override {
    ParameterInfo info;
    info.name = info.raw_name = "weight";
    info.shape = {2};
    info.dtype = "float32";
    return {data_parallel_coordinates(0, 1), {info}};
  }
  std::vector<GradientView> gradients() override { return {{0, weight.grad(), 0}}; }
  std::vector<GradientView> weights() override { return {{0, weight, 0}}; }
  std::vector<NamedTensor> parameters() override { return {{"weight", weight}}; }

  at::Tensor weight = at::full({2}, 1.0F).requires_grad_();
};

/// 0 / 0 in forward.
class Division final : public StepPass {
 public:
  Division(OneWeight& framework, std::optional<std::string> obstacle)
      : framework_(framework), obstacle_(std::move(obstacle)) {}

  std::vector<NamedTensor> run() override {
    ++runs;
    auto loss = (framework_.weight.mul(0).div(at::zeros({2}))).sum();
    loss.backward();
    return {{"loss", loss.detach()}};
  }
  void clear_gradients() override { framework_.weight.mutable_grad() = at::Tensor(); }
  std::optional<std::string> obstacle() override { return obstacle_; }

  int runs = 0;

 private:
  OneWeight& framework_;
  std::optional<std::string> obstacle_;
};

class FrameworkTest : public ::testing::Test {
 protected:
  /// One bad step; the pass has run once before the judgement.
  Decision judge(const std::shared_ptr<Division>& pass) {
    driver_.begin_pass(pass);
    (void)pass->run();
    return driver_.end_pass({});
  }

  TemporaryFolder folder_;
  std::shared_ptr<OneWeight> framework_ = std::make_shared<OneWeight>();
  StepDriver driver_{framework_, {.output_dir = folder_.path() / "run"}, nullptr};
};

TEST_F(FrameworkTest, NeedsNoCapabilityForTheOperatorToBeNamed) {
  const auto pass = std::make_shared<Division>(*framework_, std::nullopt);
  EXPECT_EQ(judge(pass), Decision::stop);
  EXPECT_GT(pass->runs, 1);
  ASSERT_EQ(driver_.verdict().origins.size(), 1U);
  EXPECT_EQ(driver_.verdict().origins[0].op, "aten::div.Tensor");
  EXPECT_EQ(pass.use_count(), 1);  // the step is over
}

TEST_F(FrameworkTest, APassThatMeetsAnObstacleIsNotExecutedAgain) {
  const auto pass = std::make_shared<Division>(*framework_, "its data are gone");
  EXPECT_EQ(judge(pass), Decision::stop);
  EXPECT_EQ(pass->runs, 1);
  EXPECT_THAT(driver_.verdict().notes, Contains(HasSubstr("its data are gone")));
}

TEST_F(FrameworkTest, IsAskedAgainForParametersThatHaveChanged) {
  framework_->weight = at::full({2}, 2.0F).requires_grad_();
  driver_.take_parameters_again();
  EXPECT_EQ(judge(std::make_shared<Division>(*framework_, "")), Decision::stop);
  EXPECT_TRUE(driver_.verdict().rerun.done);
}

}  // namespace
}  // namespace nanlocator::testing
