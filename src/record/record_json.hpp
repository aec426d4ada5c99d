// What ledgers and verdicts share as JSON: numbers that may not be finite, empty optionals, shapes.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "files/strict_json.hpp"
#include "nanlocator/map/rank_list.hpp"

namespace nanlocator {

/// JSON has no NaN and no infinity: those are the strings "nan", "inf" and "-inf".
[[nodiscard]] nlohmann::ordered_json number_to_json(double number);
/// Throws FormatError unless `value` is a number or one of the three strings.
[[nodiscard]] double number_from_json(const nlohmann::json& value, const std::string& where);

/// 16 hexadecimal digits: JSON readers that hold numbers as doubles would lose the low bits.
[[nodiscard]] nlohmann::ordered_json bits_to_json(std::uint64_t bits);
/// Throws FormatError unless `value` is a string of 16 hexadecimal digits.
[[nodiscard]] std::uint64_t bits_from_json(const nlohmann::json& value, const std::string& where);

template <typename Value>
[[nodiscard]] nlohmann::ordered_json value_or_null(const std::optional<Value>& value) {
  return value ? nlohmann::ordered_json(*value) : nlohmann::ordered_json(nullptr);
}
[[nodiscard]] nlohmann::ordered_json number_or_null(const std::optional<double>& number);
[[nodiscard]] nlohmann::ordered_json text_or_null(std::string_view text);  // "" is null

/// number_from_json of the member `key`.
[[nodiscard]] double required_number(const JsonObject& object, const char* key);
[[nodiscard]] std::optional<double> optional_number(const JsonObject& object, const char* key);
[[nodiscard]] std::string text_or_empty(const JsonObject& object, const char* key);
/// Non-negative integers.
[[nodiscard]] std::vector<std::int64_t> sizes_from_json(const JsonObject& object, const char* key);
[[nodiscard]] std::vector<int> ranks_from_json(const JsonObject& object, const char* key);
/// A progression of four or more is [first, last, step], all else single numbers.
[[nodiscard]] nlohmann::ordered_json rank_list_to_json(const RankList& list);
[[nodiscard]] RankList rank_list_from_json(const JsonObject& object, const char* key);
[[nodiscard]] std::vector<std::string> texts_from_json(const JsonObject& object, const char* key);

/// The array below `key`, each element read by `read(object)`.
template <typename Value, typename Read>
[[nodiscard]] std::vector<Value> objects_from_json(const JsonObject& object, const char* key,
                                                   const Read& read) {
  const auto& array = object.member(key);
  if (!array.is_array()) throw_unexpected_json(object.where(key), array, "an array of objects");
  std::vector<Value> values;
  values.reserve(array.size());
  for (const auto& element : array) {
    const std::string path = object.path_to(key) + "[" + std::to_string(values.size()) + "]";
    values.push_back(read(JsonObject(element, object.source(), path)));
  }
  return values;
}

/// zlib's CRC-32 as 8 hexadecimal digits; read from the member `crc32`.
[[nodiscard]] std::string checksum_text(std::uint32_t crc32);
[[nodiscard]] std::uint32_t checksum_from_json(const JsonObject& object);

/// The value on one line. Bytes that are not UTF-8 become U+FFFD: a strange module name must not
/// cost the record of a fault.
[[nodiscard]] std::string one_line(const nlohmann::ordered_json& json);

}  // namespace nanlocator
