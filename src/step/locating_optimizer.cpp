#include "nanlocator/step/locating_optimizer.hpp"

#include <ATen/ops/zeros_like.h>
#include <torch/nn/utils/clip_grad.h>

#include <cmath>
#include <iostream>
#include <utility>

#include "tensor/tensor_access.hpp"

namespace nanlocator {
namespace {

// One group of scans per phase is enough: parameters need no buckets to be told apart.
constexpr std::uint64_t kOnlyGroup = 0;

// "torch::nn::EmbeddingImpl", "torch::nn::EmbeddingBagImpl": a batch touches only some of their
// rows.
bool is_embedding(const torch::nn::Module& module) {
  return module.name().find("Embedding") != std::string::npos;
}

/// Out of the inner optimizer's step: its update is left out.
struct SkippedStep {};

}  // namespace

LocatingOptimizer::LocatingOptimizer(std::shared_ptr<torch::optim::Optimizer> inner,
                                     const torch::nn::Module& model, LocatorOptions options,
                                     std::shared_ptr<Communicator> communicator)
    : inner_(std::move(inner)),
      gradient_phase_(communicator ? Phase::grad_reduced : Phase::grad_local) {
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

  coordinates_ = communicator
                     ? data_parallel_coordinates(communicator->rank(), communicator->size())
                     : data_parallel_coordinates(0, 1);
  if (const auto all = parameters(); !all.empty()) coordinates_.device = all.front().device().str();
  options.integration = "cpp";
  locator_ =
      std::make_unique<GradientLocator>(make_map(), std::move(options), std::move(communicator));
  for (const auto& buffer : model.named_buffers()) {
    buffers_.push_back({buffer.key(), buffer.value()});
  }
  rerun_ = std::make_unique<StepRerun>(*locator_);
  rerun_->set_step(repeatable_step());
  if (locator_->options().level == Level::operators) {
    rerun_->trace_from_now_on();
    if (!rerun_->is_tracing()) {
      throw UsageError(
          "LocatingOptimizer: level operators is on for another optimizer of this process; one "
          "trace at a time.");
    }
  }
  observe_backward();
}

LocatingOptimizer::~LocatingOptimizer() {
  stop_observing();
}

ParameterMap LocatingOptimizer::make_map() const {
  std::vector<ParameterInfo> infos;
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
      infos.push_back(std::move(info));
    }
  }
  return {coordinates_, std::move(infos)};
}

std::vector<at::Tensor> LocatingOptimizer::parameters() const {
  std::vector<at::Tensor> all;
  for (const auto& group : inner_->param_groups()) {
    all.insert(all.end(), group.params().begin(), group.params().end());
  }
  return all;
}

// A hook that returns nothing leaves the gradient as it is; it tells only when it was made.
void LocatingOptimizer::observe_backward() {
  const auto all = parameters();
  for (std::size_t id = 0; id < all.size(); ++id) {
    if (!all[id].requires_grad()) continue;
    const auto note = [locator = locator_.get(), id](const at::Tensor&) {
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
      // The parameter has been detached since, and its hooks with it.
    }
  }
  hooks_.clear();
}

std::vector<GradientView> LocatingOptimizer::gradients() const {
  const auto all = parameters();
  std::vector<GradientView> views;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (const auto& gradient = all[i].grad(); gradient.defined()) {
      views.push_back({static_cast<std::int64_t>(i), gradient, 0});
    }
  }
  return views;
}

std::vector<GradientView> LocatingOptimizer::weights() const {
  const auto all = parameters();
  std::vector<GradientView> views;
  for (std::size_t i = 0; i < all.size(); ++i) {
    views.push_back({static_cast<std::int64_t>(i), all[i], 0});
  }
  return views;
}

RepeatableStep LocatingOptimizer::repeatable_step() {
  RepeatableStep step;
  step.run = [this] {
    repeated_loss_ = (*closure_)();
    return std::vector<NamedTensor>{{"loss", repeated_loss_}};
  };
  step.gradients = [this] { return gradients(); };
  step.clear_gradients = [this] {
    const auto all = parameters();
    for (std::size_t i = 0; i < all.size(); ++i) {
      auto& gradient = all[i].mutable_grad();
      if (!gradient.defined()) continue;
      if (i < had_gradient_.size() && had_gradient_[i]) {
        gradient = at::zeros_like(gradient);  // the tensor of the first pass may be shared
      } else {
        gradient = at::Tensor();
      }
    }
  };
  const auto& map = locator_->map();
  const auto all = parameters();
  for (std::size_t i = 0; i < all.size(); ++i) {
    step.parameters.push_back({map.at(static_cast<std::int64_t>(i)).name, all[i]});
  }
  step.buffers = buffers_;
  return step;
}

