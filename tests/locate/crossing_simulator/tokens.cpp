#include "locate/crossing_simulator/tokens.hpp"

#include <stdexcept>

namespace nanlocator::pipeline {

ReplicaTokens::ReplicaTokens(const Layout& layout) : layout_(layout) {
  if (layout.tp * layout.ep > 64) throw std::invalid_argument("a replica has 64 tokens");
}

Grid ReplicaTokens::none() const {
  return Grid(static_cast<std::size_t>(lanes()), std::vector<Tokens>(layout_.tp));
}

Tokens ReplicaTokens::of_lane(int lane) const {
  Tokens all = 0;
  for (int shard = 0; shard < layout_.tp; ++shard) all |= token(lane, shard);
  return all;
}

Tokens ReplicaTokens::held_by(int lane, int tp) const {
  return layout_.has_sequence_parallel ? token(lane, tp) : of_lane(lane);
}

Tokens ReplicaTokens::with_words_of(int tp) const {
  if (layout_.has_words_on_first_rank_only) return tp == 0 ? ~Tokens{0} : 0;
  return simulator::with_words_of(tp, layout_.tp);
}

void ReplicaTokens::attend(Grid& region, bool is_backward) const {
  each_cell([&](int lane, int tp) {
    Tokens& tokens = region[lane][tp];
    if (tokens == 0) return;
    const bool is_masked_left_out = layout_.has_fused_attention;
    tokens = of_lane(lane) &
             (is_masked_left_out ? simulator::attended_from(tokens, is_backward) : ~Tokens{0});
  });
}

Grid ReplicaTokens::gathered() const {
  Grid out = none();
  each_cell([&](int lane, int tp) { out[lane][tp] = of_lane(lane); });
  return out;
}

Grid ReplicaTokens::routed() const {
  Grid out = none();
  each_cell([&](int lane, int tp) {
    for (int shard = 0; shard < layout_.tp; ++shard) {
      const Tokens held = held_by(lane, tp) & token(lane, shard);
      out[expert_lane_of(lane * layout_.tp + shard)][tp] |= held;
    }
  });
  return out;
}

}  // namespace nanlocator::pipeline
