#include "nanlocator/step/locating_optimizer.hpp"
#include "nanlocator/report/verdict_json.hpp"

#include <ATen/Context.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adam.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <fstream>

#include "agree/thread_ranks.hpp"
#include "gradients/tensors.hpp"
#include "temporary_folder.hpp"

namespace nanlocator::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

struct Layer : torch::nn::Module {
  Layer(std::int64_t inputs, std::int64_t outputs) {
    weight = register_parameter("weight", at::randn({outputs, inputs}) * 0.3);
    bias = register_parameter("bias", at::zeros({outputs}));
  }
  at::Tensor weight, bias;
};

struct TwoLayers : torch::nn::Module {
  TwoLayers() {
    at::manual_seed(0);
    const auto one = register_module("first", std::make_shared<Layer>(4, 8));
    const auto two = register_module("second", std::make_shared<Layer>(8, 1));
    first = one->weight;
    bias = one->bias;
    second = two->weight;
    second_bias = two->bias;
  }
  at::Tensor loss(const at::Tensor& input) const {
    const auto hidden = at::relu(input.matmul(first.t()) + bias);
    return (hidden.matmul(second.t()) + second_bias - input.sum(1, true)).square().mean();
  }
  at::Tensor first, bias, second, second_bias;
};

at::Tensor batch(int step) {
  at::manual_seed(1000 + step);
  return at::randn({16, 4});
}

std::vector<std::vector<float>> weights_of(const torch::nn::Module& model) {
  std::vector<std::vector<float>> weights;
  for (const auto& parameter : model.parameters()) {
    const auto flat = parameter.detach().contiguous();
    weights.emplace_back(flat.const_data_ptr<float>(), flat.const_data_ptr<float>() + flat.numel());
  }
  return weights;
}

class LocatingOptimizerTest : public ::testing::Test {
 protected:
  LocatorOptions options(Policy policy = Policy::stop) const {
    LocatorOptions options;
    options.on_bad = policy;
    options.output_dir = folder_ / "run";
    return options;
  }
  std::shared_ptr<torch::optim::SGD> sgd() const {
    return std::make_shared<torch::optim::SGD>(model_->parameters(), torch::optim::SGDOptions(0.1));
  }
  void backward(int step = 0) const { model_->loss(batch(step)).backward(); }

  TemporaryFolder folder_;
  std::shared_ptr<TwoLayers> model_ = std::make_shared<TwoLayers>();
};

// ------------------------------------------------------------ healthy runs are the same, bit for
// bit

using MakeOptimizer =
    std::function<std::shared_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>;
struct OptimizerKind {
  const char* name;
  MakeOptimizer make;
  bool takes_closure;
};
const OptimizerKind kOptimizers[] = {
    {"Adam",
     [](auto parameters) {
       return std::make_shared<torch::optim::Adam>(parameters, torch::optim::AdamOptions(1e-2));
     },
     false},
    {"SgdWithMomentum",
     [](auto parameters) {
       return std::make_shared<torch::optim::SGD>(parameters,
                                                  torch::optim::SGDOptions(0.05).momentum(0.9));
     },
     false},
    {"Lbfgs",
     [](auto parameters) {
       return std::make_shared<torch::optim::LBFGS>(
           parameters, torch::optim::LBFGSOptions(0.5).max_iter(4).line_search_fn("strong_wolfe"));
     },
     true},
};

class HealthyTraining : public ::testing::TestWithParam<std::tuple<OptimizerKind, bool, bool>> {};

