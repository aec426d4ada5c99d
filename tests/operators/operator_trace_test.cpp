#include "nanlocator/operators/operator_trace.hpp"

#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/module.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <functional>
#include <limits>
#include <thread>

#include "nanlocator/error.hpp"
#include "nanlocator/watch/microbatch_scope.hpp"
#include "nanlocator/watch/module_scope.hpp"
#include "nanlocator/watch/position.hpp"

namespace nanlocator {
namespace {

using ::testing::AnyOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::StartsWith;

constexpr float kInf = std::numeric_limits<float>::infinity();

at::Tensor leaf(at::Tensor values) {
  return values.detach().clone().requires_grad_(true);
}

/// One training step on its own parameters; `forward` returns the loss.
struct Step {
  std::vector<std::pair<std::string, at::Tensor>> parameters;
  std::vector<std::pair<std::string, at::Tensor>> buffers;
  std::vector<std::pair<std::string, at::Tensor>> batch;

  at::Tensor parameter(const std::string& name, at::Tensor values) {
    parameters.emplace_back(name, leaf(std::move(values)));
    return parameters.back().second;
  }

  Explanation run(const std::function<at::Tensor()>& forward) const {
    OperatorTrace trace;
    for (const auto& [name, tensor] : parameters) {
      trace.declare(tensor, DeclaredAs::parameter, name);
    }
    for (const auto& [name, tensor] : buffers) trace.declare(tensor, DeclaredAs::buffer, name);
    for (const auto& [name, tensor] : batch) trace.declare(tensor, DeclaredAs::data, name);
    for (const auto& [name, tensor] : parameters) tensor.mutable_grad().reset();
    trace.begin_pass();
    const at::Tensor loss = forward();
    loss.backward();
    std::vector<NamedTensor> gradients;
    for (const auto& [name, tensor] : parameters) gradients.push_back({name, tensor.grad()});
    const NamedTensor named_loss{"loss", loss};
    return trace.explain({&named_loss, 1}, gradients);
  }
};

/// The only birth of a step; the test fails if there is not exactly one.
Birth only_birth(const Explanation& explanation) {
  EXPECT_THAT(explanation.births, SizeIs(1));
  for (const auto& note : explanation.notes) ADD_FAILURE() << note;
  for (const auto& traced : explanation.births) {
    SCOPED_TRACE(traced.birth.sighting.op + " in " + traced.birth.sighting.module);
    if (explanation.births.size() != 1) ADD_FAILURE();
  }
  return explanation.births.empty() ? Birth{} : explanation.births.front().birth;
}

struct TracedCase {
  const char* name;
  std::function<at::Tensor(const at::Tensor& x)> compute;  // within module "block.guilty"
  at::Tensor input;                                        // of the block, without gradient history
  const char* op;  // ATen's name of the operator at fault, without overload
  BirthKind kind;
  Phase phase;
  std::int64_t first_bad;
};

void PrintTo(const TracedCase& cause, std::ostream* out) {
  *out << cause.name;
}

at::Tensor floats(std::initializer_list<float> values) {
  return at::tensor(at::ArrayRef<float>(values));
}

at::Tensor clone_half(const at::Tensor& x) {
  return x.to(at::kHalf);
}

std::vector<TracedCase> causes() {
  return {
      {"log_of_zero", [](const at::Tensor& x) { return at::log(x); }, floats({1, 0, 2}),
       "aten::log", BirthKind::inf, Phase::forward, 1},
      {"zero_over_zero", [](const at::Tensor& x) { return x / x; }, floats({1, 2, 0}), "aten::div",
       BirthKind::nan, Phase::forward, 2},
      {"division_by_an_underflow", [](const at::Tensor& x) { return x / (x * 1e-30F * 1e-30F); },
       floats({1, 3, 2}), "aten::div", BirthKind::inf, Phase::forward, 0},
      {"rsqrt_of_zero", [](const at::Tensor& x) { return at::rsqrt(x); }, floats({4, 0, 1}),
       "aten::rsqrt", BirthKind::inf, Phase::forward, 1},
      {"acos_beyond_one", [](const at::Tensor& x) { return at::acos(x * 1.5F); },
       floats({0.1F, 0.2F, 1}), "aten::acos", BirthKind::nan, Phase::forward, 2},
      {"std_of_one_element", [](const at::Tensor& x) { return at::std(x.slice(0, 0, 1), {0}); },
       floats({1, 2}), "aten::std", BirthKind::nan, Phase::forward, 0},
      {"fp16_overflow_of_a_matmul",
       [](const at::Tensor& x) {
         const at::Tensor h = clone_half(x.view({1, 2}));
         return at::mm(h, h.t()).to(at::kFloat);
       },
       floats({200, 200}), "aten::mm", BirthKind::inf, Phase::forward, 0},
      {"overflow_in_a_cast", [](const at::Tensor& x) { return clone_half(x * x); },
       floats({2, 300}), "aten::_to_copy", BirthKind::inf, Phase::forward, 1},
      {"derivative_of_sqrt_at_zero", [](const at::Tensor& x) { return at::sqrt(x); },
       floats({4, 0, 1}), "aten::div", BirthKind::inf, Phase::backward, 1},
      {"derivative_of_the_norm_by_hand_at_zero",
       [](const at::Tensor& x) { return at::sqrt((x * x).sum()); }, floats({0, 0, 0}), "aten::div",
       BirthKind::inf, Phase::backward, 0},
      {"derivative_of_a_root_by_pow_at_zero", [](const at::Tensor& x) { return at::pow(x, 0.5); },
       floats({4, 0, 1}), "aten::pow", BirthKind::inf, Phase::backward, 1},
      {"derivative_of_acos_at_one", [](const at::Tensor& x) { return at::acos(x); },
       floats({0.1F, 1}), "aten::rsqrt", BirthKind::inf, Phase::backward, 1},
      {"derivative_of_log_near_zero", [](const at::Tensor& x) { return at::log(x); },
       floats({1, 2, 1e-40F}), "aten::div", BirthKind::inf, Phase::backward, 2},
  };
}

class Causes : public ::testing::TestWithParam<TracedCase> {};

INSTANTIATE_TEST_SUITE_P(Planted, Causes, ::testing::ValuesIn(causes()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(Causes, AreNamedWithOperatorModuleDirectionAndElement) {
  const TracedCase& cause = GetParam();
  Step step;
  const at::Tensor before = step.parameter("block.before.weight", at::ones({1}));
  const at::Tensor weight = step.parameter("block.guilty.weight", at::ones({1}));
  const at::Tensor after = step.parameter("head.weight", at::ones({1}));
  const auto explanation = step.run([&] {
    at::Tensor x = cause.input;
    {
      const ModuleScope scope("block.before");
      x = x * before;
    }
    {
      const ModuleScope scope("block.guilty");
      x = cause.compute(x * weight);
    }
    const ModuleScope scope("head");
    return (x * after).sum();
  });
  ASSERT_THAT(explanation.births, ::testing::Not(IsEmpty()));
  const TracedBirth& first = explanation.births.front();
  const Birth& birth = first.birth;
  EXPECT_EQ(birth.sighting.op.substr(0, birth.sighting.op.find('.')), cause.op);
  EXPECT_EQ(birth.kind, cause.kind) << name_of(birth.kind);
  EXPECT_EQ(birth.sighting.phase, cause.phase);
  EXPECT_EQ(birth.sighting.module, "block.guilty");
  EXPECT_FALSE(birth.is_module_inferred);
  EXPECT_EQ(birth.sighting.stats.first_bad, cause.first_bad);
  EXPECT_EQ(birth.sighting.stats.nan > 0, cause.kind == BirthKind::nan);
  EXPECT_EQ(birth.node.empty(), cause.phase != Phase::backward) << birth.node;
  EXPECT_EQ(birth.forward_op.empty(), cause.phase != Phase::backward);
  EXPECT_FALSE(birth.parent);
  EXPECT_THAT(explanation.notes, IsEmpty());
  ASSERT_TRUE(first.call) << "kept for a bundle";
  EXPECT_EQ(first.call->name.name, cause.op);
}

TEST(OperatorTrace, InfBeforeNanIsTheParentOfTheNan) {
  Step step;
  const at::Tensor weight = step.parameter("layer.weight", floats({1, 100}));
  const auto explanation = step.run([&] {
    const ModuleScope scope("layer");
    const at::Tensor e = at::exp(weight);
    return (e - e).sum();
  });
  ASSERT_THAT(explanation.births, SizeIs(2));
  const Birth& parent = explanation.births[0].birth;
  const Birth& child = explanation.births[1].birth;
  EXPECT_EQ(parent.sighting.op, "aten::exp");
  EXPECT_EQ(parent.kind, BirthKind::inf);
  EXPECT_EQ(parent.sighting.stats.first_bad, 1);
  EXPECT_EQ(child.sighting.op, "aten::sub.Tensor");
  EXPECT_EQ(child.kind, BirthKind::nan_from_inf);
  EXPECT_EQ(child.parent, 0);
  EXPECT_THAT(child.reached, ElementsAre(Reached{ReachedKind::loss, "loss"}));
  EXPECT_THAT(parent.reached, IsEmpty()) << "only through its child";
  ASSERT_FALSE(child.operands.empty());
  EXPECT_EQ(child.operands[0].name, "self");
  EXPECT_EQ(child.operands[0].stats->pos_inf, 1);
  EXPECT_EQ(child.operands[0].at_first_bad, kInf);
}

TEST(OperatorTrace, ZeroTimesInfIsNanFromTheInf) {
  Step step;
  const at::Tensor weight = step.parameter("w", floats({0, 1}));
  const auto explanation = step.run([&] { return (weight / floats({0, 1}) * 0.0F).sum(); });
  EXPECT_EQ(only_birth(explanation).kind, BirthKind::nan);  // 0/0 itself
  const auto other = step.run([&] { return ((weight + 1) / floats({0, 1}) * 0.0F).sum(); });
  ASSERT_THAT(other.births, SizeIs(2));
  EXPECT_EQ(other.births[1].birth.sighting.op, "aten::mul.Tensor");
  EXPECT_EQ(other.births[1].birth.parent, 0);
}

TEST(OperatorTrace, AFullyMaskedRowIsTheSoftmaxAndTheMaskStaysQuiet) {
  Step step;
  const at::Tensor weight = step.parameter("attention.weight", at::ones({2, 3}));
  const at::Tensor mask = at::tensor({0, 1, 0, 1, 1, 1}).view({2, 3}).to(at::kBool);
  const auto explanation = step.run([&] {
    const ModuleScope scope("attention");
    return at::softmax(weight.masked_fill(mask, -kInf), -1).sum();
  });
  const Birth birth = only_birth(explanation);
  EXPECT_EQ(birth.sighting.op, "aten::_softmax");
  EXPECT_EQ(birth.kind, BirthKind::nan_from_inf);
  EXPECT_EQ(birth.sighting.stats.first_bad, 3);
  EXPECT_FALSE(birth.parent);
  EXPECT_THAT(birth.literal_op, StartsWith("aten::masked_fill"));
}

TEST(OperatorTrace, HealthyMasksAndHealedNansAreNoOrigins) {
  Step step;
  const at::Tensor weight = step.parameter("w", floats({1, 2, 0}));
  const auto explanation = step.run([&] {
    const at::Tensor scores = weight.masked_fill(weight == 2, -kInf);
    const at::Tensor attention = at::softmax(scores, -1);
    const at::Tensor healed = at::where(weight.detach() > 0, at::log(weight.detach()), 0);
    return (attention * healed).sum();
  });
  EXPECT_THAT(explanation.births, IsEmpty());
  EXPECT_GE(explanation.masked, 2) << "the mask's and the logarithm's";
  EXPECT_GT(explanation.operators, 5);
}

TEST(OperatorTrace, ALiteralThatReachesTheLossAloneIsTold) {
  Step step;
  const at::Tensor weight = step.parameter("w", floats({1, 2}));
  const auto explanation = step.run([&] { return (weight * NAN).sum(); });
  const Birth birth = only_birth(explanation);
  EXPECT_EQ(birth.kind, BirthKind::literal);
  EXPECT_EQ(birth.sighting.op, "aten::mul.Scalar") << "as the program wrote it";
}

TEST(OperatorTrace, ABadWeightABadBufferAndABadBatchAreNamed) {
  const struct {
    DeclaredAs as;
    BirthKind kind;
    const char* role;
  } expectations[] = {{DeclaredAs::parameter, BirthKind::weight, "weight"},
                      {DeclaredAs::buffer, BirthKind::buffer, "buffer"},
                      {DeclaredAs::data, BirthKind::data, "input"}};
  for (const auto& expected : expectations) {
    Step step;
    at::Tensor weight = leaf(at::ones({2, 2}));
    at::Tensor scale = at::ones({2}), input = at::ones({2, 2});
    at::Tensor& bad = expected.as == DeclaredAs::parameter ? weight
                      : expected.as == DeclaredAs::buffer  ? scale
                                                           : input;
    {
      const at::NoGradGuard no_grad;
      bad.view({-1})[1].fill_(kInf);
    }
    step.parameters.emplace_back("block.linear.weight", weight);
    step.buffers.emplace_back("block.linear.scale", scale);
    step.batch.emplace_back("tokens", input);
    const Birth birth =
        only_birth(step.run([&] { return (at::linear(input, weight) * scale).sum(); }));
    EXPECT_EQ(birth.kind, expected.kind) << name_of(birth.kind);
    EXPECT_EQ(birth.sighting.role, expected.role);
    EXPECT_EQ(birth.sighting.stats.first_bad, 1);
    EXPECT_EQ(birth.sighting.stats.pos_inf, 1);
    EXPECT_EQ(birth.sighting.parameter, expected.as == DeclaredAs::parameter ? "block.linear.weight"
                                        : expected.as == DeclaredAs::buffer  ? "block.linear.scale"
                                                                             : "tokens");
    if (expected.as != DeclaredAs::data) {
      EXPECT_EQ(birth.sighting.module, "block.linear");
    }
  }
}

TEST(OperatorTrace, OfTheParametersInAFlatBufferTheBadOneIsNamed) {
  Step step;
  const at::Tensor buffer = floats({1, 1, 1, NAN, 1, 1});
  for (int i = 0; i < 3; ++i) {
    step.parameters.emplace_back("layer." + std::to_string(i) + ".weight",
                                 buffer.slice(0, 2 * i, 2 * i + 2).detach().requires_grad_());
  }
  const at::Tensor scale = step.parameter("scale", at::ones({2}));
  const Birth birth = only_birth(step.run([&] { return (scale * buffer.sum()).sum(); }));
  EXPECT_EQ(birth.kind, BirthKind::weight);
  EXPECT_EQ(birth.sighting.parameter, "layer.1.weight");
  EXPECT_EQ(birth.sighting.stats.first_bad, 1);
}

TEST(OperatorTrace, ABadWeightBesidePaddingThatIsWrittenInThePassIsAWeight) {
  Step step;
  const at::Tensor buffer = floats({1, 1, NAN, 1, 1, 1});
  for (int i = 0; i < 2; ++i) {
    step.parameters.emplace_back("layer." + std::to_string(i) + ".weight",
                                 buffer.slice(0, 2 * i, 2 * i + 2).detach().requires_grad_());
  }
  const Birth birth = only_birth(step.run([&] {
    buffer.slice(0, 4, 6).zero_();
    return (step.parameters[0].second * step.parameters[1].second).sum();
  }));
  EXPECT_EQ(birth.kind, BirthKind::weight);
  EXPECT_EQ(birth.sighting.parameter, "layer.1.weight");
  EXPECT_TRUE(birth.writer.empty());
}

TEST(OperatorTrace, AnUndeclaredTensorFromBeforeThePassIsData) {
  Step step;
  const at::Tensor weight = step.parameter("w", at::ones({2}));
  const at::Tensor batch = floats({1, NAN});
  const Birth birth = only_birth(step.run([&] { return (weight * batch).sum(); }));
  EXPECT_EQ(birth.kind, BirthKind::data);
  EXPECT_EQ(birth.sighting.stats.first_bad, 1);
}

TEST(OperatorTrace, WithoutScopesParametersNameTheModule) {
  Step step;
  const at::Tensor first = step.parameter("encoder.first.weight", at::ones({2, 2}));
  const at::Tensor second = step.parameter("encoder.second.weight", at::zeros({2, 2}));
  const Birth forward = only_birth(step.run([&] {
    const at::Tensor h = at::relu(at::linear(at::ones({2, 2}), first));
    return at::log(at::linear(h, second)).sum();
  }));
  EXPECT_EQ(forward.sighting.module, "encoder.second");
  EXPECT_TRUE(forward.is_module_inferred);
  const auto explanation = step.run([&] {
    return at::linear(at::sqrt(at::linear(at::zeros({2, 2}), first)), second).sum();
  });
  ASSERT_THAT(explanation.births, ::testing::Not(IsEmpty()));
  const Birth& backward = explanation.births[0].birth;
  EXPECT_EQ(backward.sighting.phase, Phase::backward);
  EXPECT_EQ(backward.sighting.module, "encoder.first");
  EXPECT_TRUE(backward.is_module_inferred);
  EXPECT_EQ(backward.forward_op, "aten::sqrt");
  EXPECT_EQ(backward.node, "SqrtBackward0");
}

TEST(OperatorTrace, ALossOutsideAnyModuleIsTheLossFunction) {
  Step step;
  const at::Tensor weight = step.parameter("layer.weight", at::ones({2}));
  const Birth birth = only_birth(step.run([&] {
    at::Tensor x;
    {
      const ModuleScope scope("layer");
      x = weight * 2;
    }
    const at::Tensor mask = at::zeros({2});
    return (x * mask).sum() / mask.sum();
  }));
  EXPECT_EQ(birth.sighting.phase, Phase::loss);
  EXPECT_EQ(birth.sighting.module, "");
  EXPECT_EQ(birth.sighting.op, "aten::div.Tensor");
}

TEST(OperatorTrace, WhatPreparesALaterMicrobatchIsNotTheLossOfTheOneBefore) {
  Step step;
  const at::Tensor weight = step.parameter("layer.weight", at::ones({2}));
  const auto layer = [&](const at::Tensor& input) {
    const ModuleScope scope("layer");
    return weight * input;
  };
  const Birth birth = only_birth(step.run([&] {
    set_current_microbatch({0, std::nullopt});
    const at::Tensor first = layer(at::ones({2})).sum();
    set_current_microbatch({1, std::nullopt});
    const at::Tensor prepared = at::zeros({2}) / at::zeros({2});
    const at::Tensor second = layer(prepared).sum();
    set_current_microbatch({});
    return first + second;
  }));
  EXPECT_EQ(birth.sighting.phase, Phase::forward);
  EXPECT_EQ(birth.sighting.microbatch, 1);
  EXPECT_EQ(birth.sighting.op, "aten::div.Tensor");
}

TEST(OperatorTrace, AModuleIsDeclaredWithTheNamesOfItsParametersAndBuffers) {
  struct Leaf : torch::nn::Module {
    at::Tensor weight = register_parameter("weight", at::ones({2}));
    at::Tensor scale = register_buffer("scale", floats({1, NAN}));
  };
  struct Root : torch::nn::Module {
    std::shared_ptr<Leaf> leaf = register_module("leaf", std::make_shared<Leaf>());
  } model;
  OperatorTrace trace;
  trace.declare(model);
  trace.begin_pass();
  const NamedTensor loss{"loss", (model.leaf->weight * model.leaf->scale).sum()};
  const Birth birth = only_birth(trace.explain({&loss, 1}, {}));
  EXPECT_EQ(birth.kind, BirthKind::buffer);
  EXPECT_EQ(birth.sighting.parameter, "leaf.scale");
  EXPECT_EQ(birth.sighting.module, "leaf");
}

struct PoleFunction : torch::autograd::Function<PoleFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({x});
    return x * 2;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    return {gradients[0] / context->get_saved_variables()[0]};
  }
};

TEST(OperatorTrace, ACustomFunctionsBackwardIsNamedByNodeOperatorAndModule) {
  Step step;
  const at::Tensor weight = step.parameter("custom.weight", floats({1, 0}));
  const Birth birth = only_birth(step.run([&] {
    const ModuleScope scope("custom");
    return PoleFunction::apply(weight * 1).sum();
  }));
  EXPECT_EQ(birth.sighting.phase, Phase::backward);
  EXPECT_EQ(birth.sighting.op, "aten::div.Tensor");
  EXPECT_EQ(birth.sighting.module, "custom");
  EXPECT_THAT(birth.node, HasSubstr("PoleFunction"));
  EXPECT_THAT(birth.reached, ElementsAre(Reached{ReachedKind::parameter, "custom.weight"}));
}

/// Computes by hand, off the dispatcher, like a kernel behind pybind.
template <bool in_backward>
struct HandKernel : torch::autograd::Function<HandKernel<in_backward>> {
  static at::Tensor compute(const at::Tensor& x, bool is_bad) {
    auto* memory = new float[static_cast<std::size_t>(x.numel())];
    for (std::int64_t i = 0; i < x.numel(); ++i) memory[i] = is_bad && i == 1 ? NAN : 1.0F;
    return at::from_blob(
        memory, x.sizes(), [](void* p) { delete[] static_cast<float*>(p); }, at::kFloat);
  }
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return compute(x, !in_backward);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& gradients) {
    return {compute(gradients[0], in_backward)};
  }
};

TEST(OperatorTrace, AKernelOffTheDispatcherIsAnOpaqueBirthInForward) {
  Step step;
  const at::Tensor weight = step.parameter("kernel.weight", at::ones({3}));
  const Birth birth = only_birth(step.run([&] {
    at::Tensor y;
    {
      const ModuleScope scope("kernel");
      y = HandKernel<false>::apply(weight * 1);
    }
    const ModuleScope scope("later");
    return (y * 3).sum();
  }));
  EXPECT_EQ(birth.kind, BirthKind::opaque) << name_of(birth.kind);
  EXPECT_EQ(birth.sighting.phase, Phase::forward);
  EXPECT_EQ(birth.sighting.module, "kernel");
  EXPECT_THAT(birth.sighting.op, HasSubstr("HandKernel"));
  EXPECT_EQ(birth.sighting.stats.first_bad, 1);
}

TEST(OperatorTrace, AKernelOffTheDispatcherIsAnOpaqueBirthInBackward) {
  Step step;
  const at::Tensor weight = step.parameter("kernel.weight", at::ones({3}));
  const Birth birth = only_birth(step.run([&] {
    const ModuleScope scope("kernel");
    return (HandKernel<true>::apply(weight * 2) * 3).sum();
  }));
  EXPECT_EQ(birth.kind, BirthKind::opaque) << name_of(birth.kind);
  EXPECT_EQ(birth.sighting.phase, Phase::backward);
  EXPECT_EQ(birth.sighting.module, "kernel");
  EXPECT_THAT(birth.sighting.op, HasSubstr("HandKernel"));
  EXPECT_EQ(birth.sighting.stats.first_bad, 1);
}

TEST(OperatorTrace, WhatAKernelComputesInMemoryOfItsOwnIsNoBirth) {
  Step step;
  const at::Tensor weight = step.parameter("w", at::full({3}, -1.0F));
  const Birth birth = only_birth(step.run([&] {
    const at::Tensor root = weight.sqrt();
    const at::Tensor half = root.to(at::kBFloat16);
    at::Tensor joined = at::empty({6});
    {
      const at::NoGradGuard no_grad;
      at::cat_out(joined, {half, half});  // converts through memory that it lets copy_ read
    }
    return root.sum() + joined.sum();
  }));
  EXPECT_EQ(birth.kind, BirthKind::nan) << name_of(birth.kind);
  EXPECT_EQ(birth.sighting.op, "aten::sqrt");
}

TEST(OperatorTrace, AnElementThatChangesBetweenTwoOperatorsIsMemory) {
  for (const bool is_in_place : {false, true}) {
    Step step;
    const at::Tensor weight = step.parameter("w", at::ones({4}));
    const Birth birth = only_birth(step.run([&] {
      at::Tensor x = weight * 2;
      x.mutable_data_ptr<float>()[2] = NAN;
      return (is_in_place ? x.mul_(2) : x + 1).sum();
    }));
    EXPECT_EQ(birth.kind, BirthKind::memory) << name_of(birth.kind);
    EXPECT_EQ(birth.sighting.op, "aten::mul.Tensor") << "wrote it last";
    if (!is_in_place) EXPECT_EQ(birth.sighting.stats.first_bad, 2);
  }
}

TEST(OperatorTrace, AGradientThatChangesAfterBackwardIsMemoryOfThatParameter) {
  const at::Tensor weight = leaf(at::ones({4}));
  OperatorTrace trace;
  trace.declare(weight, DeclaredAs::parameter, "layer.weight");
  trace.begin_pass();
  const at::Tensor loss = (weight * weight).sum();
  loss.backward();
  weight.mutable_grad().mutable_data_ptr<float>()[3] = kInf;
  const NamedTensor named_loss{"loss", loss}, gradient{"layer.weight", weight.grad()};
  const Birth birth = only_birth(trace.explain({&named_loss, 1}, {&gradient, 1}));
  EXPECT_EQ(birth.kind, BirthKind::memory);
  EXPECT_EQ(birth.sighting.parameter, "layer.weight");
  EXPECT_EQ(birth.sighting.stats.first_bad, 3);
  EXPECT_THAT(birth.reached, ElementsAre(Reached{ReachedKind::parameter, "layer.weight"}));
}

TEST(OperatorTrace, AHookOfTheUserIsBlamedForItsOwnOperators) {
  for (const bool multiplies : {true, false}) {
    Step step;
    const at::Tensor weight = step.parameter("layer.weight", floats({1, 0, 2}));
    const Birth birth = only_birth(step.run([&] {
      const ModuleScope scope("layer");
      const at::Tensor y = weight * 2;
      y.register_hook([&](const at::Tensor& gradient) {
        return multiplies ? gradient * NAN : gradient / weight.detach();
      });
      return y.sum();
    }));
    EXPECT_EQ(birth.kind, BirthKind::user_hook) << name_of(birth.kind);
    EXPECT_THAT(birth.node, StartsWith("MulBackward"));
    EXPECT_EQ(birth.sighting.module, "layer");
    EXPECT_EQ(birth.sighting.stats.first_bad, multiplies ? 0 : 1);
  }
}

TEST(OperatorTrace, OppositeInfinitiesThatTheEngineAddsAreNoHook) {
  Step step;
  const at::Tensor weight = step.parameter("layer.weight", floats({1, 0}));
  const auto explanation = step.run([&] {
    const at::Tensor y = weight * 1;
    return (at::sqrt(y) - at::sqrt(y)).sum();
  });
  ASSERT_THAT(explanation.births, SizeIs(2));
  EXPECT_EQ(explanation.births[0].birth.kind, BirthKind::inf);
  EXPECT_EQ(explanation.births[1].birth.kind, BirthKind::nan_from_inf);
  EXPECT_THAT(explanation.births[1].birth.sighting.op, StartsWith("aten::add"));
}

TEST(OperatorTrace, AnOptimizersOwnNanIsOfThePhaseThatWasEntered) {
  const at::Tensor weight = leaf(floats({1, 2}));
  const at::Tensor square_average = at::zeros({2});
  OperatorTrace trace;
  trace.declare(weight, DeclaredAs::parameter, "layer.weight");
  trace.begin_pass();
  {
    const ModuleScope scope("layer");
    (weight * 2).sum().backward();
  }
  trace.enter_phase(Phase::params_after);
  {
    const at::NoGradGuard no_grad;
    weight.sub_(at::zeros({2}) / at::sqrt(square_average));
  }
  trace.enter_phase(std::nullopt);
  const NamedTensor parameter{"layer.weight", weight};
  const Birth birth = only_birth(trace.explain({}, {&parameter, 1}));
  EXPECT_EQ(birth.sighting.phase, Phase::params_after);
  EXPECT_EQ(birth.sighting.op, "aten::div.Tensor");
  EXPECT_EQ(birth.sighting.module, "");
}

TEST(OperatorTrace, AnInPlaceBirthKeepsTheArgumentAsItWas) {
  Step step;
  const at::Tensor weight = step.parameter("w", floats({1, -1}));
  const auto explanation = step.run([&] {
    at::Tensor x = weight * 2;
    x.sqrt_();
    return x.sum();
  });
  ASSERT_THAT(explanation.births, SizeIs(1));
  const auto& traced = explanation.births[0];
  EXPECT_EQ(traced.birth.sighting.op, "aten::sqrt_");
  ASSERT_TRUE(traced.call);
  EXPECT_TRUE(traced.call->arguments[0].toTensor().equal(floats({2, -2})));
  EXPECT_TRUE(std::isnan(traced.call->outputs[0].toTensor()[1].item<float>()));
}

TEST(OperatorTrace, AViewWithoutTheBadElementPassesNothingOn) {
  Step step;
  const at::Tensor weight = step.parameter("w", floats({1, 0, 2, 4}));
  const auto explanation = step.run([&] {
    const at::Tensor bad = at::log(weight.detach());
    return (weight.slice(0, 2) * bad.slice(0, 2)).sum() / at::zeros({});
  });
  EXPECT_THAT(only_birth(explanation).sighting.op, "aten::div.Tensor");
}

TEST(OperatorTrace, MemoryFilledWithNanOnPurposeGivesNoBirth) {
  auto& context = at::globalContext();
  context.setDeterministicAlgorithms(true, true);
  context.setDeterministicFillUninitializedMemory(true);
  Step step;
  const at::Tensor weight = step.parameter("w", at::ones({3, 3}));
  const auto explanation = step.run([&] {
    const at::Tensor empty = at::empty({3, 3});
    EXPECT_TRUE(std::isnan(empty[0][0].item<float>())) << "or this test shows nothing";
    const at::Tensor product =
        at::baddbmm(empty.unsqueeze(0), weight.unsqueeze(0), weight.unsqueeze(0), /*beta=*/0);
    at::Tensor out = at::empty({3, 3});
    const at::Tensor detached = weight.detach();
    at::mul_out(out, detached, detached);
    at::Tensor rows = at::empty({2, 3});
    rows[0].copy_(detached[0]);
    rows[1].fill_(2);
    return product.sum() + (out * weight).sum() + rows.sum();
  });
  context.setDeterministicAlgorithms(false, false);
  EXPECT_THAT(explanation.births, IsEmpty());
}

TEST(OperatorTrace, ASecondTraceInTheProcessIsRefused) {
  const OperatorTrace trace;
  EXPECT_THROW(OperatorTrace(), UsageError);
}

TEST(OperatorTrace, ATraceThatEndsWhileOtherThreadsComputeIsSafe) {
  std::atomic<bool> is_done = false;
  std::thread other([&] {
    at::Tensor x = at::ones({8});
    while (!is_done) x = at::sqrt(x + 1);
  });
  for (int round = 0; round < 50; ++round) {
    OperatorTrace trace;
    trace.begin_pass();
    const at::Tensor y = at::log(at::ones({4}));
    const NamedTensor loss{"loss", y};
    EXPECT_THAT(trace.explain({&loss, 1}, {}).births, IsEmpty());
  }
  is_done = true;
  other.join();
}

/// Reads `memory` while another thread writes it: in any order, or joined first.
double read_beside_a_writer(const at::Tensor& memory, bool is_joined_first) {
  std::atomic<bool> has_read = false;
  std::thread other([&] {
    if (!is_joined_first) {  // to imitate chance
      const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(100);
      while (!has_read && std::chrono::steady_clock::now() < end) std::this_thread::yield();
    }
    memory.fill_(1);
  });
  if (is_joined_first) other.join();
  const at::Tensor sum = memory.sum();
  has_read = true;
  if (!is_joined_first) other.join();
  return sum.item<double>();
}

TEST(OperatorTrace, AnOrderThatTheProgramDoesNotKeepCanBeTurnedRound) {
  for (const bool is_joined_first : {false, true}) {
    std::vector<ThreadOrder> orders;
    {
      OperatorTrace trace({.follows_threads = true});
      trace.begin_pass();
      (void)read_beside_a_writer(at::zeros({4}), is_joined_first);
      orders = trace.thread_orders();
    }
    ASSERT_THAT(orders, SizeIs(1));
    EXPECT_EQ(orders[0].first.is_steps, !is_joined_first);
    EXPECT_EQ(orders[0].access.other, Concurrent::thread);
    EXPECT_FALSE(orders[0].access.is_write);
    EXPECT_EQ(orders[0].access.op, "aten::sum.dim_IntList");
    EXPECT_EQ(orders[0].access.transfer, "aten::fill_.Scalar");
    OperatorTrace trace({.reordered = orders[0]});
    trace.begin_pass();
    EXPECT_EQ(read_beside_a_writer(at::zeros({4}), is_joined_first), 4);
    EXPECT_EQ(trace.has_reordered(), !is_joined_first);
  }
}

TEST(OperatorTrace, ThreadsThatUseOtherMemoryOrOnlyReadHaveNoOrder) {
  OperatorTrace trace({.follows_threads = true});
  trace.begin_pass();
  const at::Tensor shared = at::ones({4});
  const at::Tensor halves = at::ones({8});
  std::thread other([&] {
    const at::Tensor sum = shared + 1;
    halves.slice(0, 4, 8).fill_(2);
  });
  other.join();
  const at::Tensor product = shared * halves.slice(0, 0, 4);
  EXPECT_THAT(trace.thread_orders(), IsEmpty());
}

TEST(OperatorTrace, PausedItSeesNothing) {
  OperatorTrace trace;
  trace.begin_pass();
  trace.pause();
  const at::Tensor bad = at::log(at::zeros({2}));
  trace.resume();
  EXPECT_EQ(trace.explain({}, {}).operators, 0);
  const at::Tensor good = at::ones({2}) * 2;
  EXPECT_GE(trace.explain({}, {}).operators, 1);
}

TEST(OperatorTrace, CallsBeyondTheLimitAreCountedAndLeftOut) {
  const at::Tensor weight = leaf(floats({0, 1}));
  OperatorTrace trace({.kept_bytes = 4, .program_code = {}});
  trace.begin_pass();
  const NamedTensor loss{"loss", at::log(weight).sum()};
  const auto explanation = trace.explain({&loss, 1}, {});
  ASSERT_THAT(explanation.births, SizeIs(1));
  EXPECT_FALSE(explanation.births[0].call);
  EXPECT_THAT(explanation.notes, ElementsAre(HasSubstr("may take 4 bytes")));
}

TEST(OperatorTrace, WhereACopyOfWhatIsWrittenInPlaceMayNotBeTakenTheBirthIsNamedWithoutItsCall) {
  const at::Tensor weight = leaf(at::full({1000}, -1.0F));
  OperatorTrace trace({.kept_bytes = 3999, .program_code = {}});
  trace.begin_pass();
  const NamedTensor loss{"loss", weight.mul(1).log_().sum()};
  const auto explanation = trace.explain({&loss, 1}, {});
  ASSERT_THAT(explanation.births, SizeIs(1));
  const auto& [birth, call, stack] = explanation.births[0];
  EXPECT_EQ(birth.sighting.op, "aten::log_");
  EXPECT_EQ(birth.kind, BirthKind::nan);
  EXPECT_FALSE(call);
  ASSERT_THAT(birth.operands, SizeIs(1));
  EXPECT_EQ(birth.operands[0].name, "self");
  EXPECT_FALSE(birth.operands[0].stats);  // its memory holds the result by now
  EXPECT_FALSE(birth.operands[0].at_first_bad);
  EXPECT_THAT(explanation.notes, ElementsAre(HasSubstr("of aten::log_ (8000 bytes) first")));
}

/// A program with the one function `program`, at a line that the test sets.
struct PlantedCode final : ProgramCode {
  int line = 0;
  int program = 0;
  Caller caller() override {
    return {.user = {&program, line}, .framework = {}, .is_programs = true};
  }
  bool is_running() override { return true; }
  std::optional<CodeLine> read(const Position& position) override {
    if (position.code == nullptr) return std::nullopt;
    return CodeLine{"loss.py", position.line, "f", "x"};
  }
  std::vector<std::string> stack() override { return {"loss.py:3 in f"}; }
};

TEST(OperatorTrace, ABirthInBackwardHasTheLineOfItsForwardCall) {
  const at::Tensor weight = leaf(floats({0, 1}));
  const auto code = std::make_shared<PlantedCode>();
  OperatorTrace trace({.program_code = code});
  trace.begin_pass();
  code->line = 11;
  const at::Tensor root = at::sqrt(weight);
  code->line = 12;
  const at::Tensor loss = (root * 2).sum();
  code->line = 99;
  loss.backward();
  const NamedTensor gradient{"weight", weight.grad()};
  const auto explanation = trace.explain({}, {&gradient, 1});
  ASSERT_THAT(explanation.births, SizeIs(1));
  const Birth& birth = explanation.births[0].birth;
  EXPECT_EQ(birth.sighting.phase, Phase::backward);
  ASSERT_TRUE(birth.code);
  EXPECT_EQ(birth.code->line, 11);
  EXPECT_FALSE(birth.framework_code);
}

TEST(OperatorTrace, TheProgramsLineIsAskedForWhereSomethingIsBorn) {
  const at::Tensor weight = leaf(floats({0, 1}));
  const auto code = std::make_shared<PlantedCode>();
  code->line = 3;
  OperatorTrace trace({.program_code = code});
  trace.begin_pass();
  const NamedTensor loss{"loss", at::log(weight).sum()};
  const auto explanation = trace.explain({&loss, 1}, {});
  ASSERT_THAT(explanation.births, SizeIs(1));
  EXPECT_THAT(explanation.births[0].birth.stack, ElementsAre("loss.py:3 in f"));
  EXPECT_EQ(explanation.births[0].birth.code, CodeLine({"loss.py", 3, "f", "x"}));
}

// ---- positions: nanlocator/watch/position.hpp ----

TEST(OperatorTrace, ABirthHasTheNumberOfCrossingsThatWereIssuedBeforeIt) {
  PositionCounter crossings;
  Step step;
  const at::Tensor weight = step.parameter("w", floats({1, 0}));
  crossings.begin();
  const auto cross = [&](int times) {
    for (int i = 0; i < times; ++i) crossings.add(0);
  };
  const auto explanation = step.run([&] {
    cross(2);
    const at::Tensor root = at::rsqrt(weight);  // Inf
    cross(3);
    const at::Tensor zero = root - root;  // NaN from Inf
    cross(1);
    return (zero * 2).sum();
  });
  ASSERT_THAT(explanation.births, SizeIs(2));
  EXPECT_EQ(explanation.births[0].birth.kind, BirthKind::inf);
  EXPECT_EQ(explanation.births[0].birth.sighting.position, 2);
  EXPECT_EQ(explanation.births[1].birth.kind, BirthKind::nan_from_inf);
  EXPECT_EQ(explanation.births[1].birth.sighting.position, 5);
}

TEST(OperatorTrace, ABirthInBackwardIsBehindTheCrossingsOfForwardAndOfBackwardBeforeIt) {
  PositionCounter crossings;
  Step step;
  const at::Tensor weight = step.parameter("w", floats({1, 0}));
  crossings.begin();
  crossings.add(0);
  const Birth birth = only_birth(step.run([&] {
    const at::Tensor root = at::sqrt(weight * 1);  // its derivative at zero is Inf
    crossings.add(0);
    root.register_hook([&](const at::Tensor& gradient) {
      crossings.add(0);
      return gradient;
    });
    return (root * 3).sum();
  }));
  EXPECT_EQ(birth.sighting.phase, Phase::backward);
  EXPECT_EQ(birth.sighting.position, 3);
}

TEST(OperatorTrace, WhatAnUnseenKernelMadeHasThePositionOfItsFirstReader) {
  PositionCounter crossings;
  Step step;
  const at::Tensor weight = step.parameter("kernel.weight", at::ones({3}));
  crossings.begin();
  const Birth birth = only_birth(step.run([&] {
    crossings.add(0);
    const at::Tensor y = HandKernel<false>::apply(weight * 1);
    crossings.add(0);
    return (y * 3).sum();
  }));
  EXPECT_EQ(birth.kind, BirthKind::opaque) << name_of(birth.kind);
  EXPECT_EQ(birth.sighting.position, 2);
}

TEST(OperatorTrace, WhatIsOutsideOfThePassHasNoPositionInIt) {
  PositionCounter crossings;
  crossings.begin();
  crossings.add(0);
  {
    Step step;
    const at::Tensor weight = step.parameter("w", floats({1, NAN}));
    const Birth birth = only_birth(step.run([&] { return (weight * 2).sum(); }));
    EXPECT_EQ(birth.kind, BirthKind::weight);
    EXPECT_EQ(birth.sighting.position, std::nullopt);
  }
  {
    const at::Tensor weight = leaf(at::ones({4}));
    OperatorTrace trace;
    trace.declare(weight, DeclaredAs::parameter, "w");
    trace.begin_pass();
    (weight * weight).sum().backward();
    weight.mutable_grad().mutable_data_ptr<float>()[3] = kInf;  // read when the pass is over
    const NamedTensor gradient{"w", weight.grad()};
    const Birth birth = only_birth(trace.explain({}, {&gradient, 1}));
    EXPECT_EQ(birth.kind, BirthKind::memory);
    EXPECT_EQ(birth.sighting.position, std::nullopt);
  }
  {
    const at::Tensor weight = leaf(floats({1, 2}));
    OperatorTrace trace;
    trace.declare(weight, DeclaredAs::parameter, "w");
    trace.begin_pass();
    trace.enter_phase(Phase::params_after);
    {
      const at::NoGradGuard no_grad;
      weight.div_(at::zeros({2}));
    }
    const NamedTensor parameter{"w", weight};
    EXPECT_EQ(only_birth(trace.explain({}, {&parameter, 1})).sighting.position, std::nullopt);
  }
}

TEST(OperatorTrace, ABirthOnAThreadThatDoesNotWorkForTheStepHasNoPosition) {
  PositionCounter crossings;
  Step step;
  const at::Tensor weight = step.parameter("w", floats({1, 0}));
  crossings.begin();
  const Birth birth = only_birth(step.run([&] {
    at::Tensor root;
    std::thread([&] { root = at::rsqrt(weight); }).join();
    return root.sum();
  }));
  EXPECT_EQ(birth.kind, BirthKind::inf);
  EXPECT_EQ(birth.sighting.position, std::nullopt);
}

}  // namespace
}  // namespace nanlocator
