// The tokens of one replica: who holds which, and which others attention and experts take them to.
// Token lane * tp + shard stands at that place in its sequence; a lane is one dp rank of the
// replica, and has a sequence of its own.
#pragma once

#include "locate/simulated_job.hpp"
#include "locate/simulated_transformer.hpp"

namespace nanlocator::pipeline {

using simulator::Grid;
using simulator::Layout;
using simulator::Tokens;

/// What a rank gets out of a collective. Overflow: what is bad is Inf, not NaN.
struct Received {
  Tokens tokens = 0;
  bool is_overflow = false;
};

class ReplicaTokens {
 public:
  /// Throws std::invalid_argument where the replica has more tokens than `Tokens` has bits.
  explicit ReplicaTokens(const Layout& layout);

  [[nodiscard]] int lanes() const { return layout_.ep; }
  [[nodiscard]] Grid none() const;
  template <typename Do>
  void each_cell(Do act) const {
    for (int lane = 0; lane < lanes(); ++lane) {
      for (int tp = 0; tp < layout_.tp; ++tp) act(lane, tp);
    }
  }

  [[nodiscard]] Tokens of_lane(int lane) const;
  /// Outside of the tensor-parallel regions: dealt out with sequence parallelism.
  [[nodiscard]] Tokens held_by(int lane, int tp) const;
  [[nodiscard]] Tokens with_words_of(int tp) const;

  /// Causal attention within each lane's sequence; or, where masked scores are multiplied by zero
  /// and not left out, to all of it.
  void attend(Grid& region, bool is_backward) const;
  /// What the ranks work on between a block's GEMMs: all tokens of their lane.
  [[nodiscard]] Grid gathered() const;
  /// What a lane's experts work on: tokens of the whole replica, dealt out by number.
  [[nodiscard]] Grid routed() const;

 private:
  [[nodiscard]] Tokens token(int lane, int shard) const {
    return simulator::token_number(lane * layout_.tp + shard);
  }
  [[nodiscard]] int expert_lane_of(int number) const { return (number * 5 + 1) % layout_.ep; }

  const Layout& layout_;
};

}  // namespace nanlocator::pipeline