TEST_P(HealthyTraining, IsBitIdenticalWithAndWithoutTheWrapperAndHasNoFindings) {
  const auto& [kind, sets_to_none, checks_parameters] = GetParam();
  constexpr int kSteps = 50;
  const auto plain = std::make_shared<TwoLayers>();
  const auto watched = std::make_shared<TwoLayers>();
  const auto plain_optimizer = kind.make(plain->parameters());
  const TemporaryFolder folder;
  LocatorOptions options;
  options.output_dir = folder / "run";
  options.check_params = checks_parameters;
  LocatingOptimizer optimizer(kind.make(watched->parameters()), *watched, options);
  for (int step = 0; step < kSteps; ++step) {
    double plain_loss = 0;
    double watched_loss = 0;
    if (kind.takes_closure) {
      const auto closure = [&, sets_to_none = sets_to_none](const TwoLayers& model,
                                                            auto zero_grad) {
        return [&model, zero_grad, sets_to_none] {
          zero_grad(sets_to_none);
          auto loss = model.loss(batch(0));  // LBFGS diverges if batches differ between calls
          loss.backward();
          return loss;
        };
      };
      plain_loss = plain_optimizer
                       ->step(closure(*plain, [&](bool none) { plain_optimizer->zero_grad(none); }))
                       .item<double>();
      watched_loss =
          optimizer.step(closure(*watched, [&](bool none) { optimizer.zero_grad(none); }))
              .item<double>();
    } else {
      plain_optimizer->zero_grad(sets_to_none);
      auto loss = plain->loss(batch(step));
      plain_loss = loss.item<double>();
      loss.backward();
      const double plain_norm = torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.5);
      plain_optimizer->step();

      optimizer.zero_grad(sets_to_none);
      loss = watched->loss(batch(step));
      watched_loss = loss.item<double>();
      loss.backward();
      EXPECT_EQ(optimizer.clip_grad_norm(0.5), plain_norm);
      optimizer.step();
    }
    ASSERT_EQ(watched_loss, plain_loss) << "step " << step;
  }
  EXPECT_EQ(weights_of(*watched), weights_of(*plain));
  EXPECT_EQ(optimizer.locator().incidents(), 0);
  EXPECT_THAT(optimizer.locator().verdicts(), IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(Optimizers, HealthyTraining,
                         ::testing::Combine(::testing::ValuesIn(kOptimizers), ::testing::Bool(),
                                            ::testing::Bool()),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param).name) +
                                  (std::get<1>(info.param) ? "SetToNone" : "Zeroed") +
                                  (std::get<2>(info.param) ? "CheckingParameters" : "");
                         });

TEST_F(LocatingOptimizerTest, DrawsNoNumberFromTorchsGenerator) {
  at::manual_seed(7);
  const auto expected = at::randn({8});
  at::manual_seed(7);
  LocatingOptimizer optimizer(sgd(), *model_, options());
  EXPECT_TRUE(at::randn({8}).equal(expected));
}

// ------------------------------------------------------------------------------------------
// findings

TEST_F(LocatingOptimizerTest, StopsBeforeAWeightMovesAndNamesParameterAndElement) {
  LocatingOptimizer optimizer(sgd(), *model_, options());
  for (int step = 0; step < 2; ++step) {
    optimizer.zero_grad();
    backward(step);
    optimizer.step();
  }
  optimizer.zero_grad();
  backward(2);
  model_->first.mutable_grad()[5][1] = kNan;
  const auto before = weights_of(*model_);
  try {
    optimizer.step();
    FAIL() << "nothing was thrown";
  } catch (const NonFiniteGradientError& error) {
    const auto& origin = error.verdict().origins.at(0);
    EXPECT_EQ(error.verdict().iteration, 3);
    EXPECT_EQ(origin.parameter, "first.weight");
    EXPECT_EQ(origin.phase, Phase::grad_local);
    EXPECT_THAT(origin.tensor.value().first_bad_index, ElementsAre(5, 1));
    EXPECT_THAT(error.what(), HasSubstr("first.weight"));
  }
  EXPECT_EQ(weights_of(*model_), before);
}

TEST_F(LocatingOptimizerTest, StopsBeforeAnythingIsClipped) {
  LocatingOptimizer optimizer(sgd(), *model_, options());
  backward();
  model_->second.mutable_grad()[0][3] = kInfinity;
  const auto untouched = model_->first.grad().clone();
  EXPECT_THROW(optimizer.clip_grad_norm(0.1), NonFiniteGradientError);
  EXPECT_TRUE(model_->first.grad().equal(untouched));
}

