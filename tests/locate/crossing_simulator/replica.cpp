#include "locate/crossing_simulator/replica.hpp"

#include <random>
#include <utility>
#include <vector>

namespace nanlocator::pipeline {

using namespace simulator;

namespace {

Grid sum_of(Grid left, const Grid& right) {
  add(left, right);
  return left;
}

}  // namespace

BadByRank Replica::run(unsigned seed) {
  std::mt19937 random(seed);
  const int last = layout_.stages() - 1;
  std::vector<int> forward_done(layout_.stages()), backward_done(layout_.stages());
  for (;;) {
    std::vector<std::pair<bool, int>> ready;  // (is backward, stage)
    for (int stage = 0; stage <= last; ++stage) {
      const int next = forward_done[stage], back = backward_done[stage];
      if (next < layout_.microbatches && (stage == 0 || forward_done[stage - 1] > next)) {
        ready.emplace_back(false, stage);
      }
      if (back < layout_.microbatches &&
          (stage == last ? forward_done[last] : backward_done[stage + 1]) > back) {
        ready.emplace_back(true, stage);
      }
    }
    if (ready.empty()) return std::move(bad_);
    const auto [is_backward, stage] = ready[random() % ready.size()];
    if (is_backward) {
      backward(stage, backward_done[stage]++);
    } else {
      forward(stage, forward_done[stage]++);
    }
  }
}

// ---- forward ----

void Replica::forward(int stage, int microbatch) {
  const Place place{Phase::forward, microbatch, stage};
  Grid hidden = tokens_.none();
  if (stage > 0) {
    hidden = exchange_.receive(place, stage - 1);
  } else {
    exchange_.all_reduce(hidden, place);  // the embeddings of a sharded vocabulary
  }
  for (int layer = 0; layer < layout_.layers_per_stage; ++layer) {
    for (const bool is_mlp : {false, true}) forward_block(hidden, place, {layer, is_mlp});
  }
  if (stage < layout_.stages() - 1) {
    exchange_.send(hidden, place, stage + 1);
  } else {
    compute_loss(hidden, place);
  }
}

void Replica::forward_block(Grid& hidden, const Place& stage, const Block& block) {
  const int number = number_of(stage, block);
  Saved& saved = saved_[{stage.stage, stage.microbatch, block}];
  saved.hidden = hidden;
  Grid region = hidden;
  if (has_experts(block)) {
    const Place experts = stage.in(block, block_name(number, true));
    Grid weights = region;  // the router's weights for the tokens
    exchange_.to_experts(region, experts);
    exchange_.to_experts(weights, experts);
    saved.input = region;
    strike(region, experts);
    saved.region = region;
    exchange_.from_experts(region, experts);
  } else {
    const Place column = stage.in(block, column_name(number, block.is_mlp));
    exchange_.enter_column(region, column);
    saved.input = region;
    if (!block.is_mlp) tokens_.attend(region, false);
    strike(region, column);
    saved.region = region;
    exchange_.leave_row(region, stage.in(block, row_name(number, block.is_mlp)));
  }
  add(hidden, region);
}

/// The vocabulary is sharded over tp: the largest logit, the label's own, and the sum are reduced
/// (cross_entropy.py). Only one tp rank knows the label's own logit.
void Replica::compute_loss(const Grid& hidden, const Place& stage) {
  final_hidden_[stage.microbatch] = hidden;
  Grid logits = hidden;
  exchange_.enter_column(logits, stage.in("output_layer"));
  Grid largest = logits, own = logits, exponentials = logits;
  exchange_.all_reduce(largest, stage);
  tokens_.each_cell([&](int lane, int tp) { own[lane][tp] &= tokens_.with_words_of(tp); });
  exchange_.all_reduce(own, stage);
  exchange_.all_reduce(exponentials, stage);
  Grid& bad = bad_logits_[stage.microbatch] = std::move(largest);
  tokens_.each_cell([&](int lane, int tp) {
    const int rank = exchange_.rank_at(lane, tp, stage.stage);
    strikes_.note_position(stage, first_dp_ + lane, tp, observer_.position_of(rank));
    const bool is_empty = strikes_.at_loss(stage.microbatch, first_dp_ + lane);
    if (is_empty) bad[lane][tp] = tokens_.of_lane(lane);
    if (bad[lane][tp] == 0) return;
    observer_.loss(stage, rank, is_empty);
  });
}

// ---- backward ----

void Replica::backward(int stage, int microbatch) {
  const Place place{Phase::backward, microbatch, stage};
  Grid gradient =
      stage < layout_.stages() - 1 ? exchange_.receive(place, stage + 1) : backward_of_loss(place);
  for (int layer = layout_.layers_per_stage - 1; layer >= 0; --layer) {
    for (const bool is_mlp : {true, false}) backward_block(gradient, place, {layer, is_mlp});
  }
  if (stage > 0) {
    exchange_.send(gradient, place, stage - 1);
    return;
  }
  exchange_.enter_column(gradient, place);
  spoil(place, kPositionEmbeddings, gradient);
  tokens_.each_cell([&](int lane, int tp) { gradient[lane][tp] &= tokens_.with_words_of(tp); });
  spoil(place, kWordEmbeddings, gradient);
}

Grid Replica::backward_of_loss(const Place& stage) {
  const Grid& hidden = final_hidden_.at(stage.microbatch);
  Grid gradient = bad_logits_.at(stage.microbatch);
  spoil(stage, layout_.has_one_embedding() ? kWordEmbeddings : kOutputLayer,
        sum_of(gradient, hidden));
  exchange_.leave_column_backward(gradient, hidden, stage.in("output_layer"));
  spoil_layer(stage, kFinalNorm, gradient, hidden, gradient);
  add(gradient, hidden);
  return gradient;
}

void Replica::backward_block(Grid& gradient, const Place& stage, const Block& block) {
  const Saved& saved = saved_.at({stage.stage, stage.microbatch, block});
  const int number = number_of(stage, block);
  Grid region = gradient;
  if (has_experts(block)) {
    backward_experts(region, saved, stage.in(block, block_name(number, true)));
  } else {
    backward_dense(region, saved, stage, block);
  }
  spoil_layer(stage, norm_name(number, block.is_mlp), region, saved.hidden, region);
  add(gradient, region);
  add(gradient, saved.hidden);
}

void Replica::backward_dense(Grid& region, const Saved& saved, const Place& stage,
                             const Block& block) {
  const int number = number_of(stage, block);
  const Place row = stage.in(block, row_name(number, block.is_mlp));
  const Grid own = region;
  exchange_.enter_column(region, row);
  spoil_layer(row, row.module, region, saved.region, own);
  add(region, saved.region);
  strike(region, row);
  if (!block.is_mlp) tokens_.attend(region, true);
  const Place column = stage.in(block, column_name(number, block.is_mlp));
  spoil_layer(column, column.module, region, saved.input, region);
  exchange_.leave_column_backward(region, saved.hidden, column);
}

void Replica::backward_experts(Grid& region, const Saved& saved, const Place& experts) {
  const std::string& block = experts.module;
  Grid combined = region;
  exchange_.to_experts(region, experts);
  add(region, saved.region);
  spoil(experts, block + ".experts.linear_fc2.weight", region);
  strike(region, experts);
  spoil(experts, block + ".experts.linear_fc1.weight", sum_of(region, saved.input));
  Grid weights = region;
  exchange_.from_experts(weights, experts);
  exchange_.from_experts(region, experts);
  add(combined, weights);
  spoil(experts, block + ".router.weight", sum_of(combined, saved.hidden));
}

// ---- bad values ----

void Replica::strike(Grid& region, const Place& place) {
  const Grid here = has_experts(*place.block) ? tokens_.routed() : tokens_.gathered();
  tokens_.each_cell([&](int lane, int tp) {
    const int rank = exchange_.rank_at(lane, tp, place.stage);
    strikes_.note_position(place, first_dp_ + lane, tp, observer_.position_of(rank));
    region[lane][tp] |= strikes_.at_operators(place, first_dp_ + lane, tp, here[lane][tp]);
  });
}

void Replica::spoil(const Place& place, const std::string& parameter, const Grid& tokens) {
  tokens_.each_cell([&](int lane, int tp) {
    if (tokens[lane][tp] == 0) return;
    bad_[exchange_.rank_at(lane, tp, place.stage)][parameter] = Extent();
  });
}

void Replica::spoil_layer(const Place& place, const std::string& layer, const Grid& gradient,
                          const Grid& input, const Grid& bias_gradient) {
  spoil(place, layer + ".weight", sum_of(gradient, input));
  if (layout_.has_biases) spoil(place, layer + ".bias", bias_gradient);
}

}  // namespace nanlocator::pipeline
