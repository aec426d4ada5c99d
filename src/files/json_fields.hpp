// Structs as JSON objects: one table of members serves reading and writing. Reading is as strict as
// JsonObject (strict_json.hpp).
//
//   constexpr auto json_fields(const AxisCoordinate*) {
//     return std::tuple(JsonField("rank", &AxisCoordinate::rank),
//                       JsonField("size", &AxisCoordinate::size, 1));
//   }
//   json = fields_to_json(axis);        axis = fields_from_json<AxisCoordinate>(object);
//
// Members may be bool, an integer, double (see number_to_json), std::uint32_t and std::uint64_t
// (checksums and bits, as hexadecimal digits), std::string, an enumeration with names, a struct
// with a table of its own, and vectors, maps by name, optionals and pairs with a name ({"name",
// "value"}) of these. An empty optional is null.
//
// A table is declared in its struct's namespace, where argument-dependent lookup finds it for a
// member of another struct. If a table is not enough, declare there as well:
//   void read_fields(const JsonObject&, Struct&)            members that must agree, older forms
//   value_to_json(const Type&), read_value(const JsonMember&, JsonRange, Type&)      no object
#pragma once

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "files/strict_json.hpp"
#include "nanlocator/files/names.hpp"

namespace nanlocator::inline files_room {

/// The limits of an integer, or of each integer in a list.
struct JsonRange {
  std::int64_t least = 0;
  std::int64_t most = std::numeric_limits<std::int64_t>::max();
};

template <class Struct>
concept HasJsonFields = requires(const Struct* null) {
  json_fields(null);
};

/// Appends the members in `fields` to `json`, in order.
template <class Struct, class... Fields>
void write_fields(nlohmann::ordered_json& json, const Struct& value,
                  const std::tuple<Fields...>& fields) {
  std::apply([&](const auto&... each) { (each.write(json, value), ...); }, fields);
}

/// Throws FormatError for a missing key, a wrong type, or a number out of its range.
template <class Struct, class... Fields>
void read_fields(const JsonObject& object, Struct& value, const std::tuple<Fields...>& fields) {
  std::apply([&](const auto&... each) { (each.read(object, value), ...); }, fields);
}
template <HasJsonFields Struct>
void read_fields(const JsonObject& object, Struct& value) {
  read_fields(object, value, json_fields(&value));
}

template <HasJsonFields Struct>
[[nodiscard]] nlohmann::ordered_json fields_to_json(const Struct& value) {
  nlohmann::ordered_json json;
  write_fields(json, value, json_fields(&value));
  return json;
}
template <HasJsonFields Struct>
[[nodiscard]] Struct fields_from_json(const JsonObject& object) {
  Struct value;
  read_fields(object, value);
  return value;
}

// ---- Single values ----

/// JSON has no NaN and no infinity; they become the strings "nan", "inf" and "-inf".
[[nodiscard]] nlohmann::ordered_json number_to_json(double number);
[[nodiscard]] double number_from_json(const JsonMember& from);
/// Exactly `digits` hexadecimal digits. JSON readers that hold numbers as doubles would lose the
/// low bits.
[[nodiscard]] std::string hexadecimal_text(std::uint64_t number, int digits);
[[nodiscard]] std::uint64_t hexadecimal_from_json(const JsonMember& from, int digits);
/// The value on one line. Bytes that are not UTF-8 become U+FFFD: an odd module name must not cost
/// the record of a fault.
[[nodiscard]] std::string one_line(const nlohmann::ordered_json& json);

template <class Value>
[[nodiscard]] nlohmann::ordered_json value_to_json(const Value& value);
template <class Value>
[[nodiscard]] nlohmann::ordered_json value_to_json(const std::optional<Value>& value);
template <class Value>
[[nodiscard]] nlohmann::ordered_json value_to_json(const std::vector<Value>& values);
template <class Value>
[[nodiscard]] nlohmann::ordered_json value_to_json(const std::map<std::string, Value>& values);
template <class Value>
[[nodiscard]] nlohmann::ordered_json value_to_json(const std::pair<std::string, Value>& named);

template <class Value>
void read_value(const JsonMember& from, JsonRange range, Value& value);
template <class Value>
void read_value(const JsonMember& from, JsonRange range, std::optional<Value>& value);
template <class Value>
void read_value(const JsonMember& from, JsonRange range, std::vector<Value>& values);
template <class Value>
void read_value(const JsonMember& from, JsonRange range, std::map<std::string, Value>& values);
template <class Value>
void read_value(const JsonMember& from, JsonRange range, std::pair<std::string, Value>& named);

/// The member `key`.
template <class Value>
[[nodiscard]] Value member_from_json(const JsonObject& object, const char* key) {
  Value value{};
  read_value(JsonMember(object, key), JsonRange(), value);
  return value;
}

// ---- Rows of a table ----

template <class Struct, class Value>
struct JsonField {
  const char* key;
  Value Struct::*member;
  JsonRange range;

