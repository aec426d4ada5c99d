// Wraps any libtorch optimizer: finds, names and reports bad gradients before it steps.
//
//     auto adam = std::make_shared<torch::optim::Adam>(model->parameters(), 1e-3);
//     nanlocator::LocatingOptimizer optimizer(adam, *model, {.on_bad = nanlocator::Policy::stop});
//     ...
//     loss.backward();
//     double norm = optimizer.clip_grad_norm(1.0);  // the norm is torch's
//     optimizer.step();  // throws NonFiniteGradientError before a weight moves
//
// With step(closure) a bad step is executed again with every operator traced (StepRerun), and the
// verdict names the operator. Without a closure the next bad step is traced, and the verdict says
// so. StepDriver owns all state of the step.
//
// Cost: one extra read of the gradients per step and one host wait (the flag). Thread: the
// caller's.
#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <vector>

#include "nanlocator/step/step_driver.hpp"

namespace nanlocator::inline step_room {

class LocatingOptimizer {
 public:
  /// Names come from `model.named_parameters()`; a parameter outside the model is called
  /// "group{g}.{i}". `communicator`: for data-parallel programs that reduce gradients in backward,
  /// so that they are seen after the reduction; null for a single process. `options.integration` is
  /// "cpp". Throws UsageError if `inner` is null, and the errors of GradientLocator's constructor.
  LocatingOptimizer(std::shared_ptr<torch::optim::Optimizer> inner, const torch::nn::Module& model,
                    LocatorOptions options = {},
                    std::shared_ptr<Communicator> communicator = nullptr);
  ~LocatingOptimizer();
  LocatingOptimizer(const LocatingOptimizer&) = delete;  // shares the inner optimizer's state
  LocatingOptimizer& operator=(const LocatingOptimizer&) = delete;

  [[nodiscard]] torch::optim::Optimizer& inner() noexcept { return *inner_; }
  [[nodiscard]] GradientLocator& locator() noexcept { return driver_->locator(); }

  /// Scans the gradients, then clips as torch::nn::utils::clip_grad_norm_ does and returns its
  /// norm. Inside a closure they are judged after it returns. Elsewhere it throws
  /// NonFiniteGradientError (policy stop) before clipping. If every gradient is finite but the norm
  /// overflows, this is known only after torch has clipped by it: then it throws with the gradients
  /// zeroed. No weight has moved in either case.
  double clip_grad_norm(double max_norm, double norm_type = 2.0);

  /// The inner optimizer's step. Gradients not yet scanned in this step are scanned first; with a
  /// closure they and the loss are scanned after each of its calls, so every rank must make the
  /// same number of calls. Throws NonFiniteGradientError (policy stop): without a closure before a
  /// weight moves; an optimizer that evaluates its closure at trial points (LBFGS) leaves the
  /// weights at such a point. A bad closure is called again, up to two times. It must compute the
  /// same loss from the same data; register other state that it changes with `state`. Policy skip:
  /// bad gradients skip the inner optimizer's update, and an undefined loss is returned. Policy
  /// recover: with a closure whose re-run is clean, the update and the loss are the re-run's.
  at::Tensor step(torch::optim::Optimizer::LossClosure closure = nullptr);

  /// State that is restored for a re-run of the closure: generators and the model's buffers; add
  /// more.
  [[nodiscard]] StepState& state() noexcept { return driver_->state(); }

  void zero_grad(bool set_to_none = true);
  /// Adds the group to the inner optimizer and its parameters to the map. Call it between steps;
  /// gradients already scanned in this step are scanned again.
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

 private:
  class LibtorchFramework;

  void observe_backward();
  void stop_observing() noexcept;
  Decision or_throw(Decision decision) const;
  at::Tensor evaluate(const torch::optim::Optimizer::LossClosure& closure);
  at::Tensor update(const torch::optim::Optimizer::LossClosure& closure);

  struct BackwardHook {
    at::Tensor parameter;
    unsigned position;
  };

  std::shared_ptr<torch::optim::Optimizer> inner_;
  std::shared_ptr<LibtorchFramework> framework_;
  std::unique_ptr<StepDriver> driver_;
  std::vector<BackwardHook> hooks_;
};

}  // namespace nanlocator::inline step_room
