#include "nanlocator/step/locating_optimizer.hpp"

#include <ATen/ops/zeros_like.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <string>
#include <unordered_map>
#include <utility>

#include "tensor/tensor_access.hpp"

namespace nanlocator::inline step_room {
namespace {

// "torch::nn::EmbeddingImpl", "torch::nn::EmbeddingBagImpl": a batch uses only some of their rows.
bool is_embedding(const torch::nn::Module& module) {
  return module.name().find("Embedding") != std::string::npos;
}

/// Thrown out of the inner optimizer's step to skip its update.
struct SkippedStep {};

/// Moments that libtorch's optimizers keep of a gradient; empty for other optimizers.
std::vector<NamedTensor> moments_of(torch::optim::OptimizerParamState& state) {
  if (auto* adam = dynamic_cast<torch::optim::AdamParamState*>(&state)) {
    return {{"exp_avg", adam->exp_avg()}, {"exp_avg_sq", adam->exp_avg_sq()}};
  }
  if (auto* adamw = dynamic_cast<torch::optim::AdamWParamState*>(&state)) {
    return {{"exp_avg", adamw->exp_avg()}, {"exp_avg_sq", adamw->exp_avg_sq()}};
  }
  if (auto* sgd = dynamic_cast<torch::optim::SGDParamState*>(&state)) {
    return {{"momentum_buffer", sgd->momentum_buffer()}};
  }
  return {};
}

}  // namespace

/// The groups of an optimizer and the names of a model.
class LocatingOptimizer::LibtorchFramework final : public Framework {
 public:
  LibtorchFramework(std::shared_ptr<torch::optim::Optimizer> inner, const torch::nn::Module& model,
                    const Communicator* communicator)
      : inner_(std::move(inner)),
        gradient_phase_(communicator != nullptr ? Phase::grad_reduced : Phase::grad_local) {
    for (const auto& parameter : model.named_parameters()) {
      const auto [place, is_new] =
          names_.try_emplace(parameter.value().unsafeGetTensorImpl(), Name{parameter.key()});
      if (!is_new) place->second.is_shared = true;
      model_.push_back(parameter.value());
    }
    const auto mark_embedding = [this](const torch::nn::Module& module) {
      if (!is_embedding(module)) return;
      for (const auto& parameter : module.parameters(/*recurse=*/false)) {
        names_.at(parameter.unsafeGetTensorImpl()).may_be_untouched = true;
      }
    };
    mark_embedding(model);
    for (const auto& child : model.modules(/*include_self=*/false)) mark_embedding(*child);

    coordinates_ = communicator != nullptr
                       ? data_parallel_coordinates(communicator->rank(), communicator->size())
                       : data_parallel_coordinates(0, 1);
    if (const auto all = tensors(); !all.empty()) coordinates_.device = all.front().device().str();
    for (const auto& buffer : model.named_buffers()) {
      buffers_.push_back({buffer.key(), buffer.value()});
    }
  }

  [[nodiscard]] std::vector<at::Tensor> tensors() const {
    std::vector<at::Tensor> all;
    for (const auto& group : inner_->param_groups()) {
      all.insert(all.end(), group.params().begin(), group.params().end());
    }
    return all;
  }

  ParameterMap parameter_map() override {
    std::vector<ParameterInfo> infos;
    by_number_.clear();
    const auto& groups = inner_->param_groups();
    for (std::size_t group = 0; group < groups.size(); ++group) {
      const auto& parameters = groups[group].params();
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        ParameterInfo info;
        info.id = static_cast<std::int64_t>(infos.size());
        info.shape = parameters[i].sizes().vec();
        info.dtype = dtype_name(parameters[i].scalar_type());
        if (const auto found = names_.find(parameters[i].unsafeGetTensorImpl());
            found != names_.end()) {
          info.name = found->second.name;
          info.is_shared = found->second.is_shared;
          info.may_be_untouched = found->second.may_be_untouched;
        } else {
          info.name = "group" + std::to_string(group) + "." + std::to_string(i);
        }
        info.raw_name = info.name;
        by_number_.push_back(info.name);
        infos.push_back(std::move(info));
      }
    }
    return {coordinates_, std::move(infos)};
  }

