#include "locate/crossing_simulator/strikes.hpp"

#include <bit>

namespace nanlocator::pipeline {
namespace {

/// `tokens` must not be empty.
Tokens nth_of(Tokens tokens, int n) {
  for (n %= std::popcount(tokens); n > 0; --n) tokens &= tokens - 1;
  return tokens & (~tokens + 1);
}

bool is_in_block(const Fault& fault, const Place& place) {
  return place.block == Block{fault.layer, fault.is_mlp} && fault.stage == place.stage &&
         fault.is_in(place.microbatch);
}

}  // namespace

Tokens Strikes::at_operators(const Place& place, int dp, int tp, Tokens here) {
  if (here == 0) return 0;
  const Plant plant = place.is_backward() ? Plant::operator_backward : Plant::operator_forward;
  Tokens bad = 0;
  for (const Fault& fault : faults_) {
    const bool is_weight = fault.plant == Plant::weight && !place.is_backward();
    if (fault.plant != plant && !is_weight) continue;
    if (fault.tp != tp || !fault.is_of_dp(dp) || !is_in_block(fault, place)) continue;
    bad |= is_weight ? here : nth_of(here, fault.token);
    struck_.insert(key_of(fault));
  }
  return bad;
}

Received Strikes::at_sum(const Place& place, int dp, int tp, Tokens held) {
  const Plant plant = place.is_backward() ? Plant::sum_backward : Plant::sum_forward;
  Received bad;
  for (const Fault& fault : faults_) {
    const bool is_everywhere = fault.plant == Plant::sum_everywhere && !place.is_backward();
    const bool is_here = is_everywhere || (fault.plant == plant && fault.tp == tp);
    if (!is_here || !fault.is_of_dp(dp) || !is_in_block(fault, place)) continue;
    bad.tokens |= nth_of(held, fault.token);
    bad.is_overflow = fault.is_overflow;
    struck_.insert(key_of(fault));
  }
  return bad;
}

Tokens Strikes::at_transfer(const Place& place, int dp, int tp, Tokens held) {
  const Plant plant = place.is_backward() ? Plant::transfer_backward : Plant::transfer_forward;
  Tokens bad = 0;
  for (const Fault& fault : faults_) {
    if (fault.plant != plant || fault.tp != tp || !fault.is_of_dp(dp) ||
        fault.stage != place.stage || !fault.is_in(place.microbatch)) {
      continue;
    }
    bad |= nth_of(held, fault.token);
    struck_.insert(key_of(fault));
  }
  return bad;
}

bool Strikes::at_loss(int microbatch, int dp) {
  bool is_empty = false;
  for (const Fault& fault : faults_) {
    if (fault.plant != Plant::empty_loss || !fault.is_of_dp(dp) || !fault.is_in(microbatch)) {
      continue;
    }
    is_empty = true;
    struck_.insert(key_of(fault));
  }
  return is_empty;
}

void Strikes::note_position(const Place& place, int dp, int tp, std::int64_t position) {
  for (const Fault& fault : faults_) {
    const bool is_loss = fault.plant == Plant::empty_loss && !place.block;
    if (!is_loss && (!is_in_block(fault, place) || fault.tp != tp)) continue;
    positions_[{key_of(fault), place.is_backward(), place.microbatch, dp, tp}] = position;
  }
}

std::optional<std::int64_t> Strikes::position_of(const Fault& fault, bool is_backward,
                                                 int microbatch, int dp, int tp) const {
  const auto found = positions_.find({key_of(fault), is_backward, microbatch, dp, tp});
  if (found == positions_.end()) return std::nullopt;
  return found->second;
}

}  // namespace nanlocator::pipeline
