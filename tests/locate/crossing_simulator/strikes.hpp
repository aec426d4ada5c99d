// When and at what the faults of a step strike while forward and backward run. Each question says
// which tokens become bad, and remembers whose fault it was.
#pragma once

#include <set>
#include <tuple>
#include <vector>

#include "locate/crossing_simulator/fault.hpp"
#include "locate/crossing_simulator/place.hpp"
#include "locate/crossing_simulator/tokens.hpp"

namespace nanlocator::pipeline {

class Strikes {
 public:
  explicit Strikes(const std::vector<Fault>& faults) : faults_(faults) {}

  /// Between the GEMMs of a block, of the tokens that the rank works on there.
  Tokens at_operators(const Place& place, int dp, int tp, Tokens here);
  /// In what the rank gets out of the block's reduction, of the tokens that it then holds.
  Received at_sum(const Place& place, int dp, int tp, Tokens held);
  /// In what the rank receives from another stage.
  Tokens at_transfer(const Place& place, int dp, int tp, Tokens held);
  /// The microbatch has no valid labels there.
  bool at_loss(int microbatch, int dp);

  /// Whether the fault did anything; only of those that strike in a pass.
  [[nodiscard]] bool have_come_of(const Fault& fault) const {
    return struck_.contains(key_of(fault));
  }

 private:
  using Key = std::tuple<Plant, int, int, int, int, bool>;
  [[nodiscard]] static Key key_of(const Fault& fault) {
    return {fault.plant, fault.tp, fault.dp, fault.stage, fault.layer, fault.is_mlp};
  }

  std::vector<Fault> faults_;
  std::set<Key> struck_;
};

}  // namespace nanlocator::pipeline
