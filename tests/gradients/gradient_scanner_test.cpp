#include "nanlocator/gradients/gradient_scanner.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>

#include "gradients/tensors.hpp"
#include "nanlocator/error.hpp"
#include "temporary_folder.hpp"

namespace nanlocator::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

std::vector<Sighting> sightings_of(GradientScanner& scanner) {
  return scanner.collect(7).sightings;
}

bool is_flag_set(GradientScanner& scanner) {
  return scanner.flag(at::kCPU).item<int>() != 0;
}

// ----------------------------------------------------- every dtype, kind and position

struct Plant {
  at::ScalarType type;
  double value;
  std::int64_t place;
};
constexpr std::int64_t kNumel = 5003;

std::vector<Plant> plants() {
  std::vector<Plant> all;
  for (const auto type : kScannedTypes) {
    for (const double value : {kNan, kInfinity, -kInfinity}) {
      if (type == at::kFloat8_e4m3fn && value == value) continue;  // it has no infinity
      for (const std::int64_t place : {std::int64_t{0}, kNumel / 2, kNumel - 1}) {
        all.push_back({type, value, place});
      }
    }
  }
  return all;
}

std::string name_of_plant(const ::testing::TestParamInfo<Plant>& info) {
  const auto& plant = info.param;
  const char* value = plant.value != plant.value ? "Nan" : plant.value > 0 ? "PosInf" : "NegInf";
  return test_name(plant.type) + value + "At" + std::to_string(plant.place);
}

class GradientScannerOfEveryDtype : public ::testing::TestWithParam<Plant> {};

TEST_P(GradientScannerOfEveryDtype, CountsAndPlacesABadElement) {
  const auto [type, value, place] = GetParam();
  auto wide = at::linspace(-2, 2, kNumel, at::kDouble);
  at::Tensor gradient;
  if (c10::isComplexType(type)) {
    auto imaginary = wide.flip(0);
    imaginary[place] = value;
    gradient = at::complex(wide, imaginary).to(type);
  } else {
    wide[place] = value;
    gradient = wide.to(type);
  }
  const auto map = map_of({{kNumel}});
  GradientScanner scanner(map);
  scanner.begin_step();
  scanner.scan(Phase::grad_local, 0, "main_grad", std::vector{GradientView{0, gradient}});
  EXPECT_TRUE(is_flag_set(scanner));
  const auto sightings = sightings_of(scanner);
  ASSERT_THAT(sightings, SizeIs(1));
  const auto& sighting = sightings[0];
  EXPECT_EQ(sighting.stats.nan, value != value ? 1 : 0);
  EXPECT_EQ(sighting.stats.pos_inf, value == kInfinity ? 1 : 0);
  EXPECT_EQ(sighting.stats.neg_inf, value == -kInfinity ? 1 : 0);
  EXPECT_EQ(sighting.stats.first_bad, place);
  EXPECT_EQ(sighting.iteration, 7);
  EXPECT_EQ(sighting.phase, Phase::grad_local);
  EXPECT_EQ(sighting.role, "main_grad");
  EXPECT_EQ(sighting.parameter, "p0");
  EXPECT_EQ(sighting.parameter_id, 0);
  EXPECT_THAT(sighting.shape, ElementsAre(kNumel));
}

INSTANTIATE_TEST_SUITE_P(Dtypes, GradientScannerOfEveryDtype, ::testing::ValuesIn(plants()),
                         name_of_plant);

TEST(GradientScanner, SpellsDtypesAsPyTorchDoes) {
  const auto map = map_of({{1}});
  GradientScanner scanner(map);
  std::vector<std::string> names;
  for (const auto type : kScannedTypes) {
    scanner.begin_step();
    const auto bad = at::full({1}, kNan, at::kFloat).to(type);
    scanner.scan(Phase::grad_local, 0, "grad", std::vector{GradientView{0, bad}});
    names.push_back(sightings_of(scanner).at(0).dtype);
  }
  EXPECT_THAT(names, ElementsAre("float64", "float32", "float16", "bfloat16", "float8_e4m3fn",
                                 "float8_e5m2", "complex32", "complex64", "complex128"));
}

// ------------------------------------------------------------------------------ shapes and layouts

TEST(GradientScanner, CountsIndicesOfAStridedTensorInItsOwnRowMajorOrder) {
  auto base = at::ones({6, 5, 4});
  base[1][3][2] = kNan;
  const auto map = map_of({{4, 6, 5}});
  GradientScanner scanner(map);
  scanner.begin_step();
  scanner.scan(Phase::grad_local, 0, "grad", std::vector{GradientView{0, base.permute({2, 0, 1})}});
  // Element [2][1][3] of a tensor of shape [4, 6, 5].
  EXPECT_EQ(sightings_of(scanner).at(0).stats.first_bad, (2 * 6 + 1) * 5 + 3);
}

