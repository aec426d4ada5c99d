// Strict reading of JSON files that may be truncated, edited or hostile, with errors that say what
// is wrong and where.
//
// parse_json gives a tree or a FormatError that names the file and the byte. JsonObject takes
// members out of the tree; its errors name the file and the key ("x.json: parameters[3].shape").
#pragma once

#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace nanlocator::inline files_room {

/// No file of this project nests deeper than ten levels; each level costs the reader memory.
inline constexpr int kDeepestJson = 32;

/// `name`, which comes from a file, for use in a message: escaped as in JSON (a NUL would end the
/// message) and cut if it is longer than a line.
[[nodiscard]] std::string escaped(std::string_view name);
[[nodiscard]] std::string in_quotes(std::string_view name);

/// Parses one JSON value (RFC 8259). Errors call the text `source`. Throws FormatError if the text
/// is truncated, malformed, not UTF-8, contains a NUL byte, is nested deeper than kDeepestJson, or
/// repeats a key in one object (other readers would silently take one of the values).
[[nodiscard]] nlohmann::json parse_json(std::string_view text, const std::string& source);

/// The error of everything below: "x.json: parameters[3].id: found a string, expected ...".
[[noreturn]] void throw_unexpected_json(const std::string& where, const nlohmann::json& found,
                                        const std::string& expected);

/// `value` as an integer within [minimum, maximum], else empty; 1.0 is not an integer. Builds no
/// text for an error.
[[nodiscard]] std::optional<std::int64_t> integer_within(
    const nlohmann::json& value, std::int64_t minimum,
    std::int64_t maximum = std::numeric_limits<std::int64_t>::max()) noexcept;
/// The same, but throws FormatError.
[[nodiscard]] std::int64_t json_integer(
    const nlohmann::json& value, const std::string& where, std::int64_t minimum,
    std::int64_t maximum = std::numeric_limits<std::int64_t>::max());

/// A view of a JSON object whose accessors throw FormatError if a key is missing or its value has
/// another type. Unknown keys are ignored. The value must outlive the view.
class JsonObject {
 public:
  /// `source` is the file; `path` the keys that lead to this object ("parameters[3]"), empty for
  /// the top level.
  JsonObject(const nlohmann::json& value, std::string source, std::string path = {});

  [[nodiscard]] const nlohmann::json& member(const char* key) const;
  [[nodiscard]] bool has(const char* key) const;  // for keys that newer writers added
  // Members read one by one; a struct's members are read by its table (json_fields.hpp).
  [[nodiscard]] JsonObject object(const char* key) const;
  [[nodiscard]] std::string text(const char* key) const;
  [[nodiscard]] bool boolean(const char* key) const;
  [[nodiscard]] int small_integer(const char* key, int minimum) const;
  [[nodiscard]] std::int64_t integer(const char* key, std::int64_t minimum) const;

  [[nodiscard]] const nlohmann::json& value() const noexcept { return *value_; }
  /// The file, and the keys that lead to this object and to its member `key`: "coordinates.tp".
  [[nodiscard]] const std::string& source() const noexcept { return source_; }
  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  [[nodiscard]] std::string path_to(const char* key) const;
  /// The name of this object in errors: "x.json: coordinates".
  [[nodiscard]] std::string where() const;
  /// The name of the member `key` in errors: "x.json: coordinates.tp".
  [[nodiscard]] std::string where(const char* key) const;

 private:
  const nlohmann::json* value_;
  std::string source_;
  std::string path_;
};

/// One value, and the path to it for errors, which is built only if needed: a ledger is mostly long
/// lists. Its parent must outlive it.
class JsonMember {
 public:
  /// Throws FormatError if the key is missing.
  JsonMember(const JsonObject& object, const char* key)
      : value_(&object.member(key)), object_(&object), key_(key) {}
  /// An element of an array, and an entry of an object whose keys are names.
  [[nodiscard]] JsonMember element(std::size_t index) const;
  [[nodiscard]] JsonMember entry(const std::string& name) const;

  [[nodiscard]] const nlohmann::json& value() const noexcept { return *value_; }
  /// "coordinates.tp", and its name in errors: "x.json: coordinates.tp".
  [[nodiscard]] std::string path() const;
  [[nodiscard]] std::string where() const { return object_->source() + ": " + path(); }
  [[noreturn]] void throw_unexpected(const std::string& expected) const {
    throw_unexpected_json(where(), *value_, expected);
  }

  // Each throws FormatError if the value has another type.
  [[nodiscard]] JsonObject object() const { return {*value_, object_->source(), path()}; }
  [[nodiscard]] std::string text() const;
  [[nodiscard]] bool boolean() const;
  [[nodiscard]] std::int64_t integer(std::int64_t minimum, std::int64_t maximum) const;

 private:
  JsonMember(const JsonMember& above, const nlohmann::json& value)
      : value_(&value), object_(above.object_), above_(&above) {}

  const nlohmann::json* value_;
  const JsonObject* object_;
  const char* key_ = nullptr;
  const JsonMember* above_ = nullptr;  // the enclosing array or object
  const std::string* name_ = nullptr;  // its key there
  std::size_t index_ = 0;
};

/// Throws FormatError unless the object's "version" is `version`.
void require_version(const JsonObject& object, int version);

}  // namespace nanlocator::inline files_room
