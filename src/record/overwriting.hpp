// Operators whose first argument's earlier values are no input: what they write was not there
// before.
#pragma once

#include <algorithm>
#include <array>
#include <string_view>

namespace nanlocator::inline record_room {

/// `op` with or without its overload: "aten::copy_", "aten::fill_.Scalar".
[[nodiscard]] inline bool is_overwriting(std::string_view op) {
  constexpr auto kOverwriters = std::to_array<std::string_view>(
      {"aten::copy_", "aten::_foreach_copy_", "aten::_copy_from", "aten::fill_", "aten::zero_",
       "aten::_foreach_zero_", "aten::normal_", "aten::uniform_", "aten::bernoulli_",
       "aten::random_", "aten::exponential_", "aten::log_normal_", "aten::geometric_",
       "aten::cauchy_", "aten::eye_"});
  return std::ranges::count(kOverwriters, op.substr(0, op.find('.'))) > 0;
}

}  // namespace nanlocator::inline record_room
