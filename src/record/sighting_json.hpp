// Sightings as JSON, the same in ledgers, births and bundles: docs/formats.md, "Ledger".
#pragma once

#include <nlohmann/json.hpp>

#include "files/strict_json.hpp"
#include "nanlocator/record/sighting.hpp"

namespace nanlocator {

[[nodiscard]] nlohmann::ordered_json sighting_to_json(const Sighting& sighting);
/// Throws FormatError for a missing key, a wrong type, or counts that exceed the elements.
[[nodiscard]] Sighting sighting_from_json(const JsonObject& object);

[[nodiscard]] nlohmann::ordered_json stats_to_json(const TensorStats& stats);
/// Throws FormatError where the counts exceed the elements.
[[nodiscard]] TensorStats stats_from_json(const JsonObject& object);

/// The member `key`, the name of a phase.
[[nodiscard]] Phase phase_from_json(const JsonObject& object, const char* key);

}  // namespace nanlocator
