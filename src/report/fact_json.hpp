// A Fact as JSON: {"kind", "source", and the non-empty arguments}. docs/formats.md, "Facts".
#pragma once

#include <nlohmann/json.hpp>

#include "files/json_fields.hpp"
#include "nanlocator/verdict/fact.hpp"

namespace nanlocator::inline report_room {

[[nodiscard]] nlohmann::ordered_json value_to_json(const Fact& fact);
/// Absent arguments are left empty. Throws FormatError.
void read_value(const JsonMember& from, JsonRange range, Fact& fact);

}  // namespace nanlocator::inline report_room
