// A history's summary as JSON, as it stands in a ledger: docs/formats.md, "Ledger".
#pragma once

#include <nlohmann/json.hpp>
#include <span>

#include "files/strict_json.hpp"
#include "nanlocator/record/history.hpp"

namespace nanlocator {

/// As short as a float is printed; NaN becomes null.
[[nodiscard]] nlohmann::ordered_json floats_to_json(std::span<const float> numbers);

[[nodiscard]] nlohmann::ordered_json summary_to_json(const HistorySummary& summary);
/// Throws FormatError for a missing key, a wrong type, numbers that no float holds, or lists that
/// are not of the same length.
[[nodiscard]] HistorySummary summary_from_json(const JsonObject& object);

}  // namespace nanlocator
