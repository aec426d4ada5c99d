// RankList as JSON: an array in which a progression of four or more ranks is [first, last, step],
// and other ranks are single numbers. docs/formats.md, "Ledger".
#pragma once

#include <nlohmann/json.hpp>

#include "files/json_fields.hpp"
#include "nanlocator/map/rank_list.hpp"

namespace nanlocator::inline map_room {

[[nodiscard]] nlohmann::ordered_json value_to_json(const RankList& list);
/// Throws FormatError for anything else.
void read_value(const JsonMember& from, JsonRange range, RankList& list);

}  // namespace nanlocator::inline map_room
