#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>

#include "files/strict_json.hpp"
#include "nanlocator/locate/fact.hpp"

namespace nanlocator {

/// {"kind", "source", and the arguments that are not empty}.
[[nodiscard]] nlohmann::ordered_json fact_to_json(const Fact& fact);
[[nodiscard]] nlohmann::ordered_json facts_to_json(const Facts& facts);
/// Throws FormatError. Arguments that are not there are empty.
[[nodiscard]] Facts facts_from_json(const JsonObject& object, const char* key);

/// The value that the member `key` names. Throws FormatError with the names that there are.
template <typename Enum>
[[nodiscard]] Enum enum_from_json(const JsonObject& object, const char* key) {
  const std::string text = object.text(key);
  std::string known;
  for (std::size_t i = 0; i < kNames<Enum>.size(); ++i) {
    if (kNames<Enum>[i] == text) return static_cast<Enum>(i);
    known.append(known.empty() ? "" : ", ").append(kNames<Enum>[i]);
  }
  throw_unexpected_json(object.where(key), object.member(key), "one of " + known);
}

}  // namespace nanlocator
