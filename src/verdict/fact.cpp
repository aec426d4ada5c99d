#include "nanlocator/verdict/fact.hpp"

#include <algorithm>

namespace nanlocator::inline verdict_room {

BadCount bad_count(const TensorStats& stats) noexcept {
  return {stats.nan, stats.pos_inf, stats.neg_inf, stats.numel};
}

const Fact* find_fact(const Facts& facts, FactKind kind) noexcept {
  const auto found = std::ranges::find(facts, kind, &Fact::kind);
  return found == facts.end() ? nullptr : &*found;
}

bool has_fact(const Facts& facts, FactKind kind) noexcept {
  return find_fact(facts, kind) != nullptr;
}

}  // namespace nanlocator::inline verdict_room
