// A small training loop in C++. In step 7 one element of one gradient goes bad, as from a faulty
// chip: the optimizer names it before a weight has changed.
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <nanlocator/step/locating_optimizer.hpp>

#include <cmath>
#include <cstdlib>
#include <iostream>
#include <memory>

namespace {

struct Network : torch::nn::Module {
  at::Tensor forward(const at::Tensor& input) { return output(torch::relu(hidden(input))); }

  torch::nn::Linear hidden = register_module("hidden", torch::nn::Linear(16, 32));
  torch::nn::Linear output = register_module("output", torch::nn::Linear(32, 1));
};

}  // namespace

int main() {
  const auto model = std::make_shared<Network>();
  const auto adam = std::make_shared<torch::optim::Adam>(model->parameters(), 1e-3);
  nanlocator::LocatingOptimizer optimizer(adam, *model, {.on_bad = nanlocator::Policy::stop});

  try {
    for (int step = 1; step <= 10; ++step) {
      const auto input = torch::randn({64, 16});
      optimizer.zero_grad();
      const auto loss = torch::mse_loss(model->forward(input), input.sum(1, /*keepdim=*/true));
      loss.backward();
      if (step == 7) model->hidden->weight.mutable_grad()[20][3] = NAN;

      const double norm = optimizer.clip_grad_norm(1.0);  // the norm is torch's
      optimizer.step();
      std::cout << "step " << step << "  loss " << loss.item<double>() << "  norm " << norm << "\n";
    }
  } catch (const nanlocator::NonFiniteGradientError& error) {
    std::cout << error.what() << "\n";
    const auto& origin = error.verdict().origins.at(0);
    return origin.parameter == "hidden.weight" ? EXIT_SUCCESS : EXIT_FAILURE;
  }
  std::cout << "the planted NaN was not found\n";
  return EXIT_FAILURE;
}
