// Infers the coordinates of a rank that sent none. Megatron numbers ranks with the axes in the
// order tp-cp-ep-dp-pp, tp fastest, or with pp before dp (parallel_state.py,
// `initialize_model_parallel`, argument `order`; --use-tp-pp-dp-mapping). The known ranks show
// which.
#pragma once

#include <array>
#include <optional>
#include <span>
#include <vector>

#include "nanlocator/map/rank_coordinates.hpp"

namespace nanlocator::inline map_room {

class RankOrder {
 public:
  /// `layout`: the sizes of the axes; sizes below 1 count as 1. `known`: at least one rank.
  RankOrder(RankCoordinates layout, int world_size, std::span<const RankCoordinates> known);

  /// Coordinates without host, local rank and device. Empty if no order fits all known ranks, if
  /// the axes do not multiply to the world size, or if both orders fit and differ for `rank`.
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