TEST_F(LocatingOptimizerTest, TellsANormThatOverflowsThoughEveryGradientIsFinite) {
  LocatingOptimizer optimizer(sgd(), *model_, options());
  backward();
  model_->second.mutable_grad().fill_(1e30);
  const auto before = weights_of(*model_);
  EXPECT_THROW(optimizer.clip_grad_norm(1.0), NonFiniteGradientError);
  EXPECT_EQ(weights_of(*model_), before);
  EXPECT_THAT(to_json(optimizer.locator().verdicts().at(0)), HasSubstr("second.weight"));
}

TEST_F(LocatingOptimizerTest, UnderReportGoesOnAndListsTheFindings) {
  LocatingOptimizer optimizer(sgd(), *model_, options(Policy::report));
  for (int step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    backward(step);
    if (step == 1) model_->bias.mutable_grad()[2] = -kInfinity;
    (void)optimizer.clip_grad_norm(1.0);
    if (step == 1) optimizer.zero_grad();  // the training script drops the gradients
    optimizer.step();
  }
  const auto& verdicts = optimizer.locator().verdicts();
  ASSERT_THAT(verdicts, SizeIs(1));
  EXPECT_EQ(verdicts[0].iteration, 2);
  EXPECT_EQ(verdicts[0].origins.at(0).parameter, "first.bias");
  EXPECT_EQ(verdicts[0].origins[0].tensor.value().neg_inf, 1);
}

TEST_F(LocatingOptimizerTest, UnderSkipABadStepMovesNoWeightAndTheNextOneDoes) {
  LocatingOptimizer optimizer(sgd(), *model_, options(Policy::skip));
  int calls = 0;
  const auto closure = [&] {
    optimizer.zero_grad();
    auto loss = model_->loss(batch(0));
    loss.backward();
    if (++calls == 1) model_->bias.mutable_grad()[0] = kNan;
    return loss;
  };
  const auto before = weights_of(*model_);
  EXPECT_FALSE(optimizer.step(closure).defined());
  EXPECT_EQ(weights_of(*model_), before);
  backward(1);
  model_->bias.mutable_grad()[0] = kNan;
  optimizer.step();
  EXPECT_EQ(weights_of(*model_), before);
  EXPECT_TRUE(optimizer.step(closure).defined());
  EXPECT_NE(weights_of(*model_), before);
  EXPECT_THAT(optimizer.locator().verdicts(), SizeIs(2));
}

TEST_F(LocatingOptimizerTest, UnderRecoverAFaultThatIsGoneInTheRepeatLeavesNoTrace) {
  const auto train = [&](bool is_faulty) {
    const auto model = std::make_shared<TwoLayers>();
    auto inner = std::make_shared<torch::optim::SGD>(model->parameters(), 0.1);
    LocatingOptimizer optimizer(inner, *model, options(Policy::recover));
    int calls = 0;
    std::vector<float> losses;
    for (int step = 0; step < 3; ++step) {
      const auto loss = optimizer.step([&] {
        optimizer.zero_grad();
        auto value = model->loss(batch(step));
        value.backward();
        if (++calls == 2 && is_faulty) {  // a bit error: no operator writes it
          model->bias.mutable_grad().mutable_data_ptr<float>()[0] = kNan;
          value.detach().mutable_data_ptr<float>()[0] = kNan;
        }
        return value;
      });
      losses.push_back(loss.item<float>());
    }
    EXPECT_THAT(optimizer.locator().verdicts(), SizeIs(is_faulty ? 1 : 0));
    return std::pair(weights_of(*model), losses);
  };
  EXPECT_EQ(train(true), train(false));
}

TEST_F(LocatingOptimizerTest, RefusesLevelBoundaries) {
  auto with_boundaries = options();
  with_boundaries.level = Level::boundaries;
  EXPECT_THROW(LocatingOptimizer(sgd(), *model_, with_boundaries), UsageError);
}