  constexpr JsonField(const char* name, Value Struct::*pointer, std::int64_t least = 0,
                      std::int64_t most = JsonRange().most)
      : key(name), member(pointer), range{least, most} {}

  void write(nlohmann::ordered_json& json, const Struct& value) const {
    json[key] = is_in_range(value.*member) ? value_to_json(value.*member) : nullptr;
  }
  void read(const JsonObject& object, Struct& value) const {
    read_value(JsonMember(object, key), range, value.*member);
  }

 private:
  /// An optional number that the reader would reject (a count below zero) is written as unknown, so
  /// that the other members are not lost.
  [[nodiscard]] bool is_in_range(const Value& value) const {
    if constexpr (requires {
                    requires std::integral<typename Value::value_type>;
                    *value;
                  }) {
      return !value || (*value >= range.least && *value <= range.most);
    }
    return true;
  }
};

/// A member whose empty value ("", the first of an enumeration) is written as null.
template <class Struct, class Value>
struct JsonOrNull {
  const char* key;
  Value Struct::*member;

  constexpr JsonOrNull(const char* name, Value Struct::*pointer) : key(name), member(pointer) {}

  void write(nlohmann::ordered_json& json, const Struct& value) const {
    json[key] = value.*member == Value() ? nlohmann::ordered_json() : value_to_json(value.*member);
  }
  void read(const JsonObject& object, Struct& value) const {
    const JsonMember from(object, key);
    value.*member = Value();
    if (!from.value().is_null()) read_value(from, JsonRange(), value.*member);
  }
};

/// A member that files of earlier versions lack.
template <class Field>
struct JsonAdded : Field {
  constexpr explicit JsonAdded(const Field& field) : Field(field) {}

  template <class Struct>
  void read(const JsonObject& object, Struct& value) const {
    if (object.has(this->key)) Field::read(object, value);
  }
};

/// A member that is omitted if empty.
template <class Struct, class Value>
struct JsonOmitEmpty {
  const char* key;
  Value Struct::*member;

  constexpr JsonOmitEmpty(const char* name, Value Struct::*pointer) : key(name), member(pointer) {}

  void write(nlohmann::ordered_json& json, const Struct& value) const {
    if (value.*member != Value()) json[key] = value_to_json(value.*member);
  }
  void read(const JsonObject& object, Struct& value) const {
    if (object.has(key)) read_value(JsonMember(object, key), JsonRange(), value.*member);
  }
};

/// Text for other readers, which this one ignores; null if the writer fills it in later.
struct JsonWriteOnly {
  const char* key;
  const char* text = nullptr;

