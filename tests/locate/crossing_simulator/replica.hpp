// One replica's forward and backward over all microbatches: which tokens are NaN after each
// operator, and therefore which gradients are.
#pragma once

#include <map>
#include <string>
#include <tuple>

#include "incident/simulated_job.hpp"
#include "locate/crossing_simulator/exchange.hpp"
#include "locate/crossing_simulator/observer.hpp"
#include "locate/crossing_simulator/place.hpp"
#include "locate/crossing_simulator/strikes.hpp"
#include "locate/crossing_simulator/tokens.hpp"

namespace nanlocator::pipeline {

class Replica {
 public:
  /// The replica whose first dp rank is `first_dp`. Keeps references to its arguments.
  Replica(const Layout& layout, int first_dp, Strikes& strikes, Observer& observer)
      : layout_(layout),
        first_dp_(first_dp),
        tokens_(layout),
        strikes_(strikes),
        observer_(observer),
        exchange_(layout, first_dp, tokens_, strikes, observer) {}
  Replica(const Replica&) = delete;  // its exchange refers to its tokens
  Replica& operator=(const Replica&) = delete;

  /// Runs in any order that the pipeline's dependencies allow, the same on all ranks of a stage.
  /// Returns the bad gradients by rank.
  simulator::BadByRank run(unsigned seed);

 private:
  /// Values that a block saves for backward: at its norm's input, at its first GEMM, at its second.
  struct Saved {
    Grid hidden, input, region;
  };
  using BlockRun = std::tuple<int, int, Block>;  // stage, microbatch

  void forward(int stage, int microbatch);
  void forward_block(Grid& hidden, const Place& stage, const Block& block);
  void compute_loss(const Grid& hidden, const Place& stage);

  void backward(int stage, int microbatch);
  Grid backward_of_loss(const Place& stage);
  void backward_block(Grid& gradient, const Place& stage, const Block& block);
  void backward_dense(Grid& region, const Saved& saved, const Place& stage, const Block& block);
  void backward_experts(Grid& region, const Saved& saved, const Place& experts);

  [[nodiscard]] int number_of(const Place& stage, const Block& block) const {
    return stage.stage * layout_.layers_per_stage + block.layer;
  }
  [[nodiscard]] bool has_experts(const Block& block) const {
    return block.is_mlp && layout_.has_experts;
  }
  /// Applies faults of the block's operators to the tokens that each rank works on.
  void strike(Grid& region, const Place& place);

  /// Marks the gradient of a parameter as bad on ranks where any of `tokens` is NaN.
  void spoil(const Place& place, const std::string& parameter, const Grid& tokens);
  /// A weight's gradient depends on its output's gradient and on its input, a bias's only on the
  /// former.
  void spoil_layer(const Place& place, const std::string& layer, const Grid& gradient,
                   const Grid& input, const Grid& bias_gradient);

  const Layout& layout_;
  int first_dp_;
  ReplicaTokens tokens_;
  Strikes& strikes_;
  Observer& observer_;
  Exchange exchange_;
  std::map<BlockRun, Saved> saved_;
  std::map<int, Grid> final_hidden_, bad_logits_;  // by microbatch
  simulator::BadByRank bad_;
};

}  // namespace nanlocator::pipeline