TEST_F(LocatingOptimizerTest, GoesOnInTheNextStepWhereTheErrorIsCaught) {
  LocatingOptimizer optimizer(sgd(), *model_, options());
  backward(0);
  model_->bias.mutable_grad()[0] = kNan;
  EXPECT_THROW(optimizer.step(), NonFiniteGradientError);
  optimizer.zero_grad();
  backward(1);
  optimizer.step();
  backward(2);
  model_->bias.mutable_grad()[0] = kNan;
  EXPECT_THROW(optimizer.step(), NonFiniteGradientError);
  EXPECT_EQ(optimizer.locator().verdicts().at(1).iteration, 3);
}

TEST_F(LocatingOptimizerTest, ScansAgainGradientsThatWereComputedAfterTheClip) {
  LocatingOptimizer optimizer(sgd(), *model_, options());
  backward(0);
  (void)optimizer.clip_grad_norm(1.0);
  optimizer.zero_grad();
  backward(1);
  model_->bias.mutable_grad()[0] = kNan;
  EXPECT_THROW(optimizer.step(), NonFiniteGradientError);
}

TEST_F(LocatingOptimizerTest, SeesWhatAClosureComputes) {
  const auto lbfgs = std::make_shared<torch::optim::LBFGS>(
      model_->parameters(), torch::optim::LBFGSOptions(0.1).max_iter(4));
  LocatingOptimizer optimizer(lbfgs, *model_, options());
  int calls = 0;
  const auto closure = [&] {
    optimizer.zero_grad();
    auto loss = model_->loss(batch(0));
    loss.backward();
    if (++calls >= 3) model_->second.mutable_grad()[0][7] = kNan;
    return loss;
  };
  EXPECT_THROW(optimizer.step(closure), NonFiniteGradientError);
  EXPECT_EQ(calls, 4);  // the third is bad, and repeated
  EXPECT_EQ(optimizer.locator().verdicts().at(0).origins.at(0).parameter, "second.weight");
}

TEST_F(LocatingOptimizerTest, DoesNotBlameAFiniteLossForWhatTorchsClipInAClosureMadeOfOneElement) {
  // Code outside the dispatcher, whose execution is not seen; the NaN norm makes all gradients NaN.
  LocatingOptimizer optimizer(sgd(), *model_, options());
  int calls = 0;
  const auto closure = [&] {
    optimizer.zero_grad();
    auto loss = model_->loss(batch(0));
    loss.backward();
    if (++calls == 1) model_->first.mutable_grad().mutable_data_ptr<float>()[9] = kNan;
    torch::nn::utils::clip_grad_norm_(model_->parameters(), 1.0);
    return loss;
  };
  EXPECT_THROW(optimizer.step(closure), NonFiniteGradientError);
  const auto& origin = optimizer.locator().verdicts().at(0).origins.at(0);
  EXPECT_TRUE(has_fact(origin.facts, FactKind::all_gradients_bad_loss_finite));
  EXPECT_FALSE(has_fact(origin.facts, FactKind::all_gradients_bad));
}

TEST_F(LocatingOptimizerTest, TheTraceNamesTheOperatorBehindTorchsClipInAClosure) {
  LocatingOptimizer optimizer(sgd(), *model_, options());
  const auto closure = [&] {
    optimizer.zero_grad();
    auto loss = model_->loss(batch(0)) + at::sqrt(model_->bias.square()).sum();  // the bias is zero
    loss.backward();
    torch::nn::utils::clip_grad_norm_(model_->parameters(), 1.0);
    return loss;
  };
  EXPECT_THROW(optimizer.step(closure), NonFiniteGradientError);
  const auto& origins = optimizer.locator().verdicts().at(0).origins;
  ASSERT_THAT(origins, SizeIs(1));
  EXPECT_EQ(origins[0].forward_op, "aten::sqrt");
  EXPECT_EQ(origins[0].phase, Phase::backward);
  EXPECT_FALSE(has_fact(origins[0].facts, FactKind::all_gradients_bad));
}