  template <class Struct>
  void write(nlohmann::ordered_json& json, const Struct& /*value*/) const {
    json[key] = text == nullptr ? nlohmann::ordered_json() : nlohmann::ordered_json(text);
  }
  template <class Struct>
  void read(const JsonObject& /*object*/, Struct& /*value*/) const {}
};

// ---- Single values, implementation ----

template <class Value>
nlohmann::ordered_json value_to_json(const Value& value) {
  if constexpr (HasJsonFields<Value>) {
    return fields_to_json(value);
  } else if constexpr (std::is_enum_v<Value>) {
    return name_of(value);
  } else if constexpr (std::is_same_v<Value, double>) {
    return number_to_json(value);
  } else if constexpr (std::is_unsigned_v<Value> && !std::is_same_v<Value, bool>) {
    return hexadecimal_text(value, 2 * sizeof(Value));
  } else {
    return value;
  }
}

template <class Value>
nlohmann::ordered_json value_to_json(const std::optional<Value>& value) {
  return value ? value_to_json(*value) : nlohmann::ordered_json();
}

template <class Value>
nlohmann::ordered_json value_to_json(const std::vector<Value>& values) {
  auto json = nlohmann::ordered_json::array();
  for (const auto& value : values) json.push_back(value_to_json(value));
  return json;
}

template <class Value>
nlohmann::ordered_json value_to_json(const std::map<std::string, Value>& values) {
  auto json = nlohmann::ordered_json::object();
  for (const auto& [name, value] : values) json[name] = value_to_json(value);
  return json;
}

template <class Value>
nlohmann::ordered_json value_to_json(const std::pair<std::string, Value>& named) {
  return {{"name", named.first}, {"value", value_to_json(named.second)}};
}

template <class Value>
void read_value(const JsonMember& from, JsonRange range, Value& value) {
  if constexpr (HasJsonFields<Value>) {
    read_fields(from.object(), value);
  } else if constexpr (std::is_enum_v<Value>) {
    const auto known = value_named<Value>(from.text());
    if (!known) {
      std::string names;
      for (const auto name : kNames<Value>) names.append(names.empty() ? "" : ", ").append(name);
      from.throw_unexpected("one of " + names);
    }
    value = *known;
  } else if constexpr (std::is_same_v<Value, bool>) {
    value = from.boolean();
  } else if constexpr (std::is_same_v<Value, double>) {
    value = number_from_json(from);
  } else if constexpr (std::is_unsigned_v<Value>) {
    value = static_cast<Value>(hexadecimal_from_json(from, 2 * sizeof(Value)));
  } else if constexpr (std::is_integral_v<Value>) {
    constexpr std::int64_t kMost = std::numeric_limits<Value>::max();
    value = static_cast<Value>(from.integer(range.least, std::min(range.most, kMost)));
  } else {
    static_assert(std::is_same_v<Value, std::string>);
    value = from.text();
  }
}

template <class Value>
void read_value(const JsonMember& from, JsonRange range, std::optional<Value>& value) {
  value.reset();
  if (!from.value().is_null()) read_value(from, range, value.emplace());
}

template <class Value>
void read_value(const JsonMember& from, JsonRange range, std::vector<Value>& values) {
  if (!from.value().is_array()) {
    from.throw_unexpected(std::is_integral_v<Value>            ? "an array of integers"
                          : std::is_same_v<Value, std::string> ? "an array of strings"
                                                               : "an array");
  }
  values.clear();
  values.reserve(from.value().size());
  for (std::size_t i = 0; i < from.value().size(); ++i) {
    read_value(from.element(i), range, values.emplace_back());
  }
}

template <class Value>
void read_value(const JsonMember& from, JsonRange range, std::map<std::string, Value>& values) {
  if (!from.value().is_object()) from.throw_unexpected("an object");
  values.clear();
  for (const auto& [name, value] : from.value().items()) {
    read_value(from.entry(name), range, values[name]);
  }
}

template <class Value>
void read_value(const JsonMember& from, JsonRange range, std::pair<std::string, Value>& named) {
  const JsonObject object = from.object();
  named.first = object.text("name");
  read_value(JsonMember(object, "value"), range, named.second);
}

}  // namespace nanlocator::inline files_room
