// Facts about an origin's tensor that several rules use.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "incident/incident.hpp"
#include "nanlocator/record/sighting.hpp"
#include "nanlocator/verdict/verdict.hpp"

namespace nanlocator::inline locate_room {

/// The number of elements; at most INT64_MAX.
[[nodiscard]] std::int64_t numel_of(const std::vector<std::int64_t>& shape);
[[nodiscard]] OriginTensor tensor_of(const Sighting& sighting);
/// The pass that a phase belongs to: forward (also for loss), backward, or none.
[[nodiscard]] Direction direction_of(Phase phase) noexcept;
/// For a tensor with Inf and no NaN whose finite elements come close to its dtype's largest.
[[nodiscard]] std::optional<Fact> near_overflow(const Sighting& sighting);
/// What the largest addends of `members` ranks add up to; nullopt if one is not known. In a
/// reduce-scatter a member whose part is finite has not noted what it put in: its addend counts as
/// the largest that is known.
[[nodiscard]] std::optional<double> sum_of_addends(std::span<const double> known,
                                                   std::size_t members, std::string_view op);
/// For Inf without NaN in the sum of the members' finite addends, if it may have overflowed: by the
/// maxima of the addends (gradients before their reduction: those of `parameters`, or of all if
/// that is empty), if they are known; else the sum's finite elements give a hint.
[[nodiscard]] std::optional<Fact> overflow_of_sum(const Incident& incident,
                                                  const Sighting& sighting,
                                                  const std::vector<int>& members,
                                                  const std::set<std::string_view>& parameters);
/// For the largest addends of all members, which add up to `sum`; empty if that is in the range.
[[nodiscard]] std::optional<Fact> sum_beyond_range(double sum, std::size_t members,
                                                   const std::string& dtype);

/// For ranks that gather weights at each use, if not all of the gathers were scanned.
[[nodiscard]] std::optional<Fact> weights_gathered_unseen(const Incident& incident,
                                                          const std::vector<int>& ranks);

/// The optimizer's, if it has one for all parameters: for what may come of too large updates, an
/// overflow of the model or of the gradient's norm, a divergence.
[[nodiscard]] std::optional<Fact> learning_rate_of(const Incident& incident, const Origin& origin);

/// The samples of a data set that the step has read on the origin's rank, where a DataLoader gave
/// them out: what may have caused it, also where the code is at fault.
[[nodiscard]] std::optional<Fact> samples_of(const Incident& incident, const Origin& origin);

/// "layers.3.norm in backward".
[[nodiscard]] std::string place_of(const Origin& origin);
/// For a fault in several places: adds `where` to `first`'s one fact of this kind, or creates it.
void add_elsewhere(Origin& first, FactKind kind, std::string where);

}  // namespace nanlocator::inline locate_room
