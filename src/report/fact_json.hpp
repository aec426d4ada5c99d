// A Fact as JSON: {"kind", "source", and the arguments that are not empty}. docs/formats.md,
// "Facts".
#pragma once

#include <nlohmann/json.hpp>

#include "files/json_fields.hpp"
#include "nanlocator/locate/fact.hpp"

namespace nanlocator::inline report_room {

[[nodiscard]] nlohmann::ordered_json value_to_json(const Fact& fact);
/// Throws FormatError. Arguments that are not there are empty.
void read_value(const JsonMember& from, JsonRange range, Fact& fact);

}  // namespace nanlocator::inline report_room