TEST(GradientScanner, AnInvalidCountOfLabelsIsUnknown) {
  const auto map = map_of({{1}});
  GradientScanner scanner(map);
  const auto count_of = [&](const at::Tensor& labels) {
    scanner.begin_step();
    LossView loss;
    loss.tensor = at::full({}, kNan);
    loss.valid_labels = labels;
    scanner.scan_losses({&loss, 1});
    return sightings_of(scanner).at(0).valid_labels;
  };
  EXPECT_EQ(count_of(at::full({}, 7, at::kLong)), 7);
  EXPECT_EQ(count_of(at::full({}, 0.0)), 0);
  EXPECT_EQ(count_of(at::full({}, kInfinity)), std::nullopt);
  EXPECT_EQ(count_of(at::full({}, kNan)), std::nullopt);
  EXPECT_EQ(count_of(at::full({}, -2147483648, at::kLong)), std::nullopt);
}

TEST(GradientScanner, CountsAShardsIndicesInTheWholeParameter) {
  auto shard = at::ones({10});
  shard[3] = -kInfinity;
  const auto map = map_of({{8, 5}});
  GradientScanner scanner(map);
  scanner.begin_step();
  scanner.scan(Phase::grad_reduced, 0, "main_grad", std::vector{GradientView{0, shard, 20}});
  const auto sighting = sightings_of(scanner).at(0);
  EXPECT_EQ(sighting.stats.first_bad, 23);
  EXPECT_THAT(sighting.shape, ElementsAre(8, 5));
}

TEST(GradientScanner, ATensorWithFewerElementsThanItsParameterIsTheShardInTheMap) {
  const auto index_in = [](ElementRange shard, const at::Tensor& tensor) {
    auto info = map_of({{3, 8}}).at(0);
    info.shard = shard;
    const ParameterMap map({}, {info});
    GradientScanner scanner(map);
    scanner.begin_step();
    scanner.scan(Phase::grad_reduced, 0, "grad", std::vector{GradientView{0, tensor}});
    return sightings_of(scanner).at(0).stats.first_bad;
  };
  auto row = at::ones({8});
  row[3] = kNan;
  EXPECT_EQ(index_in({16, 24}, row), 16 + 3);
  auto columns = at::ones({3, 4});
  columns[2][1] = kNan;
  EXPECT_EQ(index_in({4, 8, 8}, columns), 2 * 8 + 4 + 1);
  auto whole = at::ones({3, 8});
  whole[2][1] = kNan;
  EXPECT_EQ(index_in({4, 8, 8}, whole), 2 * 8 + 1);
}

TEST(GradientScanner, TranslatesASparseGradientsIndexToTheDenseTensor) {
  auto values = at::ones({3, 4});  // rows 9, 2 and 5 of a [10, 4] embedding
  values[1][3] = kNan;
  values[2][0] = kNan;
  const auto rows = at::tensor({9, 2, 5}, at::kLong).view({1, 3});
  const auto map = map_of({{10, 4}});
  GradientScanner scanner(map);
  scanner.begin_step();
  scanner.scan(Phase::grad_local, 0, "grad",
               std::vector{GradientView{0, at::sparse_coo_tensor(rows, values, {10, 4})}});
  EXPECT_TRUE(is_flag_set(scanner));
  const auto sighting = sightings_of(scanner).at(0);
  EXPECT_EQ(sighting.stats.first_bad, 2 * 4 + 3);
  EXPECT_EQ(sighting.stats.nan, 2);
  EXPECT_EQ(sighting.stats.numel, 12);  // the values, not the dense tensor
}

TEST(GradientScanner, TranslatesASparseTensorOfTwoSparseDimensions) {
  auto values = at::ones({2});
  values[1] = kInfinity;
  const auto indices = at::tensor({0, 3, 1, 2}, at::kLong).view({2, 2});  // (0, 1), (3, 2)
  const auto map = map_of({{4, 5}});
  GradientScanner scanner(map);
  scanner.begin_step();
  scanner.scan(Phase::grad_local, 0, "grad",
               std::vector{GradientView{0, at::sparse_coo_tensor(indices, values, {4, 5})}});
  EXPECT_EQ(sightings_of(scanner).at(0).stats.first_bad, 3 * 5 + 2);
}

