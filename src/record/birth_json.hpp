// Births as JSON, the same in ledgers and bundles: docs/formats.md, "Births".
#pragma once

#include <nlohmann/json.hpp>

#include "files/strict_json.hpp"
#include "nanlocator/record/birth.hpp"

namespace nanlocator {

/// All keys; what is empty is null or an empty array.
[[nodiscard]] nlohmann::ordered_json birth_to_json(const Birth& birth);
/// Throws FormatError for a missing key, a wrong type, or a kind or conclusion that is unknown.
[[nodiscard]] Birth birth_from_json(const JsonObject& object);

}  // namespace nanlocator
