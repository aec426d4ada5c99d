// The tokens of one replica: their holders, and their flow through attention and experts. Token
// lane * tp + shard is at that place in its sequence; a lane is one dp rank of the replica, with a
// sequence of its own.
#pragma once

#include "incident/simulated_job.hpp"
#include "locate/simulated_transformer.hpp"

namespace nanlocator::pipeline {

using simulator::Grid;
using simulator::Layout;
using simulator::Tokens;

/// A rank's result of a collective. Overflow: bad values are Inf, not NaN.
struct Received {
  Tokens tokens = 0;
  bool is_overflow = false;
};

class ReplicaTokens {
 public:
  /// Throws std::invalid_argument if the replica has more tokens than `Tokens` has bits.
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
  /// Outside the tensor-parallel regions: distributed with sequence parallelism.
  [[nodiscard]] Tokens held_by(int lane, int tp) const;
  [[nodiscard]] Tokens with_words_of(int tp) const;

  /// Causal attention within each lane's sequence, or over all of it if masked scores are
  /// multiplied by zero instead of left out.
  void attend(Grid& region, bool is_backward) const;
  /// The ranks' tokens between a block's GEMMs: all tokens of their lane.
  [[nodiscard]] Grid gathered() const;
  /// A lane's experts' tokens: those of the whole replica, distributed by number.
  [[nodiscard]] Grid routed() const;

 private:
  [[nodiscard]] Tokens token(int lane, int shard) const {
    return simulator::token_number(lane * layout_.tp + shard);
  }
  [[nodiscard]] int expert_lane_of(int number) const { return (number * 5 + 1) % layout_.ep; }

  const Layout& layout_;
};

}  // namespace nanlocator::pipeline
