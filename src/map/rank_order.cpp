#include "map/rank_order.hpp"

#include <algorithm>
#include <cstdint>
#include <utility>

namespace nanlocator::inline map_room {
namespace {

using C = RankCoordinates;

bool is_same_place(const C& a, const C& b) {
  return a.tp == b.tp && a.pp == b.pp && a.dp == b.dp && a.cp == b.cp;
}

}  // namespace

const std::array<RankOrder::Order, 2> RankOrder::kOrders = {
    {{&C::tp, &C::cp, &C::dp, &C::pp}, {&C::tp, &C::cp, &C::pp, &C::dp}}};

RankOrder::RankOrder(RankCoordinates layout, int world_size, std::span<const RankCoordinates> known)
    : layout_(std::move(layout)) {
  std::int64_t ranks = 1;
  for (const auto axis : {&C::tp, &C::pp, &C::dp, &C::cp, &C::ep}) {
    auto& size = (layout_.*axis).size;
    size = std::max(1, size);
    if (axis != &C::ep) ranks = std::min<std::int64_t>(ranks * size, world_size + 1LL);
  }
  if (ranks != world_size) return;
  for (const Order& order : kOrders) {
    if (std::ranges::all_of(known, [&](const RankCoordinates& rank) {
          return is_same_place(rank, numbered(order, rank.rank));
        })) {
      fitting_.push_back(&order);
    }
  }
}

std::optional<RankCoordinates> RankOrder::place_of(int rank) const {
  if (fitting_.empty()) return std::nullopt;
  auto place = numbered(*fitting_.front(), rank);
  if (!is_same_place(place, numbered(*fitting_.back(), rank))) return std::nullopt;
  return place;
}

RankCoordinates RankOrder::numbered(const Order& order, int rank) const {
  RankCoordinates place;
  place.rank = rank;
  place.world_size = layout_.world_size;
  for (const auto axis : order) {
    const int size = (layout_.*axis).size;
    place.*axis = {.rank = rank % size, .size = size};
    rank /= size;
  }
  // Expert-parallel groups are consecutive blocks of ep ranks of dp x cp.
  place.ep = {.rank = (place.dp.rank * place.cp.size + place.cp.rank) % layout_.ep.size,
              .size = layout_.ep.size};
  return place;
}

}  // namespace nanlocator::inline map_room