TEST_F(LocatingOptimizerTest, NamesTheRowOfASparseEmbeddingGradient) {
  struct TinyEmbedding : torch::nn::Module {
    TinyEmbedding() { weight = register_parameter("weight", at::ones({10, 3})); }
    at::Tensor weight;
  };
  struct Model : torch::nn::Module {
    Model() { words = register_module("words", std::make_shared<TinyEmbedding>()); }
    std::shared_ptr<TinyEmbedding> words;
  };
  const auto model = std::make_shared<Model>();
  const auto inner =
      std::make_shared<torch::optim::SGD>(model->parameters(), torch::optim::SGDOptions(0.1));
  LocatingOptimizer optimizer(inner, *model, options());
  at::embedding(model->words->weight, at::tensor({7, 2}, at::kLong), -1, false, /*sparse=*/true)
      .sum()
      .backward();
  const auto gradient = model->words->weight.grad();
  ASSERT_TRUE(gradient.is_sparse());
  const auto rows = gradient._indices()[0];
  for (std::int64_t k = 0; k < rows.numel(); ++k) {
    if (rows[k].item<std::int64_t>() == 7) gradient._values()[k][1] = kNan;
  }
  EXPECT_THROW(optimizer.step(), NonFiniteGradientError);
  const auto& origin = optimizer.locator().verdicts().at(0).origins.at(0);
  EXPECT_EQ(origin.parameter, "words.weight");
  EXPECT_THAT(origin.tensor.value().first_bad_index, ElementsAre(7, 1));
  EXPECT_TRUE(optimizer.locator().map().at(0).may_be_untouched);
}

TEST_F(LocatingOptimizerTest, ParametersWithoutGradientAreNoFinding) {
  LocatingOptimizer optimizer(sgd(), *model_, options());
  optimizer.step();  // without a backward
  model_->loss(batch(0)).backward();
  model_->second.mutable_grad().reset();
  optimizer.step();
  EXPECT_EQ(optimizer.locator().incidents(), 0);
}

// ------------------------------------------------------------------------------- names and
// parameters

TEST_F(LocatingOptimizerTest, NamesParametersOfTheModelOthersByTheirPlaceAndThoseAddedLater) {
  auto loose = at::ones({2}).requires_grad_();
  auto later = at::ones({3}).requires_grad_();
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<at::Tensor>{model_->second});
  groups.emplace_back(std::vector<at::Tensor>{model_->first, loose});
  const auto inner = std::make_shared<torch::optim::SGD>(groups, torch::optim::SGDOptions(0.1));
  LocatingOptimizer optimizer(inner, *model_, options());
  const auto names = [&] {
    std::vector<std::string> all;
    for (const auto& info : optimizer.locator().map().parameters()) all.push_back(info.name);
    return all;
  };
  EXPECT_THAT(names(), ElementsAre("second.weight", "first.weight", "group1.1"));
  backward(0);
  optimizer.step();
  optimizer.add_param_group(torch::optim::OptimizerParamGroup(std::vector<at::Tensor>{later}));
  EXPECT_THAT(names(), ElementsAre("second.weight", "first.weight", "group1.1", "group2.0"));
  backward(1);
  later.mutable_grad() = at::full({3}, kNan);
  EXPECT_THROW(optimizer.step(), NonFiniteGradientError);
  EXPECT_EQ(optimizer.locator().verdicts().at(0).origins.at(0).parameter, "group2.0");
}

TEST_F(LocatingOptimizerTest, MarksATensorThatTheModelRegistersTwice) {
  model_->register_parameter("tied", model_->second);
  LocatingOptimizer optimizer(
      std::make_shared<torch::optim::SGD>(std::vector<at::Tensor>{model_->first, model_->second},
                                          torch::optim::SGDOptions(0.1)),
      *model_, options());
  EXPECT_FALSE(optimizer.locator().map().at(0).is_shared);
  EXPECT_TRUE(optimizer.locator().map().at(1).is_shared);
  EXPECT_EQ(optimizer.locator().map().at(1).name, "tied");  // a module's own parameters come first
}

