// The facts of an origin, and the sentences that tell them.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "nanlocator/locate/verdict.hpp"
#include "nanlocator/record/birth.hpp"
#include "nanlocator/record/sighting.hpp"

namespace nanlocator {

/// The number of elements; at most INT64_MAX.
[[nodiscard]] std::int64_t numel_of(const std::vector<std::int64_t>& shape);
[[nodiscard]] OriginTensor tensor_of(const Sighting& sighting);
/// Forward and loss, backward, or none: what a phase is part of.
[[nodiscard]] Direction direction_of(Phase phase) noexcept;
/// "3 NaN and 1 +Inf".
[[nodiscard]] std::string describe_bad(const TensorStats& stats);
/// "self: float32 [4, 8], finite, |x| <= 3.2"; "exponent: 0.5".
[[nodiscard]] std::string describe_operand(const Operand& operand);
/// "loss[0]", "other ranks", the name of a parameter, "module a.b".
[[nodiscard]] std::string describe_reached(const Reached& reached);
/// "rank 5", "ranks 0-3, 9".
[[nodiscard]] std::string describe_rank_count(const std::set<int>& ranks);
/// "8,192".
[[nodiscard]] std::string counted(std::int64_t number);
/// "1.8e+19": three digits.
[[nodiscard]] std::string short_number(double number);
/// A sentence where a tensor with Inf and no NaN has finite elements close to its dtype's largest.
[[nodiscard]] std::optional<std::string> overflow_hint(const Sighting& sighting);
/// A sentence where the sum of `members` finite addends may have overflowed.
[[nodiscard]] std::optional<std::string> overflow_in_sum_hint(const Sighting& sighting,
                                                              std::size_t members);

}  // namespace nanlocator
