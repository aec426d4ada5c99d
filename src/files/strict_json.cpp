#include "files/strict_json.hpp"

#include <unordered_set>
#include <utility>
#include <vector>

#include "files/plain_json.hpp"
#include "nanlocator/error.hpp"

namespace nanlocator::inline files_room {
namespace {

/// The text of a parse error without nlohmann's prefix and position. It repeats the last token,
/// which may be megabytes, so it is cut.
std::string reason_of(const nlohmann::json::exception& error) {
  std::string reason = error.what();
  if (const auto end = reason.find("] "); end != std::string::npos) reason.erase(0, end + 2);
  if (const auto end = reason.find("column "); end != std::string::npos) {
    if (const auto colon = reason.find(": ", end); colon != std::string::npos) {
      reason.erase(0, colon + 2);
    }
  }
  constexpr std::size_t kLongest = 200;
  if (reason.size() > kLongest) reason = reason.substr(0, kLongest) + "...";
  return reason;
}

/// Refuses what nlohmann's parser accepts: deep nesting and repeated keys.
class ParseGuard {
 public:
  explicit ParseGuard(const std::string& source) : source_(source) {}

  void see(int depth, nlohmann::json::parse_event_t event, const nlohmann::json& parsed) {
    using Event = nlohmann::json::parse_event_t;
    const bool begins = event == Event::object_start || event == Event::array_start;
    if (begins && depth >= kDeepestJson) {
      throw FormatError(source_ + ": nested deeper than " + std::to_string(kDeepestJson) +
                        " levels; no file of nanlocator is");
    }
    if (event == Event::object_start) {
      keys_.emplace_back();
    } else if (event == Event::object_end) {
      keys_.pop_back();
    } else if (event == Event::key) {
      const auto& key = parsed.get_ref<const std::string&>();
      if (!keys_.back().insert(key).second) {
        throw FormatError(source_ + ": the key " + in_quotes(key) + " occurs twice in one object");
      }
    }
  }