TEST_F(LocatingOptimizerTest, ObservesTheOrderInWhichBackwardFinishes) {
  LocatingOptimizer optimizer(sgd(), *model_, options());
  backward(0);
  model_->first.mutable_grad()[0][0] = kNan;
  EXPECT_THROW(optimizer.step(), NonFiniteGradientError);
  std::ifstream file(optimizer.locator().run_dir() / "ledger_tp0pp0dp0.jsonl");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const auto ledger = ledgers_from_jsonl(text, "ledger").at(0);
  EXPECT_TRUE(ledger.is_backward_order_observed);
  std::vector<std::string> names;
  for (const auto& parameter : ledger.backward_order) names.push_back(parameter.name);
  const auto place = [&](const char* name) {
    return std::ranges::find(names, name) - names.begin();
  };
  EXPECT_LT(place("second.weight"), place("first.weight"));
  EXPECT_LT(place("second.bias"), place("first.bias"));
}

TEST_F(LocatingOptimizerTest, LeavesNoHookBehind) {
  {
    LocatingOptimizer optimizer(sgd(), *model_, options());
    backward(0);
    optimizer.step();
  }
  backward(1);  // must not call into the destroyed locator
  EXPECT_TRUE(model_->first.grad().defined());
}

TEST_F(LocatingOptimizerTest, RefusesANullOptimizer) {
  EXPECT_THROW(LocatingOptimizer(nullptr, *model_, options()), UsageError);
}

// ----------------------------------------------------------------------------------------
// check_params

TEST_F(LocatingOptimizerTest, FindsAWeightThatIsBadBeforeTheStep) {
  auto with_check = options();
  with_check.check_params = true;
  LocatingOptimizer optimizer(sgd(), *model_, with_check);
  model_->first.mutable_data_ptr<float>()[6] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THROW(optimizer.step(), NonFiniteGradientError);
  const auto& origin = optimizer.locator().verdicts().at(0).origins.at(0);
  EXPECT_EQ(origin.phase, Phase::params_before);
  EXPECT_EQ(origin.parameter, "first.weight");
  EXPECT_THAT(origin.tensor.value().first_bad_index, ElementsAre(1, 2));
}

TEST_F(LocatingOptimizerTest, FindsAWeightThatTheOptimizerItselfBreaks) {
  auto with_check = options();
  with_check.check_params = true;
  const auto inner =
      std::make_shared<torch::optim::SGD>(model_->parameters(), torch::optim::SGDOptions(1e38));
  LocatingOptimizer optimizer(inner, *model_, with_check);
  backward(0);
  model_->second.mutable_grad().fill_(1e3);  // finite; overflows times the learning rate
  EXPECT_THROW(optimizer.step(), NonFiniteGradientError);
  EXPECT_EQ(optimizer.locator().verdicts().at(0).origins.at(0).phase, Phase::params_after);
}

// ---------------------------------------------------------------------------------------- several
// ranks

TEST_F(LocatingOptimizerTest, StopsEveryRankOfADataParallelProgram) {
  std::vector<std::string> verdicts(3);
  run_ranks(3, one_hash_store(), [&](const auto& communicator) {
    const int rank = communicator->rank();
    auto weight = at::ones({4}).requires_grad_();
    struct Model : torch::nn::Module {};
    Model model;
    model.register_parameter("weight", weight);
    const auto inner = std::make_shared<torch::optim::SGD>(std::vector<at::Tensor>{weight},
                                                           torch::optim::SGDOptions(0.1));
    LocatingOptimizer optimizer(inner, model, options(), communicator);
    weight.square().sum().backward();
    optimizer.step();
    if (rank == 2) weight.mutable_grad()[3] = kNan;
    const auto before = weight.detach().clone();
    try {
      optimizer.step();
      FAIL() << "rank " << rank << " went on";
    } catch (const NonFiniteGradientError& error) {
      verdicts[rank] = to_json(error.verdict());
      EXPECT_EQ(error.verdict().origins.at(0).phase, Phase::grad_reduced);
    }
    EXPECT_TRUE(weight.detach().equal(before));
  });
  EXPECT_EQ(verdicts[1], verdicts[0]);
  EXPECT_EQ(verdicts[2], verdicts[0]);
}

}  // namespace
}  // namespace nanlocator::testing
