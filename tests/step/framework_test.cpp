// A StepDriver over a minimal framework: the defaults of the contract.
#include "nanlocator/step/framework.hpp"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "nanlocator/files/atomic_file.hpp"
#include "nanlocator/record/ledger.hpp"
#include "nanlocator/step/step_driver.hpp"
#include "nanlocator/watch/boundary_watch.hpp"
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
    cross(runs);
    auto loss = (framework_.weight.mul(0).div(at::zeros({2}))).sum();
    loss.backward();
    return {{"loss", loss.detach()}};
  }
  void clear_gradients() override { framework_.weight.mutable_grad() = at::Tensor(); }
  std::optional<std::string> obstacle() override { return obstacle_; }

  int runs = 0;
  std::function<void(int run)> cross = [](int) {};  // what it exchanges with other ranks

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

  Ledger ledger() {
    for (const auto& entry : std::filesystem::directory_iterator(driver_.locator().run_dir())) {
      const auto path = entry.path();
      if (!path.filename().string().starts_with("ledger_")) continue;
      return ledgers_from_jsonl(read_file(path), path.string()).at(0);
    }
    return {};
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

class PositionTest : public FrameworkTest {
 protected:
  PositionTest() : group_(watch_->add_group("tp", {0, 1})) {}

  void exchange(const at::Tensor& tensor) {
    if (driver_.is_rerunning()) return watch_->skip_collective(group_);
    const auto crossing = watch_->begin_collective(group_, "c10d::allreduce_", {&tensor, 1});
    watch_->was_issued(crossing);
    watch_->finish(crossing, {&tensor, 1});
  }

  std::shared_ptr<BoundaryWatch> watch_ = std::make_shared<BoundaryWatch>();
  CrossingGroup group_;
  std::shared_ptr<Division> pass_ = std::make_shared<Division>(*framework_, std::nullopt);
};

TEST_F(PositionTest, ABirthOfTheRerunAndASightingOfTheFirstPassAreCountedAlike) {
  driver_.watch(watch_);
  pass_->cross = [&](int) {
    exchange(at::ones({2}));
    exchange(at::full({2}, NAN));
    exchange(at::ones({2}));
  };
  EXPECT_EQ(judge(pass_), Decision::stop);
  const Ledger seen = ledger();
  ASSERT_GE(seen.sightings.size(), 2U);
  EXPECT_EQ(seen.sightings[0].role, "sent");
  EXPECT_EQ(seen.sightings[0].position, 1);
  EXPECT_EQ(seen.sightings[1].position, 2);  // received
  ASSERT_FALSE(seen.births.empty());
  EXPECT_EQ(seen.births[0].sighting.op, "aten::div.Tensor");
  EXPECT_EQ(seen.births[0].sighting.position, 3);
  for (const Sighting& each : seen.sightings) {  // after the pass
    if (each.phase >= Phase::grad_local) EXPECT_EQ(each.position, std::nullopt);
  }
}

TEST_F(PositionTest, ARerunThatExchangesSomethingElseHasBirthsWithoutPosition) {
  driver_.watch(watch_);
  pass_->cross = [&](int run) {
    exchange(at::ones({2}));
    if (run == 1) exchange(at::full({2}, NAN));  // only once: the shapes of messages
  };
  EXPECT_EQ(judge(pass_), Decision::stop);
  const Ledger seen = ledger();
  EXPECT_EQ(seen.sightings.at(0).position, 1);
  ASSERT_FALSE(seen.births.empty());
  EXPECT_EQ(seen.births[0].sighting.position, std::nullopt);
}

TEST_F(PositionTest, WithoutAWatchOfBoundariesNothingHasAPosition) {
  watch_->begin_pass();  // of another optimizer of this process
  pass_->cross = [&](int) { exchange(at::ones({2})); };
  EXPECT_EQ(judge(pass_), Decision::stop);
  ASSERT_FALSE(ledger().births.empty());
  EXPECT_EQ(ledger().births[0].sighting.position, std::nullopt);
}

}  // namespace
}  // namespace nanlocator::testing
