#include "nanlocator/watch/module_watch.hpp"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sqrt.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "nanlocator/watch/position.hpp"

namespace nanlocator {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

using Forward = std::function<at::Tensor(const at::Tensor&)>;

at::Tensor call(ModuleWatch& watch, const std::string& path, const at::Tensor& input,
                const Forward& forward) {
  const std::vector<NamedTensor> inputs = {{"input[0]", input}};
  const auto id = watch.enter(intern_module_path(path), inputs);
  const std::vector<NamedTensor> outputs = {{"output[0]", forward(input)}};
  watch.leave(id, outputs);
  return outputs[0].tensor;
}

std::vector<std::string> places(const ModuleWatch::Collected& collected) {
  std::vector<std::string> lines;
  for (const auto& birth : collected.births) {
    lines.push_back(std::string(name_of(birth.kind)) + " " +
                    std::string(name_of(birth.sighting.phase)) + " " + birth.sighting.module + " " +
                    birth.sighting.role.text());
  }
  return lines;
}

using Lines = std::vector<std::string>;

at::Tensor twice(const at::Tensor& x) {
  return x * 2;
}

TEST(ModuleWatch, BlamesTheModuleThatMadeNanOfFiniteInputsAndNoneThatReceivedIt) {
  ModuleWatch watch;
  watch.begin_step();
  (void)call(watch, "model", at::ones({2, 3}), [&](const at::Tensor& x) {
    const auto a = call(watch, "model.a", x, twice);
    const auto b = call(watch, "model.b", a, [](const at::Tensor& y) {
      auto bad = y.clone();
      bad[1][2] = NAN;
      return bad;
    });
    return call(watch, "model.c", b, twice);
  });
  const auto collected = watch.collect(7, {}, {});
  EXPECT_EQ(places(collected), Lines({"nan forward model.b output[0]"}));
  const auto& birth = collected.births.at(0);
  EXPECT_EQ(birth.sighting.iteration, 7);
  EXPECT_EQ(birth.sighting.stats.nan, 1);
  EXPECT_EQ(birth.sighting.stats.first_bad, 5);
  ASSERT_EQ(birth.operands.size(), 1U);
  EXPECT_EQ(birth.operands[0].name, "input[0]");
  EXPECT_EQ(birth.operands[0].dtype, "float32");
  EXPECT_EQ(birth.operands[0].shape, std::vector<std::int64_t>({2, 3}));
  EXPECT_TRUE(birth.operands[0].stats && birth.operands[0].stats->is_finite());
  EXPECT_EQ(birth.reached, std::vector<Reached>({{ReachedKind::module, "model"}}));
  ASSERT_EQ(collected.sightings.size(), 4u) << "b's output, c's input and output, model's output";
}

TEST(ModuleWatch, BlamesNoModuleWhoseInputWasHiddenButTheCodeAroundIt) {
  ModuleWatch watch;
  watch.begin_step();
  const auto hidden =
      at::empty({2, 3}, at::TensorOptions().device(at::kMeta));  // a subclass may look so to C++
  (void)call(watch, "model", at::ones({2, 3}), [&](const at::Tensor& x) {
    return call(watch, "model.block", x, [&](const at::Tensor& y) {
      (void)call(watch, "model.block.norm", y, [&](const at::Tensor&) { return hidden; });
      return call(watch, "model.block.linear", hidden, [](const at::Tensor&) {
        return at::ones({2, 3}) * NAN;
      });
    });
  });
  EXPECT_EQ(places(watch.collect(7, {}, {})),
            Lines({"nan forward model.block model.block.linear output[0]"}));
}

TEST(ModuleWatch, BlamesTheOutermostModuleWhereAllInputsWereHidden) {
  ModuleWatch watch;
  watch.begin_step();
  const auto hidden = at::empty({2, 3}, at::TensorOptions().device(at::kMeta));
  (void)call(watch, "model", hidden, [&](const at::Tensor& x) {
    return call(watch, "model.a", x, [](const at::Tensor&) { return at::ones({2}) * NAN; });
  });
  EXPECT_EQ(places(watch.collect(7, {}, {})), Lines({"nan forward model model.a output[0]"}));
}

TEST(ModuleWatch, TellsNanFromInfWithTheInfAsItsParent) {
  ModuleWatch watch;
  (void)call(watch, "model", at::ones({4}), [&](const at::Tensor& x) {
    const auto big = call(watch, "big", x, [](const at::Tensor& y) { return y * kInfinity; });
    return call(watch, "difference", big, [](const at::Tensor& y) { return y - y; });
  });
  const auto collected = watch.collect(1, {}, {});
  EXPECT_EQ(places(collected),
            Lines({"inf forward big output[0]", "nan_from_inf forward difference output[0]"}));
  EXPECT_EQ(collected.births.at(1).parent, 0);
}

TEST(ModuleWatch, BlamesInBackwardTheSiblingWhoseNodesMadeTheGradientBad) {
  ModuleWatch watch;
  watch.begin_step();
  const auto data = at::zeros({3}).set_requires_grad(true);
  const auto loss = call(watch, "model", data * 1, [&](const at::Tensor& x) {
    const auto q = call(watch, "model.q", x, twice);
    const auto k = call(watch, "model.k", x, [](const at::Tensor& y) { return at::sqrt(y); });
    const auto v = call(watch, "model.v", x, twice);
    return (q + k + v).sum();
  });
  EXPECT_TRUE(watch.collect(1, {}, {}).births.empty()) << "the forward is finite";
  loss.backward();
  const auto collected = watch.collect(1, {}, {});
  EXPECT_EQ(places(collected), Lines({"inf backward model.k grad_input[0]"}));
  EXPECT_EQ(collected.births.at(0).node, "SqrtBackward0");
  EXPECT_EQ(data.grad().isinf().sum().item<int>(), 3) << "the gradient itself is as it was";
}

TEST(ModuleWatch, BlamesABadWeightByItsName) {
  ModuleWatch watch;
  auto weight = at::ones({3, 3});
  weight[2][1] = NAN;
  (void)call(watch, "layer", at::ones({2, 3}),
             [&](const at::Tensor& x) { return at::matmul(x, weight); });
  const std::vector<NamedTensor> parameters = {{"layer.bias", at::ones({3})},
                                               {"layer.weight", weight}};
  const auto collected = watch.collect(1, parameters, {});
  EXPECT_EQ(places(collected), Lines({"weight forward layer weight"}));
  EXPECT_EQ(collected.births.at(0).sighting.parameter, "layer.weight");
  EXPECT_EQ(collected.births.at(0).sighting.stats.first_bad, 7);
}

TEST(ModuleWatch, SeesWhatIsWrittenIntoATensorThatItHasScanned) {
  ModuleWatch watch;
  auto x = at::ones({5});
  (void)call(watch, "a", x, twice);
  x[3] = NAN;
  (void)call(watch, "b", x, [](const at::Tensor& y) { return y; });
  const auto collected = watch.collect(1, {}, {});
  ASSERT_EQ(collected.sightings.size(), 2u);
  EXPECT_EQ(collected.sightings[0].module, "b");
  EXPECT_EQ(collected.sightings[0].stats.first_bad, 3);
}

TEST(ModuleWatch, FindsABadElementInAViewAndNoneInAViewThatLeavesItOut) {
  ModuleWatch watch;
  auto base = at::ones({4, 4});
  base[1][2] = NAN;
  (void)call(watch, "without", base.select(0, 0), twice);
  EXPECT_TRUE(watch.collect(1, {}, {}).sightings.empty());
  (void)call(watch, "transposed", base.t(), twice);
  const auto sightings = watch.collect(1, {}, {}).sightings;
  ASSERT_FALSE(sightings.empty());
  EXPECT_EQ(sightings[0].stats.first_bad, 2 * 4 + 1);
}

TEST(ModuleWatch, AnAdditiveMaskIsNoFinding) {
  ModuleWatch watch;
  auto mask = at::zeros({3, 3});
  mask[0][1] = -kInfinity;
  (void)call(watch, "attention", mask, [](const at::Tensor& x) { return x.softmax(-1); });
  EXPECT_TRUE(watch.collect(1, {}, {}).sightings.empty());
}

TEST(ModuleWatch, GoesOnAfterACallThatRaised) {
  ModuleWatch watch;
  const std::vector<NamedTensor> inputs = {{"input[0]", at::ones({2})}};
  const auto outer = watch.enter(intern_module_path("outer"), inputs);
  (void)watch.enter(intern_module_path("inner"), inputs);  // never left
  watch.abandon(outer);
  (void)call(watch, "next", at::ones({2}), [](const at::Tensor& x) { return x * NAN; });
  const auto collected = watch.collect(1, {}, {});
  EXPECT_EQ(places(collected), Lines({"nan forward next output[0]"}));
  EXPECT_TRUE(collected.births.at(0).reached.empty());
}

TEST(ModuleWatch, ForgetsTheStepBeforeAndTheGraphsOfThatStep) {
  ModuleWatch watch;
  const auto x = at::zeros({2}).set_requires_grad(true);
  const auto loss =
      call(watch, "root", x * 1, [](const at::Tensor& y) { return at::sqrt(y); }).sum();
  watch.begin_step();
  loss.backward();
  const auto collected = watch.collect(2, {}, {});
  EXPECT_TRUE(collected.sightings.empty());
  EXPECT_TRUE(collected.births.empty());
}

TEST(ModuleWatch, MayBeDestroyedBeforeAutogradsGraph) {
  const auto x = at::zeros({2}).set_requires_grad(true);
  at::Tensor loss;
  {
    ModuleWatch watch;
    loss = call(watch, "root", x * 1, [](const at::Tensor& y) { return at::sqrt(y); }).sum();
  }
  loss.backward();
  EXPECT_TRUE(x.grad().defined());
}

TEST(ModuleWatch, ABirthHasThePositionAtWhichItsModuleReturned) {
  PositionCounter crossings;
  ModuleWatch watch;
  watch.begin_step();
  crossings.begin();
  crossings.add(0);
  const auto data = at::zeros({3}).set_requires_grad(true);
  const auto loss = call(watch, "model", data * 1, [&](const at::Tensor& x) {
    const auto y = call(watch, "model.root", x, [&](const at::Tensor& z) {
      crossings.add(0);
      return at::sqrt(z);
    });
    crossings.add(0);
    return call(watch, "model.log", y, [](const at::Tensor& z) { return at::log(z); }).sum();
  });
  crossings.add(0);
  const auto forward = watch.collect(1, {}, {});
  EXPECT_EQ(places(forward), Lines({"inf forward model.log output[0]"}));
  EXPECT_EQ(forward.births.at(0).sighting.position, 3);
  ASSERT_EQ(forward.sightings.size(), 2U);
  EXPECT_EQ(forward.sightings[1].position, 3);  // of the model, which returned before the fourth
  crossings.add(0);
  loss.backward();
  const auto backward = watch.collect(1, {}, {}).sightings;
  EXPECT_EQ(backward.back().phase, Phase::backward);
  EXPECT_EQ(backward.back().position, 5);
}

TEST(ModuleWatch, WhatWasBadBeforeThePassHasNoPositionInIt) {
  PositionCounter crossings;
  ModuleWatch watch;
  crossings.begin();
  watch.begin_step();
  const auto weight = at::full({3, 3}, NAN);
  (void)call(watch, "layer", at::ones({2, 3}),
             [&](const at::Tensor& x) { return at::matmul(x, weight); });
  (void)call(watch, "reader", at::full({2}, NAN), twice);  // the batch
  const std::vector<NamedTensor> parameters = {{"layer.weight", weight}};
  const auto collected = watch.collect(1, parameters, {});
  ASSERT_FALSE(collected.births.empty());
  for (const auto& birth : collected.births) EXPECT_EQ(birth.sighting.position, std::nullopt);
}

}  // namespace
}  // namespace nanlocator
