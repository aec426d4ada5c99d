#pragma once

#include <string>

#include "nanlocator/verdict/verdict.hpp"

namespace nanlocator::inline report_room {

/// One sentence, without a capital and a full stop, for a fact of an origin or of the whole
/// verdict.
[[nodiscard]] std::string fact_text(const Fact& fact);

/// The fact's place in the evidence: 0 observation, 1 outcome of the re-run and state of copies, 2
/// spread and comparisons, 3 details of the re-run, 4 support, 5 missing data, 6 an action stated
/// by a verdict of version 1.
[[nodiscard]] int place_of(const Fact& fact);

}  // namespace nanlocator::inline report_room
