#include "gradients/backward_order.hpp"

#include <algorithm>

namespace nanlocator::inline gradients_room {

void BackwardOrder::record(std::int64_t parameter) {
  const std::lock_guard lock(mutex_);
  this_step_.push_back(parameter);
}

void BackwardOrder::end_step() {
  const std::lock_guard lock(mutex_);
  if (is_complete(this_step_)) latest_complete_.swap(this_step_);
  this_step_.clear();
}

bool BackwardOrder::is_complete(const std::vector<std::int64_t>& fired) const {
  if (fired.size() < parameters_) return false;
  std::vector<bool> has_fired(parameters_, false);
  std::size_t distinct = 0;
  for (const auto parameter : fired) {
    if (has_fired[parameter]) continue;
    has_fired[parameter] = true;
    ++distinct;
  }
  return distinct == parameters_;
}

std::optional<std::vector<std::int64_t>> BackwardOrder::observed() const {
  const std::lock_guard lock(mutex_);
  const auto& fired = is_complete(this_step_) ? this_step_ : latest_complete_;
  if (!is_complete(fired)) return std::nullopt;
  std::vector<bool> is_placed(parameters_, false);
  std::vector<std::int64_t> order;
  order.reserve(parameters_);
  for (auto parameter = fired.rbegin(); parameter != fired.rend(); ++parameter) {
    if (is_placed[*parameter]) continue;
    is_placed[*parameter] = true;
    order.push_back(*parameter);
  }
  std::ranges::reverse(order);
  return order;
}

}  // namespace nanlocator::inline gradients_room
