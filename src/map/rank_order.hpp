// Where does a rank stand whose own coordinates are not known? Megatron numbers ranks with the axes
// in the order tp-cp-ep-dp-pp, tp fastest, or with pp before dp (parallel_state.py,
// `initialize_model_parallel`, argument `order`; --use-tp-pp-dp-mapping). The ranks that are known
// show which.
#pragma once

#include <array>
#include <optional>
#include <span>
#include <vector>

#include "nanlocator/map/rank_coordinates.hpp"

namespace nanlocator::inline map_room {

class RankOrder {
 public:
  /// `layout`: the sizes of the axes, those below 1 taken for 1. `known`: at least one rank.
  RankOrder(RankCoordinates layout, int world_size, std::span<const RankCoordinates> known);

  /// Without host, local rank and device. Empty where no order fits all known ranks, where the axes
  /// do not make up the world, or where both orders fit and differ for `rank`.
  [[nodiscard]] std::optional<RankCoordinates> place_of(int rank) const;

  /// With sizes of at least 1.
  [[nodiscard]] const RankCoordinates& layout() const noexcept { return layout_; }

 private:
  using Order = std::array<AxisCoordinate RankCoordinates::*, 4>;  // fastest first
  static const std::array<Order, 2> kOrders;
  [[nodiscard]] RankCoordinates numbered(const Order& order, int rank) const;

  RankCoordinates layout_;
  std::vector<const Order*> fitting_;
};

}  // namespace nanlocator::inline map_room
