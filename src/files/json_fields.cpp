#include "files/json_fields.hpp"

#include <charconv>
#include <cmath>
#include <cstdio>
#include <system_error>
#include <utility>

namespace nanlocator::inline files_room {

nlohmann::ordered_json number_to_json(double number) {
  if (std::isnan(number)) return "nan";
  if (std::isinf(number)) return number > 0 ? "inf" : "-inf";
  return number;
}

double number_from_json(const JsonMember& from) {
  const nlohmann::json& value = from.value();
  if (value.is_number()) return value.get<double>();
  if (value.is_string()) {
    const auto& text = value.get_ref<const std::string&>();
    if (text == "nan") return std::numeric_limits<double>::quiet_NaN();
    if (text == "inf") return std::numeric_limits<double>::infinity();
    if (text == "-inf") return -std::numeric_limits<double>::infinity();
  }
  from.throw_unexpected(R"(a number, "nan", "inf" or "-inf")");
}

std::string hexadecimal_text(std::uint64_t number, int digits) {
  char text[17];
  std::snprintf(text, sizeof text, "%0*llx", digits, static_cast<unsigned long long>(number));
  return text;
}

std::uint64_t hexadecimal_from_json(const JsonMember& from, int digits) {
  if (from.value().is_string()) {
    const auto& text = from.value().get_ref<const std::string&>();
    std::uint64_t bits = 0;
    const char* const end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, bits, 16);
    if (error == std::errc() && stop == end && std::cmp_equal(text.size(), digits)) return bits;
  }
  from.throw_unexpected(std::to_string(digits) + " hexadecimal digits");
}

std::string one_line(const nlohmann::ordered_json& json) {
  return json.dump(-1, ' ', true, nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace nanlocator::inline files_room
