// Applies the faults of a step during forward and backward. Each call returns the tokens that
// become bad, and records which fault struck.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
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

  /// Between the GEMMs of a block; `here`: the tokens that the rank works on there.
  Tokens at_operators(const Place& place, int dp, int tp, Tokens here);
  /// The rank's result of the block's reduction; `held`: the tokens that it then holds.
  Received at_sum(const Place& place, int dp, int tp, Tokens held);
  /// The rank's receipt from another stage.
  Tokens at_transfer(const Place& place, int dp, int tp, Tokens held);
  /// True if the microbatch has no valid labels on dp rank `dp`.
  bool at_loss(int microbatch, int dp);

  /// The rank's position when the operators of a fault run there, whether they are hit or not.
  void note_position(const Place& place, int dp, int tp, std::int64_t position);
  [[nodiscard]] std::optional<std::int64_t> position_of(const Fault& fault, bool is_backward,
                                                        int microbatch, int dp, int tp) const;

  /// True if the fault had any effect; only for faults that strike in a pass.
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
  std::map<std::tuple<Key, bool, int, int, int>, std::int64_t> positions_;
};

}  // namespace nanlocator::pipeline
