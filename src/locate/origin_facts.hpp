// What several rules say of an origin's tensor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "locate/evidence.hpp"
#include "nanlocator/locate/verdict.hpp"
#include "nanlocator/record/sighting.hpp"

namespace nanlocator::inline locate_room {

/// The number of elements; at most INT64_MAX.
[[nodiscard]] std::int64_t numel_of(const std::vector<std::int64_t>& shape);
[[nodiscard]] OriginTensor tensor_of(const Sighting& sighting);
/// Forward and loss, backward, or none: what a phase is part of.
[[nodiscard]] Direction direction_of(Phase phase) noexcept;
/// A tensor with Inf and no NaN whose finite elements come close to its dtype's largest.
[[nodiscard]] std::optional<Fact> near_overflow(const Sighting& sighting);
/// The sum of `members` finite addends may have overflowed.
[[nodiscard]] std::optional<Fact> sum_near_overflow(const Sighting& sighting, std::size_t members);

/// These ranks gather weights for each use of them, and not all of that was scanned.
[[nodiscard]] std::optional<Fact> weights_gathered_unseen(const Incident& incident,
                                                          const std::vector<int>& ranks);

/// "layers.3.norm in backward".
[[nodiscard]] std::string place_of(const Origin& origin);
/// Of a fault in several places: what `first` says of the others, in one fact of this kind.
void add_elsewhere(Origin& first, FactKind kind, std::string where);

}  // namespace nanlocator::inline locate_room