  Phase gradient_phase() override { return gradient_phase_; }

  std::vector<GradientView> gradients() override {
    const auto all = tensors();
    std::vector<GradientView> views;
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (const auto& gradient = all[i].grad(); gradient.defined()) {
        views.push_back({static_cast<std::int64_t>(i), gradient, 0});
      }
    }
    return views;
  }

  std::vector<GradientView> weights() override {
    const auto all = tensors();
    std::vector<GradientView> views;
    for (std::size_t i = 0; i < all.size(); ++i) {
      views.push_back({static_cast<std::int64_t>(i), all[i], 0});
    }
    return views;
  }

  std::vector<NamedTensor> parameters() override {
    const auto all = tensors();
    std::vector<NamedTensor> named;
    for (std::size_t i = 0; i < all.size(); ++i) named.push_back({by_number_.at(i), all[i]});
    return named;
  }

  std::vector<NamedTensor> buffers() override { return buffers_; }

  std::vector<OptimizerTensor> optimizer_state(const std::vector<std::int64_t>& ids) override {
    const auto all = tensors();
    std::vector<OptimizerTensor> found;
    for (const auto id : ids) {
      const auto state = inner_->state().find(all.at(id).unsafeGetTensorImpl());
      if (state == inner_->state().end()) continue;
      for (auto& [name, tensor] : moments_of(*state->second)) {
        if (tensor.defined()) found.push_back({id, name, tensor});
      }
    }
    return found;
  }

  std::string why_no_pass() override { return "step() was called without a closure"; }

 private:
  struct Name {
    std::string name;
    bool is_shared = false;         // the model registers it under several names
    bool may_be_untouched = false;  // of an embedding
  };

  std::shared_ptr<torch::optim::Optimizer> inner_;
  std::unordered_map<const at::TensorImpl*, Name>
      names_;  // of the model; `model_` keeps its tensors alive
  std::vector<at::Tensor> model_;
  std::vector<NamedTensor> buffers_;    // of the model
  std::vector<std::string> by_number_;  // names, in the order of the optimizer's groups
  RankCoordinates coordinates_;
  Phase gradient_phase_;
};

namespace {

/// One evaluation of a closure; gradients may exist before it.
class ClosurePass final : public StepPass {
 public:
  /// `closure` must outlive it. Each execution stores the closure's result in `loss`.
  ClosurePass(const torch::optim::Optimizer::LossClosure& closure,
              std::vector<at::Tensor> parameters, at::Tensor& loss)
      : closure_(closure), parameters_(std::move(parameters)), loss_(loss) {
    for (const auto& each : parameters_) had_gradient_.push_back(each.grad().defined());
  }

  std::vector<NamedTensor> run() override {
    loss_ = closure_();
    return {{"loss", loss_}};
  }

  void clear_gradients() override {
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      auto& gradient = parameters_[i].mutable_grad();
      if (!gradient.defined()) continue;
      // Other code may share the first pass's tensor.
      gradient = had_gradient_[i] ? at::zeros_like(gradient) : at::Tensor();
    }
  }

 private:
  const torch::optim::Optimizer::LossClosure& closure_;
  std::vector<at::Tensor> parameters_;
  std::vector<bool> had_gradient_;
  at::Tensor& loss_;
};

}  // namespace

