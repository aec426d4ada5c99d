#include "locate/crossing_simulator/births.hpp"

#include <string>
#include <utility>

#include "locate/crossing_simulator/observer.hpp"
#include "locate/simulated_transformer.hpp"
#include "record/planted_operand.hpp"

namespace nanlocator::pipeline {
namespace {

bool is_traced_on(const Layout& layout, const Fault& fault, int rank) {
  const RankCoordinates at = layout.coordinates_of(rank);
  switch (fault.plant) {
    case Plant::operator_forward:
    case Plant::operator_backward:
    case Plant::gradient:
      return rank_of(layout, fault) == rank;
    case Plant::weight:
      return fault.is_on(at);
    case Plant::empty_loss:
      return at.dp.rank == fault.dp && at.pp.rank == layout.pp - 1;
    default:
      return false;  // not visible to the operator trace
  }
}

Birth birth_of(const Layout& layout, const Fault& fault, int microbatch) {
  Birth birth;
  birth.kind = fault.birth.kind;
  birth.replay = fault.birth.replay;
  birth.sighting = sighting_of(Phase::forward, microbatch, fault.stage / layout.pp, 1);
  birth.sighting.module = module_of(layout, fault);
  birth.sighting.op = "aten::log";
  birth.sighting.role = "output[0]";
  birth.reached = {{ReachedKind::other_ranks, {}}};
  switch (fault.plant) {
    case Plant::operator_backward:
      birth.sighting.phase = Phase::backward;
      birth.sighting.op = "aten::div.Tensor";
      birth.reached = {{ReachedKind::parameter, simulator::column_name(0, false) + ".weight"}};
      break;
    case Plant::empty_loss:
      birth.sighting.phase = Phase::loss;
      birth.sighting.module.clear();
      birth.sighting.op = "aten::div.Tensor";
      birth.operands = {operand_at_first_bad("self", 0.0), operand_at_first_bad("other", 0.0)};
      birth.reached = {{ReachedKind::loss, "loss"}};
      break;
    case Plant::gradient:
      birth.kind = BirthKind::memory;
      birth.sighting.phase = Phase::backward;
      birth.sighting.microbatch.reset();
      birth.sighting.module.clear();
      birth.sighting.op.clear();
      birth.sighting.role = "grad";
      birth.sighting.parameter = gradient_of(layout, fault);
      birth.reached = {{ReachedKind::parameter, gradient_of(layout, fault)}};
      break;
    case Plant::weight:
      birth.kind = BirthKind::weight;
      birth.sighting.role = "weight";
      birth.sighting.parameter = weight_of(layout, fault);
      break;
    default:
      break;
  }
  if (fault.birth.is_of_recomputation || fault.birth.is_of_auxiliary_loss) {
    birth.sighting.phase = Phase::forward;
  }
  if (fault.birth.is_of_recomputation) birth.node = "CheckpointFunctionBackward";
  return birth;
}

/// Not in the pass: what was bad before it, and a gradient that is read after it.
std::optional<std::int64_t> position_of(const Birth& birth, const Fault& fault,
                                        const Strikes& strikes, const RankCoordinates& at) {
  const bool is_outside = birth.kind == BirthKind::weight || birth.kind == BirthKind::buffer ||
                          birth.kind == BirthKind::data || fault.plant == Plant::gradient;
  if (is_outside) return std::nullopt;
  const bool is_backward =
      fault.plant == Plant::operator_backward && !fault.birth.is_of_auxiliary_loss;
  return strikes.position_of(fault, is_backward, *birth.sighting.microbatch, at.dp.rank,
                             at.tp.rank);
}

}  // namespace

std::vector<Birth> births_of(const Layout& layout, const Fault& fault, const Strikes& strikes,
                             int rank) {
  std::vector<Birth> births;
  if (!is_traced_on(layout, fault, rank)) return births;
  for (int microbatch = 0; microbatch < layout.microbatches; ++microbatch) {
    if (!fault.is_in(microbatch)) continue;
    Birth& birth = births.emplace_back(birth_of(layout, fault, microbatch));
    birth.sighting.position = position_of(birth, fault, strikes, layout.coordinates_of(rank));
  }
  return births;
}

Birth receipt(const Sighting& first) {
  Birth receipt;
  receipt.kind = BirthKind::collective;
  receipt.sighting = sighting_of(Phase::forward, 0, 0, 1);
  receipt.sighting.op = "aten::add.Tensor";
  receipt.sighting.position = first.position;
  receipt.reached = {{ReachedKind::loss, "loss"}};
  return receipt;
}

}  // namespace nanlocator::pipeline
