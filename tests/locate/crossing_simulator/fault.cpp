#include "locate/crossing_simulator/fault.hpp"

#include "locate/crossing_simulator/parameters.hpp"
#include "locate/simulated_transformer.hpp"

namespace nanlocator::pipeline {
namespace {

int layer_of(const Layout& layout, const Fault& fault) {
  return fault.stage * layout.layers_per_stage + fault.layer;
}

}  // namespace

int rank_of(const Layout& layout, const Fault& fault) {
  const int stage = fault.plant == Plant::empty_loss ? layout.stages() - 1 : fault.stage;
  return layout.rank(fault.tp, stage, fault.dp);
}

std::string module_of(const Layout& layout, const Fault& fault) {
  return simulator::block_name(layer_of(layout, fault), fault.is_mlp);
}

std::string gradient_of(const Layout& layout, const Fault& fault) {
  const int last = (fault.stage + 1) * layout.layers_per_stage - 1;
  return simulator::row_name(last, false) + ".weight";
}

std::string weight_of(const Layout& layout, const Fault& fault) {
  return simulator::column_name(layer_of(layout, fault), fault.is_mlp) + ".weight";
}

std::int64_t element_of(const Layout& layout, const Fault& fault) {
  return layout.has_distributed_optimizer ? shard_of(layout, fault.dp).begin : 5;
}

}  // namespace nanlocator::pipeline
