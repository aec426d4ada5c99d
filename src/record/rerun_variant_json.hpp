// The members of a VariantOutcome in the JSON of ledgers and verdicts.
#pragma once

#include <tuple>

#include "files/json_fields.hpp"
#include "nanlocator/record/rerun_variant.hpp"

namespace nanlocator::inline record_room {

constexpr auto json_fields(const VariantOutcome*) {
  using V = VariantOutcome;
  return std::tuple(JsonField("variant", &V::variant), JsonField("bad", &V::is_bad));
}

}  // namespace nanlocator::inline record_room