TEST(GradientScanner, SeesTheSignOfAConjugatedInfinity) {
  auto parts = at::zeros({4}, at::kComplexFloat);
  at::view_as_real(parts)[2][1] = kInfinity;
  const auto conjugated = parts.conj();
  ASSERT_TRUE(conjugated.is_conj());
  const auto map = map_of({{4}});
  GradientScanner scanner(map);
  scanner.begin_step();
  scanner.scan(Phase::grad_local, 0, "grad", std::vector{GradientView{0, conjugated}});
  const auto stats = sightings_of(scanner).at(0).stats;
  EXPECT_EQ(stats.neg_inf, 1);
  EXPECT_EQ(stats.pos_inf, 0);
  EXPECT_EQ(stats.first_bad, 2);
}

TEST(GradientScanner, TakesEmptyAndZeroDimensionalTensors) {
  const auto map = map_of({{0, 3}, {}});
  GradientScanner scanner(map);
  scanner.begin_step();
  scanner.scan(
      Phase::grad_local, 0, "grad",
      std::vector{GradientView{0, at::empty({0, 3})}, GradientView{1, at::full({}, kNan)}});
  const auto collected = scanner.collect(1);
  ASSERT_THAT(collected.sightings, SizeIs(1));
  EXPECT_EQ(collected.sightings[0].parameter, "p1");
  EXPECT_EQ(collected.sightings[0].stats.first_bad, 0);
  ASSERT_THAT(collected.coverage, SizeIs(1));
  EXPECT_THAT(collected.coverage[0].parameters, ElementsAre(0, 1));
}

// ------------------------------------------------------------------------------------ refusals

TEST(GradientScanner, NamesATensorThatItCannotScanAndScansNothingOfThatCall) {
  const auto map = map_of({{3}, {3, 3}});
  GradientScanner scanner(map);
  scanner.begin_step();
  const auto bad = at::full({3}, kNan);
  const auto scan_with = [&](const at::Tensor& second) {
    return message_of<UnsupportedError>([&] {
      scanner.scan(Phase::grad_local, 0, "grad",
                   std::vector{GradientView{0, bad}, GradientView{1, second}});
    });
  };
  EXPECT_THAT(scan_with(at::zeros({3, 3}, at::kLong)), HasSubstr("parameter 'p1' (int64"));
  EXPECT_THAT(scan_with(at::ones({3, 3}).to_sparse_csr()), HasSubstr("SparseCsr"));
  EXPECT_FALSE(is_flag_set(scanner));
  EXPECT_THAT(scanner.collect(1).coverage, IsEmpty());
}

/// A wrapper subclass as seen from C++: a shape without memory.
at::Tensor without_memory() {
  return at::empty({2, 3}, at::TensorOptions().device(at::kMeta));
}

TEST(GradientScanner, ScansTheDequantisedValuesOfTensorsWithoutMemoryOneAtATime) {
  const auto map = map_of({{2, 3}, {2, 3}, {4}});
  GradientScanner scanner(map);
  int alive = 0;
  int most_alive = 0;
  const auto values_of = [&](double value) {
    return [&, value] {
      most_alive = std::max(most_alive, ++alive);
      auto values = at::full({2, 3}, 1.0);
      values[1][2] = value;
      return at::from_blob(
          values.data_ptr(), {2, 3}, [&, values](void*) { --alive; }, values.options());
    };
  };
  for (const auto step : {1, 2}) {
    scanner.begin_step();
    scanner.scan(Phase::params_before, 0, "weight",
                 std::vector{GradientView{0, without_memory(), 0, values_of(step == 1 ? kNan : 1)},
                             GradientView{1, without_memory(), 0, values_of(1)},
                             GradientView{2, at::ones({4})}});
    EXPECT_EQ(is_flag_set(scanner), step == 1);
    const auto collected = scanner.collect(step);
    ASSERT_THAT(collected.coverage, SizeIs(1));
    EXPECT_THAT(collected.coverage[0].parameters, ElementsAre(0, 1, 2));
    ASSERT_THAT(
        collected.notes,
        ElementsAre(HasSubstr("p0 and 1 more (params_before): no memory of its own, scanned")));
    if (step == 2) continue;
    ASSERT_THAT(collected.sightings, SizeIs(1));
    EXPECT_EQ(collected.sightings[0].parameter_id, 0);
    EXPECT_EQ(collected.sightings[0].stats.first_bad, 5);
  }
  EXPECT_EQ(most_alive, 1);
}

