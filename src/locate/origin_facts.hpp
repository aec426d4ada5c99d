// What several rules say of an origin's tensor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "nanlocator/locate/verdict.hpp"
#include "nanlocator/record/sighting.hpp"

namespace nanlocator {

/// The number of elements; at most INT64_MAX.
[[nodiscard]] std::int64_t numel_of(const std::vector<std::int64_t>& shape);
[[nodiscard]] OriginTensor tensor_of(const Sighting& sighting);
/// Forward and loss, backward, or none: what a phase is part of.
[[nodiscard]] Direction direction_of(Phase phase) noexcept;
/// A tensor with Inf and no NaN whose finite elements come close to its dtype's largest.
[[nodiscard]] std::optional<Fact> near_overflow(const Sighting& sighting);
/// The sum of `members` finite addends may have overflowed.
[[nodiscard]] std::optional<Fact> sum_near_overflow(const Sighting& sighting, std::size_t members);

/// Of a fault in several places: `first` says of `other` in a fact of this kind how many there are.
void add_elsewhere(Origin& first, FactKind kind, const Origin& other);

}  // namespace nanlocator
