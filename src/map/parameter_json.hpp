// ParameterInfo as JSON, and the recipe's id-name file: docs/formats.md, "Parameter manifest" and
// "Parameter map".
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "files/json_fields.hpp"
#include "nanlocator/map/parameter_map.hpp"

namespace nanlocator::inline map_room {

constexpr auto json_fields(const ElementRange*) {
  return std::tuple(JsonField("begin", &ElementRange::begin), JsonField("end", &ElementRange::end),
                    JsonOmitEmpty("row", &ElementRange::row));
}

/// One object of the manifest's "parameters"; empty optionals are null.
[[nodiscard]] nlohmann::ordered_json parameter_to_json(const ParameterInfo& parameter);

/// Throws FormatError for a missing key, a wrong type or a negative number; check_parameter checks
/// the rest.
[[nodiscard]] ParameterInfo parameter_from_json(const nlohmann::json& value,
                                                const std::string& source, std::string path);

/// Throws UsageError if the parameter is inconsistent: an empty name, text that is not UTF-8, a
/// negative size, more elements than 2^63 - 1, a range outside the elements.
void check_parameter(const ParameterInfo& parameter);

/// `text` as a string of Python's json.dumps: quoted, ASCII only. `text` must be UTF-8.
[[nodiscard]] std::string to_python_json_string(std::string_view text);

/// The names of a param_id_name_map file in id order. Throws FormatError unless its keys are the
/// ids 0..n-1 and its values are strings.
[[nodiscard]] std::vector<std::string> names_from_id_name_json(std::string_view text,
                                                               const std::string& source);

}  // namespace nanlocator::inline map_room
