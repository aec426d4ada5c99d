#include "gradients/gradient_history.hpp"

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "gradients/tensors.hpp"
#include "nanlocator/error.hpp"
#include "nanlocator/gradients/gradient_scanner.hpp"

namespace nanlocator::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::FloatEq;
using ::testing::IsEmpty;
using ::testing::IsNan;
using ::testing::SizeIs;

// ---- the ring ----

TensorStats of_value(double value) {
  TensorStats stats;
  stats.numel = 4;
  stats.absmax = value;
  stats.sum_of_squares = 4 * value * value;
  return stats;
}

TEST(GradientHistory, KeepsTheLatestSteps) {
  const auto map = map_of({{4}});
  GradientHistory history(1);
  for (std::int64_t step = 1; step <= 200; ++step) {
    ASSERT_TRUE(history.begin(Phase::grad_local, step));
    history.set(0, of_value(static_cast<double>(step)), 1);
  }
  const auto kept = history.to_history(map);
  ASSERT_THAT(kept.iterations, SizeIs(kHistorySteps));
  for (std::size_t i = 0; i < kHistorySteps; ++i) {
    const float expected = static_cast<float>(200 - kHistorySteps + 1 + i);
    EXPECT_EQ(kept.iterations[i], static_cast<std::int64_t>(expected));
    EXPECT_EQ(kept.parameters[0].absmax[i], expected);
    EXPECT_EQ(kept.parameters[0].norm[i], 2 * expected);
  }
}

TEST(GradientHistory, ARepeatedStepReplacesItsFirstExecution) {
  GradientHistory history(1);
  for (const std::int64_t step : {5, 6, 7, 6}) {
    ASSERT_TRUE(history.begin(Phase::grad_local, step));
    history.set(0, of_value(static_cast<double>(10 * step)), 1);
  }
  EXPECT_THAT(history.to_history(map_of({{4}})).iterations, ElementsAre(5, 6));
}

TEST(GradientHistory, DoesNotMixPhases) {
  GradientHistory history(1);
  EXPECT_TRUE(history.begin(Phase::grad_norm, 1));
  EXPECT_TRUE(history.begin(Phase::grad_local, 2))
      << "the phase before the reduction is worth more";
  EXPECT_FALSE(history.begin(Phase::grad_norm, 3));
  const auto kept = history.to_history(map_of({{4}}));
  EXPECT_EQ(kept.phase, "grad_local");
  EXPECT_THAT(kept.iterations, ElementsAre(2));
  EXPECT_THAT(kept.parameters, IsEmpty()) << "no parameter was seen";
}

TEST(GradientHistory, NumbersBeyondAFloatAreItsLargest) {
  GradientHistory history(1);
  history.begin(Phase::grad_local, 1);
  history.set(0, of_value(1e150), 1);
  const auto kept = history.to_history(map_of({{4}}));
  EXPECT_EQ(kept.parameters[0].norm[0], std::numeric_limits<float>::max());
  EXPECT_EQ(kept.parameters[0].absmax[0], std::numeric_limits<float>::max());
}

// ---- the scanner ----

class RememberingScanner : public ::testing::Test {
 protected:
  /// A step with one tensor per parameter; an undefined one is not scanned.
  void step(std::int64_t iteration, const std::vector<at::Tensor>& gradients,
            Phase phase = Phase::grad_local) {
    scanner_.begin_step();
    scan(gradients, phase);
    scanner_.remember(iteration);
  }
  void scan(const std::vector<at::Tensor>& gradients, Phase phase) {
    for (std::size_t i = 0; i < gradients.size(); ++i) {  // a group each, like buckets
      if (!gradients[i].defined()) continue;
      scanner_.scan(phase, i, "grad",
                    std::vector{GradientView{static_cast<std::int64_t>(i), gradients[i]}});
    }
  }

  ParameterMap map_ = map_of({{4}, {9}});
  GradientScanner scanner_{map_};
};

TEST_F(RememberingScanner, CollectsEachStepWhenTheNextBegins) {
  step(1, {at::full({4}, 3.0), at::full({9}, -2.0)});
  step(2, {at::full({4}, 5.0), {}});
  auto history = scanner_.history();
  EXPECT_THAT(history.iterations, ElementsAre(1, 2));
  ASSERT_THAT(history.parameters, SizeIs(2));
  EXPECT_THAT(history.parameters[0].absmax, ElementsAre(3, IsNan())) << "step 2 is still running";
  EXPECT_THAT(history.parameters[0].norm, ElementsAre(6, IsNan()));
  EXPECT_EQ(history.parameters[1].name, "p1");
  scanner_.begin_step();
  history = scanner_.history();
  EXPECT_THAT(history.parameters[0].absmax, ElementsAre(3, 5));
  EXPECT_THAT(history.parameters[1].absmax, ElementsAre(2, IsNan())) << "it had no gradient";
  EXPECT_EQ(history.phase, "grad_local");
}