LocatingOptimizer::LocatingOptimizer(std::shared_ptr<torch::optim::Optimizer> inner,
                                     const torch::nn::Module& model, LocatorOptions options,
                                     std::shared_ptr<Communicator> communicator)
    : inner_(std::move(inner)) {
  if (!inner_) throw UsageError("LocatingOptimizer: the inner optimizer is null.");
  if (options.level == Level::modules) {
    throw UsageError(
        "LocatingOptimizer: libtorch has no hooks around modules, so level modules is not there in "
        "C++. Use Level::grads or Level::operators, or a ModuleWatch by hand.");
  }
  if (options.level == Level::boundaries) {
    throw UsageError(
        "LocatingOptimizer: level boundaries watches what Megatron-Core's ranks hand to each "
        "other. "
        "Use Level::grads or Level::operators.");
  }
  options.integration = "cpp";
  framework_ = std::make_shared<LibtorchFramework>(inner_, model, communicator.get());
  driver_ = std::make_unique<StepDriver>(framework_, std::move(options), std::move(communicator));
  observe_backward();
}

LocatingOptimizer::~LocatingOptimizer() {
  stop_observing();
}

// The hook returns nothing, which leaves the gradient unchanged; it only notes that it is ready.
void LocatingOptimizer::observe_backward() {
  const auto all = framework_->tensors();
  for (std::size_t id = 0; id < all.size(); ++id) {
    if (!all[id].requires_grad()) continue;
    const auto note = [locator = &driver_->locator(), id](const at::Tensor&) {
      locator->gradient_is_ready(static_cast<std::int64_t>(id));
    };
    hooks_.push_back({all[id], all[id].register_hook(note)});
  }
}

void LocatingOptimizer::stop_observing() noexcept {
  for (auto& hook : hooks_) {
    try {
      hook.parameter.remove_hook(hook.position);
    } catch (...) {
      // The parameter and its hooks have been detached since.
    }
  }
  hooks_.clear();
}

Decision LocatingOptimizer::or_throw(Decision decision) const {
  if (decision != Decision::stop) return decision;
  throw NonFiniteGradientError(driver_->verdict(), driver_->locator().run_dir());
}

double LocatingOptimizer::clip_grad_norm(double max_norm, double norm_type) {
  StepDriver::Scope scope(*driver_);
  driver_->scan_gradients();
  or_throw(driver_->agree());
  const double norm = torch::nn::utils::clip_grad_norm_(framework_->tensors(), max_norm, norm_type);
  or_throw(driver_->set_gradient_norm(norm));
  scope.complete();
  return norm;
}

at::Tensor LocatingOptimizer::evaluate(const torch::optim::Optimizer::LossClosure& closure) {
  at::Tensor rerun_loss;
  driver_->begin_pass(std::make_shared<ClosurePass>(closure, framework_->tensors(), rerun_loss));
  auto loss = closure();
  const LossView view{.tensor = loss, .microbatch = {}, .chunk = {}, .valid_labels = {}};
  switch (or_throw(driver_->end_pass({&view, 1}))) {
    case Decision::skip:
      throw SkippedStep();
    case Decision::recovered:
      return rerun_loss;
    default:
      return loss;
  }
}

at::Tensor LocatingOptimizer::update(const torch::optim::Optimizer::LossClosure& closure) {
  if (closure) {
    try {
      return inner_->step([&] { return evaluate(closure); });
    } catch (const SkippedStep&) {
      return {};
    }
  }
  if (or_throw(driver_->scan_and_agree()) == Decision::skip) return {};
  driver_->begin_update();
  return inner_->step();
}

at::Tensor LocatingOptimizer::step(torch::optim::Optimizer::LossClosure closure) {
  StepDriver::Scope scope(*driver_);
  auto loss = update(closure);
  or_throw(driver_->end_step());
  scope.complete();
  return loss;
}

void LocatingOptimizer::zero_grad(bool set_to_none) {
  inner_->zero_grad(set_to_none);
  driver_->forget_gradients();
}

void LocatingOptimizer::add_param_group(const torch::optim::OptimizerParamGroup& group) {
  inner_->add_param_group(group);
  stop_observing();
  driver_->take_parameters_again();
  observe_backward();
}

}  // namespace nanlocator::inline step_room
