#pragma once

#include <string>

#include "nanlocator/locate/verdict.hpp"

namespace nanlocator::inline report_room {

/// One sentence, without a capital and a full stop, of a fact of the origin or, where there is
/// none, of the verdict as a whole.
[[nodiscard]] std::string fact_text(const Fact& fact);

/// Where a fact stands among the others: what was seen 0, how far it goes 1, the re-run 2, what
/// supports it 3, what is missing 4.
[[nodiscard]] int place_of(const Fact& fact);

}  // namespace nanlocator::inline report_room
