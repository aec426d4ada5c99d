#include "files/plain_json.hpp"

#include <charconv>
#include <cstdint>
#include <string>
#include <system_error>
#include <utility>

#include "files/strict_json.hpp"

namespace nanlocator::inline files_room {
namespace {

using nlohmann::json;

bool is_digit(char byte) {
  return byte >= '0' && byte <= '9';
}

/// Recursive descent over RFC 8259. Each take_... consumes what it parsed, or returns false: not
/// plain.
class PlainParser {
 public:
  explicit PlainParser(std::string_view text)
      : next_(text.data()), end_(text.data() + text.size()) {}

  bool take_text(json& value) {
    if (!take_value(value, 0)) return false;
    skip_blanks();
    return next_ == end_;
  }

 private:
  void skip_blanks() {
    while (next_ != end_ && (*next_ == ' ' || *next_ == '\t' || *next_ == '\r' || *next_ == '\n')) {
      ++next_;
    }
  }

  bool take(char byte) {
    skip_blanks();
    if (next_ == end_ || *next_ != byte) return false;
    ++next_;
    return true;
  }

  bool take_word(std::string_view word) {
    if (static_cast<std::size_t>(end_ - next_) < word.size() ||
        std::string_view(next_, word.size()) != word) {
      return false;
    }
    next_ += word.size();
    return true;
  }

  bool take_value(json& value, int depth) {
    skip_blanks();
    if (next_ == end_) return false;
    switch (*next_) {
      case '{':
        return depth < kDeepestJson && take_object(value, depth + 1);
      case '[':
        return depth < kDeepestJson && take_array(value, depth + 1);
      case '"': {
        std::string_view text;
        if (!take_string(text)) return false;
        value = std::string(text);
        return true;
      }
      case 't':
        value = true;
        return take_word("true");
      case 'f':
        value = false;
        return take_word("false");
      case 'n':
        return take_word("null");
      default:
        return take_number(value);
    }
  }

  bool take_object(json& value, int depth) {
    ++next_;
    value = json::object();
    auto& members = value.get_ref<json::object_t&>();
    if (take('}')) return true;
    do {
      skip_blanks();
      std::string_view key;
      if (!take_string(key) || !take(':')) return false;
      const auto [member, is_new] = members.try_emplace(std::string(key));
      if (!is_new || !take_value(member->second, depth)) return false;
    } while (take(','));
    return take('}');
  }

  bool take_array(json& value, int depth) {
    ++next_;
    value = json::array();
    auto& elements = value.get_ref<json::array_t&>();
    if (take(']')) return true;
    do {
      if (!take_value(elements.emplace_back(), depth)) return false;
    } while (take(','));
    return take(']');
  }

  bool take_string(std::string_view& text) {
    if (next_ == end_ || *next_ != '"') return false;
    const char* const begin = ++next_;
    while (next_ != end_ && *next_ != '"') {
      const auto byte = static_cast<unsigned char>(*next_);
      if (byte < 0x20 || byte >= 0x80 || byte == '\\') return false;
      ++next_;
    }
    if (next_ == end_) return false;
    text = std::string_view(begin, static_cast<std::size_t>(next_ - begin));
    ++next_;
    return true;
  }

  bool take_digits() {
    const char* const begin = next_;
    while (next_ != end_ && is_digit(*next_)) ++next_;
    return next_ != begin;
  }

  bool take_number(json& value) {
    const char* const begin = next_;
    const bool is_negative = *next_ == '-';
    if (is_negative) ++next_;
    const char* const digits = next_;
    if (!take_digits()) return false;
    if (*digits == '0' && next_ - digits > 1) return false;  // no number begins with 00
    bool is_integer = true;
    if (next_ != end_ && *next_ == '.') {
      ++next_;
      is_integer = false;
      if (!take_digits()) return false;
    }
    if (next_ != end_ && (*next_ == 'e' || *next_ == 'E')) {
      ++next_;
      is_integer = false;
      if (next_ != end_ && (*next_ == '+' || *next_ == '-')) ++next_;
      if (!take_digits()) return false;
    }
    if (!is_integer) return convert<double>(begin, value);
    // As in nlohmann's parser: signed if there is a minus sign.
    return is_negative ? convert<std::int64_t>(begin, value) : convert<std::uint64_t>(begin, value);
  }

  /// False outside the type's range; the strict parser reports such a number.
  template <typename Number>
  bool convert(const char* begin, json& value) {
    Number number{};
    const auto [stop, error] = std::from_chars(begin, next_, number);
    if (error != std::errc() || stop != next_) return false;
    value = number;
    return true;
  }

  const char* next_;
  const char* end_;
};

}  // namespace

std::optional<json> parse_plain_json(std::string_view text) {
  json value;
  if (!PlainParser(text).take_text(value)) return std::nullopt;
  return value;
}

}  // namespace nanlocator::inline files_room