void LocatingOptimizer::conclude(const std::vector<GradientView>& results) {
  repeated_loss_.reset();
  const bool is_clean_now =
      rerun_->find_births(closure_ != nullptr ? CanRepeat::yes : CanRepeat::no, results);
  const auto& verdict = locator_->conclude();
  const auto policy = locator_->options().on_bad;
  if (policy == Policy::recover && is_clean_now) return;
  repeated_loss_.reset();
  is_bad_ = true;
  if (policy == Policy::report || policy == Policy::skip) return;
  // A caller that catches this and goes on is in the next step.
  is_looked_at_ = false;
  is_bad_ = false;
  ++iteration_;
  throw NonFiniteGradientError(verdict, locator_->run_dir());
}

void LocatingOptimizer::look_at_gradients(const at::Tensor& loss) {
  is_bad_ = false;
  locator_->begin_step(iteration_);
  if (locator_->options().check_params) {
    locator_->scan(Phase::params_before, kOnlyGroup, "weight", weights());
  }
  locator_->scan(gradient_phase_, kOnlyGroup, "grad", gradients());
  const LossView view{.tensor = loss, .microbatch = {}, .chunk = {}, .valid_labels = {}};
  locator_->scan_losses({&view, 1});
  locator_->start_agreement();
  is_looked_at_ = true;
  if (locator_->finish_agreement()) conclude(gradients());
}

void LocatingOptimizer::look_at_updated_parameters() {
  locator_->scan(Phase::params_after, kOnlyGroup, "weight", weights());
  locator_->start_agreement();
  if (locator_->finish_agreement()) conclude(weights());
}

double LocatingOptimizer::clip_grad_norm(double max_norm, double norm_type) {
  look_at_gradients();
  const double norm = torch::nn::utils::clip_grad_norm_(parameters(), max_norm, norm_type);
  if (is_bad_) return norm;  // policy report: told already
  locator_->set_gradient_norm(norm);
  if (!std::isfinite(norm)) conclude(gradients());
  return norm;
}

void LocatingOptimizer::begin_closure(const torch::optim::Optimizer::LossClosure& closure) {
  closure_ = &closure;
  had_gradient_.clear();
  for (const auto& parameter : parameters()) had_gradient_.push_back(parameter.grad().defined());
  rerun_->save();
}

void LocatingOptimizer::compare_with_repeat() {
  if (const auto changed = rerun_->compare(); changed > 0) {
    std::cerr << "nanlocator: step " << iteration_ << ": executed again from the same state, "
              << changed << " gradients have other bits" << std::endl;
  }
}

at::Tensor LocatingOptimizer::evaluate(const torch::optim::Optimizer::LossClosure& closure) {
  begin_closure(closure);
  auto loss = closure();
  look_at_gradients(loss);
  if (repeated_loss_.defined()) loss = std::move(repeated_loss_);  // recovered
  if (is_bad_ && locator_->options().on_bad == Policy::skip) throw SkippedStep();
  if (locator_->options().rerun == RerunPolicy::always && !is_bad_) compare_with_repeat();
  closure_ = nullptr;
  return loss;
}

at::Tensor LocatingOptimizer::update(const torch::optim::Optimizer::LossClosure& closure) {
  if (closure) {
    try {
      return inner_->step([&] { return evaluate(closure); });
    } catch (const SkippedStep&) {
      closure_ = nullptr;
      return {};
    }
  }
  if (!is_looked_at_) look_at_gradients();
  is_looked_at_ = false;  // also where the inner optimizer throws
  if (is_bad_ && locator_->options().on_bad == Policy::skip) return {};
  rerun_->begin_update();
  auto loss = inner_->step();
  rerun_->end_update();
  return loss;
}

at::Tensor LocatingOptimizer::step(torch::optim::Optimizer::LossClosure closure) {
  auto loss = update(closure);
  // After bad gradients bad parameters are no news.
  if (locator_->options().check_params && !is_bad_) look_at_updated_parameters();
  is_looked_at_ = false;
  is_bad_ = false;
  rerun_->begin_pass();
  ++iteration_;
  return loss;
}

void LocatingOptimizer::zero_grad(bool set_to_none) {
  inner_->zero_grad(set_to_none);
  is_looked_at_ = false;
}

void LocatingOptimizer::add_param_group(const torch::optim::OptimizerParamGroup& group) {
  inner_->add_param_group(group);
  stop_observing();
  locator_->set_map(make_map());
  rerun_->set_step(repeatable_step());
  observe_backward();
  is_looked_at_ = false;
}

}  // namespace nanlocator