TEST(GradientScanner, SkipsTensorsThatCannotBeDequantisedWithANote) {
  const auto map = map_of({{2, 3}, {2, 3}, {2, 3}, {4}});
  GradientScanner scanner(map);
  scanner.begin_step();
  scanner.scan(Phase::params_before, 0, "weight",
               std::vector{GradientView{0, without_memory()},
                           GradientView{1, without_memory(), 0,
                                        []() -> at::Tensor {
                                          throw std::runtime_error("out of memory\nat x");
                                        }},
                           GradientView{2, without_memory(), 0, [] { return at::full({6}, kNan); }},
                           GradientView{3, at::ones({4})}});
  EXPECT_FALSE(is_flag_set(scanner));
  const auto collected = scanner.collect(1);
  EXPECT_THAT(collected.coverage.at(0).parameters, ElementsAre(3));
  EXPECT_THAT(collected.notes,
              ElementsAre(AllOf(HasSubstr("p0 and 2 more"), HasSubstr("not scanned"))));
  scanner.begin_step();
  EXPECT_THAT(scanner.collect(2).notes, IsEmpty());
}

TEST(GradientScanner, RefusesUnknownIdsUndefinedTensorsAndZeroThreads) {
  const auto map = map_of({{3}});
  GradientScanner scanner(map);
  scanner.begin_step();
  EXPECT_THROW(
      scanner.scan(Phase::grad_local, 0, "grad", std::vector{GradientView{1, at::ones({3})}}),
      UsageError);
  EXPECT_THROW(scanner.scan(Phase::grad_local, 0, "grad", std::vector{GradientView{0, {}}}),
               UsageError);
  EXPECT_THROW(GradientScanner(map, 0), UsageError);
}

// --------------------------------------------------------------------------------- steps and
// groups

TEST(GradientScanner, KeepsAHealthyStepSilentAndNotesWhatItCovered) {
  const auto map = map_of({{3}, {4}, {5}});
  GradientScanner scanner(map);
  scanner.begin_step();
  scanner.scan(Phase::grad_local, 1, "grad", std::vector{GradientView{2, at::full({5}, -8.0)}});
  scanner.scan(Phase::grad_local, 0, "grad", std::vector{GradientView{0, at::ones({3})}});
  scanner.scan(Phase::params_before, 0, "weight",
               std::vector{GradientView{1, at::full({4}, 99.0)}});
  EXPECT_FALSE(is_flag_set(scanner));
  const auto collected = scanner.collect(1);
  EXPECT_THAT(collected.sightings, IsEmpty());
  EXPECT_THAT(collected.coverage, ElementsAre(Coverage{Phase::params_before, {1}, {99}},
                                              Coverage{Phase::grad_local, {0, 2}, {1, 8}}));
  EXPECT_EQ(collected.absmax, 8.0);  // of gradients, not of weights
  EXPECT_EQ(collected.absmax_parameter, "p2");
}

TEST(GradientScanner, RemembersTheWeightsOfStepsInWhichTheyWereScanned) {
  const auto map = map_of({{3}});
  GradientScanner scanner(map);
  const auto step = [&](std::int64_t iteration, double weight, bool scans_weights) {
    scanner.begin_step();
    if (scans_weights) {
      scanner.scan(Phase::params_before, 0, "weight",
                   std::vector{GradientView{0, at::full({3}, weight)}});
    }
    scanner.scan(Phase::grad_local, 0, "grad", std::vector{GradientView{0, at::ones({3})}});
    scanner.set_loss_scale(4);
    scanner.remember(iteration);
  };
  step(1, -2, true);
  step(2, 5, false);
  step(3, 88, true);
  (void)scanner.collect(3);
  const auto weights = maxima_before(scanner.weight_history(), "p0", 4);
  EXPECT_EQ(weights, (Maxima{{1, 3}, {2, 88}}));  // the loss scale does not apply to weights
  const auto gradients = maxima_before(scanner.history(), "p0", 4);
  EXPECT_EQ(gradients, (Maxima{{1, 2, 3}, {0.25F, 0.25F, 0.25F}}));
}

TEST(GradientScanner, TakesTheLargestMagnitudeFromTheLatestGradientPhase) {
  const auto map = map_of({{3}, {3}});
  GradientScanner scanner(map);
  scanner.begin_step();
  scanner.scan(Phase::grad_local, 0, "grad", std::vector{GradientView{0, at::full({3}, 100.0)}});
  scanner.scan(Phase::grad_norm, 0, "grad", std::vector{GradientView{1, at::full({3}, -2.0)}});
  const auto collected = scanner.collect(1);
  EXPECT_EQ(collected.absmax, 2.0);
  EXPECT_EQ(collected.absmax_parameter, "p1");
}

