// Births as JSON, the same in ledgers and bundles: docs/formats.md, "Births".
#pragma once

#include <nlohmann/json.hpp>
#include <optional>

#include "files/strict_json.hpp"
#include "nanlocator/record/birth.hpp"

namespace nanlocator {

/// Parts of a birth that verdicts have, too. Null where there is none; read from the member `key`.
[[nodiscard]] nlohmann::ordered_json code_to_json(const std::optional<CodeLine>& code);
[[nodiscard]] std::optional<CodeLine> code_from_json(const JsonObject& object, const char* key);
[[nodiscard]] nlohmann::ordered_json operand_to_json(const Operand& operand);
[[nodiscard]] Operand operand_from_json(const JsonObject& object);
[[nodiscard]] nlohmann::ordered_json extent_to_json(const std::optional<BadExtent>& extent);
/// From the member "extent".
[[nodiscard]] std::optional<BadExtent> extent_from_json(const JsonObject& object);

/// All keys; what is empty is null or an empty array.
[[nodiscard]] nlohmann::ordered_json birth_to_json(const Birth& birth);
/// Throws FormatError for a missing key, a wrong type, or a kind or conclusion that is unknown.
[[nodiscard]] Birth birth_from_json(const JsonObject& object);

}  // namespace nanlocator