TEST_F(RememberingScanner, CountsNonFiniteElementsAndMeasuresTheOthers) {
  auto gradient = at::full({9}, 2.0);
  gradient[3] = kNan;
  gradient[4] = kInfinity;
  step(1, {at::full({4}, kNan), gradient});
  scanner_.begin_step();
  const auto history = scanner_.history();
  ASSERT_THAT(history.parameters, SizeIs(2));
  EXPECT_THAT(history.parameters[0].nonfinite, ElementsAre(4));
  EXPECT_THAT(history.parameters[0].absmax, ElementsAre(IsNan()));
  EXPECT_THAT(history.parameters[1].nonfinite, ElementsAre(2));
  EXPECT_THAT(history.parameters[1].absmax, ElementsAre(2));
  EXPECT_THAT(history.parameters[1].norm, ElementsAre(FloatEq(std::sqrt(28.0F))));
}

TEST_F(RememberingScanner, AFindingsOwnReadingAndTheHistorysDoNotDisturbEachOther) {
  step(1, {at::full({4}, 1.0), at::full({9}, 1.0)});
  step(2, {at::full({4}, 2.0), at::full({9}, kNan)});
  scan({at::full({4}, 77.0), at::full({9}, 78.0)},
       Phase::grad_norm);  // new slots after the readback
  const auto collected = scanner_.collect(2);
  EXPECT_THAT(collected.sightings, SizeIs(1));
  auto history = scanner_.history();
  EXPECT_THAT(history.iterations, ElementsAre(1, 2)) << "the finding's step is available at once";
  EXPECT_THAT(history.parameters[0].absmax, ElementsAre(1, 2));
  EXPECT_THAT(history.parameters[1].nonfinite, ElementsAre(0, 9));
  step(3, {at::full({4}, 3.0), at::full({9}, 3.0)});
  (void)scanner_.scanned_gradients();  // a third readback, of the running step
  scanner_.begin_step();
  history = scanner_.history();
  EXPECT_THAT(history.iterations, ElementsAre(1, 2, 3));
  EXPECT_THAT(history.parameters[0].absmax, ElementsAre(1, 2, 3));
}

TEST_F(RememberingScanner, AStepCollectedBeforeItIsRememberedIsInTheHistory) {
  step(1, {at::full({4}, 1.0)});
  scanner_.begin_step();
  scan({at::full({4}, 2.0)}, Phase::grad_local);
  (void)scanner_.collect(2);
  EXPECT_THAT(scanner_.history().iterations, ElementsAre(1, 2));
  EXPECT_THAT(scanner_.history().parameters[0].absmax, ElementsAre(1, 2));
}

TEST_F(RememberingScanner, RemembersTheEarliestPhaseAndOnceAStep) {
  scanner_.begin_step();
  scan({at::full({4}, 5.0)}, Phase::params_before);
  scan({at::full({4}, 1.0)}, Phase::grad_local);
  scan({at::full({4}, 2.0)}, Phase::grad_reduced);
  scanner_.remember(1);
  scan({at::full({4}, 3.0)}, Phase::grad_norm);
  scanner_.remember(1);
  scanner_.begin_step();
  EXPECT_THAT(scanner_.history().iterations, ElementsAre(1));
  EXPECT_THAT(scanner_.history().parameters[0].absmax, ElementsAre(1));
}

TEST_F(RememberingScanner, DividesByTheLossScaleOfItsStep) {
  step(1, {at::full({4}, 1024.0)});
  scanner_.set_loss_scale(512);
  step(2, {at::full({4}, 3.0)});  // not scaled
  scanner_.begin_step();
  EXPECT_THAT(scanner_.history().parameters[0].absmax, ElementsAre(2, 3));
  EXPECT_THAT(scanner_.history().parameters[0].norm, ElementsAre(4, 6));
  EXPECT_THROW(scanner_.set_loss_scale(0), UsageError);
  EXPECT_THROW(scanner_.set_loss_scale(kNan), UsageError);
}

TEST_F(RememberingScanner, AStepWithoutGradientsIsNotInTheHistory) {
  scanner_.begin_step();
  scan({at::full({4}, 5.0)}, Phase::params_after);
  scanner_.remember(1);
  scanner_.begin_step();
  EXPECT_THAT(scanner_.history().iterations, IsEmpty());
}

}  // namespace
}  // namespace nanlocator::testing