TEST(GradientScanner, ListsSightingsInTheOrderOfTheScans) {
  const auto map = map_of({{1}, {1}, {1}});
  GradientScanner scanner(map);
  const auto bad = at::full({1}, kNan);
  scanner.begin_step();
  scanner.scan(Phase::grad_local, 5, "grad", std::vector{GradientView{2, bad}});
  scanner.scan(Phase::grad_local, 1, "grad",
               std::vector{GradientView{1, bad}, GradientView{0, bad}});
  scanner.scan(Phase::grad_reduced, 0, "grad", std::vector{GradientView{2, bad}});
  std::vector<std::string> order;
  for (const auto& sighting : sightings_of(scanner)) order.push_back(sighting.parameter);
  EXPECT_THAT(order, ElementsAre("p2", "p1", "p0", "p2"));
}

TEST(GradientScanner, KeepsTheFindingsOfTheFirstPassWhenTheSecondIsClean) {
  const auto map = map_of({{2}});
  GradientScanner scanner(map);
  for (int step = 1; step <= 3; ++step) {  // slots of the second pass are found again
    scanner.begin_step();
    scanner.scan(Phase::grad_local, 0, "grad", std::vector{GradientView{0, at::full({2}, kNan)}});
    scanner.scan(Phase::grad_local, 0, "grad", std::vector{GradientView{0, at::ones({2})}});
    const auto sightings = sightings_of(scanner);
    ASSERT_EQ(sightings.size(), 1);
    EXPECT_EQ(sightings[0].stats.nan, 2);
    EXPECT_TRUE(is_flag_set(scanner));
  }
}

TEST(GradientScanner, ForgetsFindingsAndFlagWhenAStepBegins) {
  const auto map = map_of({{2}});
  GradientScanner scanner(map);
  scanner.begin_step();
  scanner.scan(Phase::grad_local, 0, "grad", std::vector{GradientView{0, at::full({2}, kNan)}});
  scanner.begin_step();
  EXPECT_FALSE(is_flag_set(scanner));
  const auto collected = scanner.collect(2);
  EXPECT_THAT(collected.sightings, IsEmpty());
  EXPECT_THAT(collected.coverage, IsEmpty());
  EXPECT_EQ(collected.absmax, std::nullopt);
}

TEST(GradientScanner, FollowsStorageThatMovesGrowsOrShrinks) {
  const auto map = map_of({{64}, {64}, {64}, {64}, {64}});
  GradientScanner scanner(map);
  std::vector<at::Tensor> kept;  // so that no storage is reallocated at the same address
  for (int step = 0; step < 20; ++step) {
    const int views_in_step = 1 + (step * 3) % 5;
    const int bad = step % views_in_step;
    std::vector<GradientView> views;
    for (int i = 0; i < views_in_step; ++i) {
      kept.push_back(at::ones({64}));
      if (i == bad) kept.back()[step] = kNan;
      views.push_back({i, kept.back()});
    }
    scanner.begin_step();
    scanner.scan(Phase::grad_local, 0, "grad", views);
    const auto sightings = sightings_of(scanner);
    ASSERT_THAT(sightings, SizeIs(1)) << "step " << step;
    EXPECT_EQ(sightings[0].parameter_id, bad);
    EXPECT_EQ(sightings[0].stats.first_bad, step);
  }
}

TEST(GradientScanner, ReadsMemoryAgainAfterAnInPlaceWrite) {
  const auto map = map_of({{8}});
  GradientScanner scanner(map);
  auto gradient = at::ones({8});
  const std::vector views{GradientView{0, gradient}};
  for (int step = 0; step < 4; ++step) {
    gradient.fill_(1.0);
    if (step % 2 == 1) gradient[step] = kInfinity;
    scanner.begin_step();
    scanner.scan(Phase::grad_local, 0, "grad", views);
    EXPECT_EQ(is_flag_set(scanner), step % 2 == 1);
    EXPECT_THAT(sightings_of(scanner), SizeIs(step % 2));
  }
}

TEST(GradientScanner, KeepsNoGradientAlive) {
  const auto map = map_of({{8}});
  GradientScanner scanner(map);
  auto gradient = at::ones({8});
  scanner.begin_step();
  scanner.scan(Phase::grad_local, 0, "grad", std::vector{GradientView{0, gradient}});
  EXPECT_EQ(gradient.use_count(), 1);
  EXPECT_EQ(gradient.storage().use_count(), 1);
}

}  // namespace
}  // namespace nanlocator::testing