 private:
  const std::string& source_;
  std::vector<std::unordered_set<std::string>> keys_;  // of the open objects
};

}  // namespace

std::string escaped(std::string_view name) {
  constexpr std::size_t kLongest = 120;
  const nlohmann::json text(name.substr(0, kLongest));
  std::string shown = text.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  shown = shown.substr(1, shown.size() - 2);
  if (name.size() > kLongest) shown += "...";
  return shown;
}

std::string in_quotes(std::string_view name) {
  std::string quoted(1, '"');  // "..." + text warns falsely (GCC bug 105651)
  quoted += escaped(name);
  return quoted += '"';
}

nlohmann::json parse_json(std::string_view text, const std::string& source) {
  if (auto plain = parse_plain_json(text)) return *std::move(plain);
  // nlohmann's parser takes a NUL for the end of the text and ignores the rest.
  if (const auto at = text.find('\0'); at != std::string_view::npos) {
    throw FormatError(source + ": byte " + std::to_string(at + 1) + ": a NUL byte, not valid JSON");
  }
  ParseGuard guard(source);
  try {
    return nlohmann::json::parse(
        text.begin(), text.end(),
        [&guard](int depth, nlohmann::json::parse_event_t event, nlohmann::json& parsed) {
          guard.see(depth, event, parsed);
          return true;
        });
  } catch (const nlohmann::json::parse_error& error) {
    const std::string reason = reason_of(error);
    if (error.byte > text.size()) {
      throw FormatError(source + ": cut off: it ends after byte " + std::to_string(text.size()) +
                        " in the middle of a value (" + reason + ")");
    }
    throw FormatError(source + ": byte " + std::to_string(error.byte) +
                      ": not valid JSON: " + reason);
  } catch (const nlohmann::json::exception& error) {  // for example a number beyond a double
    throw FormatError(source + ": not valid JSON: " + reason_of(error));
  }
}

void throw_unexpected_json(const std::string& where, const nlohmann::json& found,
                           const std::string& expected) {
  std::string what;
  if (found.is_number() || found.is_boolean()) {
    what = found.dump();
  } else if (found.is_null()) {
    what = "null";
  } else if (found.is_string() && found.get_ref<const std::string&>().size() <= 40) {
    what = "the string " + in_quotes(found.get_ref<const std::string&>());
  } else {
    what = std::string(found.is_array()    ? "an "
                       : found.is_object() ? "an "
                                           : "a ") +
           found.type_name();
  }
  throw FormatError(where + ": found " + what + ", expected " + expected);
}

std::optional<std::int64_t> integer_within(const nlohmann::json& value, std::int64_t minimum,
                                           std::int64_t maximum) noexcept {
  if (!value.is_number_integer()) return std::nullopt;
  // nlohmann holds a number too large for a signed integer as an unsigned one.
  if (value.is_number_unsigned() &&
      *value.get_ptr<const std::uint64_t*>() >
          static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
    return std::nullopt;
  }
  const auto number = value.is_number_unsigned()
                          ? static_cast<std::int64_t>(*value.get_ptr<const std::uint64_t*>())
                          : *value.get_ptr<const std::int64_t*>();
  if (number < minimum || number > maximum) return std::nullopt;
  return number;
}

std::int64_t json_integer(const nlohmann::json& value, const std::string& where,
                          std::int64_t minimum, std::int64_t maximum) {
  const auto expected = [&] {
    std::string text = "an integer of at least " + std::to_string(minimum);
    if (maximum != std::numeric_limits<std::int64_t>::max()) {
      text += " and at most " + std::to_string(maximum);
    }
    return text;
  };
  const auto number = integer_within(value, minimum, maximum);
  if (!number) throw_unexpected_json(where, value, expected());
  return *number;
}

JsonObject::JsonObject(const nlohmann::json& value, std::string source, std::string path)
    : value_(&value), source_(std::move(source)), path_(std::move(path)) {
  if (!value.is_object()) {
    throw_unexpected_json(where(), value, "an object");
  }
}

std::string JsonObject::where() const {
  return path_.empty() ? source_ : source_ + ": " + path_;
}

std::string JsonObject::path_to(const char* key) const {
  return path_.empty() ? key : path_ + "." + key;
}

std::string JsonObject::where(const char* key) const {
  return source_ + ": " + path_to(key);
}

const nlohmann::json& JsonObject::member(const char* key) const {
  const auto found = value_->find(key);
  if (found == value_->end()) throw FormatError(where(key) + ": the key is missing");
  return *found;
}

bool JsonObject::has(const char* key) const {
  return value_->contains(key);
}

JsonObject JsonObject::object(const char* key) const {
  return {member(key), source_, path_to(key)};
}

std::string JsonObject::text(const char* key) const {
  return JsonMember(*this, key).text();
}

bool JsonObject::boolean(const char* key) const {
  return JsonMember(*this, key).boolean();
}

int JsonObject::small_integer(const char* key, int minimum) const {
  return static_cast<int>(JsonMember(*this, key).integer(minimum, std::numeric_limits<int>::max()));
}

std::int64_t JsonObject::integer(const char* key, std::int64_t minimum) const {
  return JsonMember(*this, key).integer(minimum, std::numeric_limits<std::int64_t>::max());
}

JsonMember JsonMember::element(std::size_t index) const {
  JsonMember element(*this, (*value_)[index]);
  element.index_ = index;
  return element;
}

JsonMember JsonMember::entry(const std::string& name) const {
  JsonMember entry(*this, value_->at(name));
  entry.name_ = &name;
  return entry;
}

std::string JsonMember::path() const {
  if (above_ == nullptr) return object_->path_to(key_);
  std::string path = above_->path();
  if (name_ != nullptr) return path.append(".").append(escaped(*name_));
  return path.append("[").append(std::to_string(index_)).append("]");
}

std::string JsonMember::text() const {
  if (!value_->is_string()) throw_unexpected("a string");
  return value_->get<std::string>();
}

bool JsonMember::boolean() const {
  if (!value_->is_boolean()) throw_unexpected("true or false");
  return value_->get<bool>();
}

std::int64_t JsonMember::integer(std::int64_t minimum, std::int64_t maximum) const {
  if (const auto number = integer_within(*value_, minimum, maximum)) return *number;
  return json_integer(*value_, where(), minimum, maximum);
}

void require_version(const JsonObject& object, int version) {
  const int found = object.small_integer("version", 0);
  if (found != version) {
    throw FormatError(object.where("version") + ": found " + std::to_string(found) +
                      ", this build reads version " + std::to_string(version) +
                      "; use the nanlocator that wrote the file");
  }
}

}  // namespace nanlocator::inline files_room
