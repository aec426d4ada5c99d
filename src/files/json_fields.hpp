// A struct as a JSON object, by one table of its members for both ways; reading is as strict as
// JsonObject (strict_json.hpp).
//
//   constexpr auto json_fields(const AxisCoordinate*) {
//     return std::tuple(JsonField("rank", &AxisCoordinate::rank),
//                       JsonField("size", &AxisCoordinate::size, 1));
//   }
//   json = fields_to_json(axis);        read_fields(object, axis);
//
// Members may be bool, int, std::int64_t, std::string, a struct with a table of its own, and an
// optional of these, which is null where it is empty. A table is declared in its struct's
// namespace, where it is found for a member of another struct (argument-dependent lookup).
#pragma once

#include <concepts>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <tuple>

#include "files/strict_json.hpp"

namespace nanlocator {

template <class Struct, class Value>
struct JsonField {
  const char* key;
  Value Struct::*member;
  int least = 0;  // of a number

  constexpr JsonField(const char* name, Value Struct::*pointer, int minimum = 0)
      : key(name), member(pointer), least(minimum) {}
};

template <class Struct>
concept HasJsonFields = requires(const Struct* null) {
  json_fields(null);
};

/// Appends the members in `fields` to `json`, in their order.
template <class Struct, class... Fields>
void write_fields(nlohmann::ordered_json& json, const Struct& value,
                  const std::tuple<Fields...>& fields);
/// Throws FormatError for a missing key, a wrong type, or a number below its least value.
template <class Struct, class... Fields>
void read_fields(const JsonObject& object, Struct& value, const std::tuple<Fields...>& fields);

template <HasJsonFields Struct>
[[nodiscard]] nlohmann::ordered_json fields_to_json(const Struct& value) {
  nlohmann::ordered_json json;
  write_fields(json, value, json_fields(&value));
  return json;
}

template <HasJsonFields Struct>
void read_fields(const JsonObject& object, Struct& value) {
  read_fields(object, value, json_fields(&value));
}

// ---- one member ----

template <class Value>
[[nodiscard]] nlohmann::ordered_json value_to_json(const Value& value) {
  if constexpr (HasJsonFields<Value>) {
    return fields_to_json(value);
  } else {
    return value;
  }
}

template <class Value>
[[nodiscard]] nlohmann::ordered_json value_to_json(const std::optional<Value>& value) {
  return value ? value_to_json(*value) : nlohmann::ordered_json(nullptr);
}

template <class Value>
void read_value(const JsonObject& object, const char* key, [[maybe_unused]] int least,
                Value& value) {
  if constexpr (HasJsonFields<Value>) {
    read_fields(object.object(key), value);
  } else if constexpr (std::same_as<Value, bool>) {
    value = object.boolean(key);
  } else if constexpr (std::same_as<Value, int>) {
    value = object.small_integer(key, least);
  } else if constexpr (std::same_as<Value, std::int64_t>) {
    value = object.integer(key, least);
  } else {
    static_assert(std::same_as<Value, std::string>);
    value = object.text(key);
  }
}

template <class Value>
void read_value(const JsonObject& object, const char* key, int least, std::optional<Value>& value) {
  value.reset();
  if (!object.member(key).is_null()) read_value(object, key, least, value.emplace());
}

template <class Struct, class... Fields>
void write_fields(nlohmann::ordered_json& json, const Struct& value,
                  const std::tuple<Fields...>& fields) {
  std::apply(
      [&](const auto&... each) { ((json[each.key] = value_to_json(value.*each.member)), ...); },
      fields);
}

template <class Struct, class... Fields>
void read_fields(const JsonObject& object, Struct& value, const std::tuple<Fields...>& fields) {
  std::apply(
      [&](const auto&... each) {
        (read_value(object, each.key, each.least, value.*each.member), ...);
      },
      fields);
}

}  // namespace nanlocator
