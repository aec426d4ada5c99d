#include "locate/crossing_simulator/parameters.hpp"

#include <string>
#include <utility>

#include "locate/simulated_transformer.hpp"

namespace nanlocator::pipeline {
namespace {

using namespace simulator;

constexpr std::int64_t kRows = 64, kColumns = 64;

/// Appends one stage's parameters after those of the pipeline rank's later stages.
class Stage {
 public:
  Stage(const Layout& layout, int stage, std::vector<ParameterRecord>& order)
      : layout_(layout), stage_(stage), order_(order) {}

  void put_all() {
    if (stage_ == layout_.stages() - 1) put_head();
    for (int layer = layout_.layers_per_stage - 1; layer >= 0; --layer) {
      const int number = stage_ * layout_.layers_per_stage + layer;
      for (const bool is_mlp : {true, false}) put_block(number, is_mlp);
    }
    if (stage_ == 0) put_embeddings();
  }

 private:
  void put_head() {
    if (!layout_.has_one_embedding()) {
      put({.name = kOutputLayer, .is_tied = layout_.has_tied_embeddings});
    }
    put_with_bias(kFinalNorm, true, true);
  }

  void put_block(int layer, bool is_mlp) {
    if (is_mlp && layout_.has_experts) {
      const std::string block = block_name(layer, true);
      put({.name = block + ".experts.linear_fc2.weight", .may_be_untouched = true});
      put({.name = block + ".experts.linear_fc1.weight", .may_be_untouched = true});
      put({.name = block + ".router.weight", .may_be_untouched = true, .is_tp_duplicate = true});
    } else {
      put_with_bias(row_name(layer, is_mlp), false, true);
      put_with_bias(column_name(layer, is_mlp), false, false);
    }
    put_with_bias(norm_name(layer, is_mlp), true, true);
  }

  void put_embeddings() {
    put({.name = kPositionEmbeddings, .is_tp_duplicate = true});
    put({.name = kWordEmbeddings,
         .may_be_untouched = true,
         .is_tied = layout_.has_tied_embeddings});
  }

  void put_with_bias(const std::string& name, bool is_duplicate, bool is_bias_duplicate) {
    if (layout_.has_biases) put({.name = name + ".bias", .is_tp_duplicate = is_bias_duplicate});
    put({.name = name + ".weight", .is_tp_duplicate = is_duplicate});
  }

  void put(ParameterRecord parameter) {
    parameter.id = static_cast<std::int64_t>(order_.size());
    parameter.shape = {kRows, kColumns};
    parameter.is_tp_duplicate &= layout_.tp > 1;
    parameter.chunk = stage_ / layout_.pp;
    order_.push_back(std::move(parameter));
  }

  const Layout& layout_;
  int stage_;
  std::vector<ParameterRecord>& order_;
};

}  // namespace

BackwardOrders backward_orders(const Layout& layout) {
  BackwardOrders orders(static_cast<std::size_t>(layout.pp));
  for (int stage = layout.stages() - 1; stage >= 0; --stage) {
    Stage(layout, stage, orders[static_cast<std::size_t>(stage % layout.pp)]).put_all();
  }
  return orders;
}

ElementRange shard_of(const Layout& layout, int dp) {
  return simulator::shard_of(kRows * kColumns, dp, layout.dp);
}

}  // namespace nanlocator::pipeline
