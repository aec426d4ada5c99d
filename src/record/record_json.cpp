#include "record/record_json.hpp"

#include <charconv>
#include <cmath>
#include <cstdio>
#include <limits>
#include <system_error>
#include <utility>

#include "nanlocator/error.hpp"
#include "record/keys.hpp"

namespace nanlocator {
namespace {

/// The array below `key`, each element read by `read(element, where)`; `where()` is what errors
/// call the element, and is built for them alone: arrays are most of a ledger.
template <typename Value, typename Read>
std::vector<Value> array_from_json(const JsonObject& object, const char* key,
                                   const std::string& expected, Read read) {
  const auto& array = object.member(key);
  if (!array.is_array()) throw_unexpected_json(object.where(key), array, expected);
  std::vector<Value> values;
  values.reserve(array.size());
  for (const auto& element : array) {
    values.push_back(read(
        element, [&] { return object.where(key) + "[" + std::to_string(values.size()) + "]"; }));
  }
  return values;
}

}  // namespace

nlohmann::ordered_json number_to_json(double number) {
  if (std::isnan(number)) return "nan";
  if (std::isinf(number)) return number > 0 ? "inf" : "-inf";
  return number;
}

double number_from_json(const nlohmann::json& value, const std::string& where) {
  if (value.is_number()) return value.get<double>();
  if (value.is_string()) {
    const auto& text = value.get_ref<const std::string&>();
    if (text == "nan") return std::numeric_limits<double>::quiet_NaN();
    if (text == "inf") return std::numeric_limits<double>::infinity();
    if (text == "-inf") return -std::numeric_limits<double>::infinity();
  }
  throw_unexpected_json(where, value, R"(a number, "nan", "inf" or "-inf")");
}

nlohmann::ordered_json bits_to_json(std::uint64_t bits) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(bits));
  return text;
}

std::uint64_t bits_from_json(const nlohmann::json& value, const std::string& where) {
  std::uint64_t bits = 0;
  if (value.is_string() && value.get_ref<const std::string&>().size() == 16) {
    const auto& text = value.get_ref<const std::string&>();
    const char* const end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, bits, 16);
    if (error == std::errc() && stop == end) return bits;
  }
  throw_unexpected_json(where, value, "16 hexadecimal digits");
}

nlohmann::ordered_json number_or_null(const std::optional<double>& number) {
  return number ? number_to_json(*number) : nlohmann::ordered_json(nullptr);
}

nlohmann::ordered_json text_or_null(std::string_view text) {
  return text.empty() ? nlohmann::ordered_json(nullptr) : nlohmann::ordered_json(text);
}

double required_number(const JsonObject& object, const char* key) {
  const auto& value = object.member(key);
  return value.is_number() ? value.get<double>() : number_from_json(value, object.where(key));
}

std::optional<double> optional_number(const JsonObject& object, const char* key) {
  if (object.member(key).is_null()) return std::nullopt;
  return required_number(object, key);
}

std::string text_or_empty(const JsonObject& object, const char* key) {
  return object.member(key).is_null() ? std::string{} : object.text(key);
}

std::vector<std::int64_t> sizes_from_json(const JsonObject& object, const char* key) {
  return array_from_json<std::int64_t>(object, key, "an array of integers",
                                       [](const auto& value, const auto& where) {
                                         const auto number = integer_within(value, 0);
                                         return number ? *number : json_integer(value, where(), 0);
                                       });
}

std::vector<int> ranks_from_json(const JsonObject& object, const char* key) {
  return array_from_json<int>(
      object, key, "an array of ranks", [](const auto& value, const auto& where) {
        constexpr int kLargest = std::numeric_limits<int>::max();
        const auto number = integer_within(value, 0, kLargest);
        return static_cast<int>(number ? *number : json_integer(value, where(), 0, kLargest));
      });
}

nlohmann::ordered_json rank_list_to_json(const RankList& list) {
  auto json = nlohmann::ordered_json::array();
  for (const auto& [first, last, step] : list.runs()) {
    if ((last - first) / step >= 3) {
      json.push_back({first, last, step});
    } else {
      for (int rank = first; rank <= last; rank += step) json.push_back(rank);
    }
  }
  return json;
}

RankList rank_list_from_json(const JsonObject& object, const char* key) {
  constexpr int kLargest = std::numeric_limits<int>::max();
  const auto read_rank = [](const nlohmann::json& value, const std::string& where) {
    return static_cast<int>(json_integer(value, where, 0, kLargest));
  };
  std::vector<RankRun> runs;
  std::vector<int> singles;  // since the latest progression
  const auto close_singles = [&] {
    const RankList list(std::exchange(singles, {}));
    runs.insert(runs.end(), list.runs().begin(), list.runs().end());
  };
  const auto items = array_from_json<const nlohmann::json*>(
      object, key, "an array of ranks", [](const auto& value, const auto&) { return &value; });
  for (const nlohmann::json* item : items) {
    const auto number = integer_within(*item, 0, kLargest);
    if (number) {
      singles.push_back(static_cast<int>(*number));
      continue;
    }
    if (!item->is_array() || item->size() != 3) {
      throw_unexpected_json(object.where(key), *item, "a rank, or [first, last, step]");
    }
    close_singles();
    const std::string where = object.where(key);
    runs.push_back(
        {read_rank((*item)[0], where), read_rank((*item)[1], where), read_rank((*item)[2], where)});
  }
  close_singles();
  try {
    return RankList::of_runs(std::move(runs));
  } catch (const UsageError& error) {
    throw FormatError(object.where(key) + ": " + error.what());
  }
}

std::vector<std::string> texts_from_json(const JsonObject& object, const char* key) {
  return array_from_json<std::string>(object, key, "an array of strings",
                                      [](const auto& value, const auto& where) {
                                        if (!value.is_string())
                                          throw_unexpected_json(where(), value, "a string");
                                        return value.template get<std::string>();
                                      });
}

std::string checksum_text(std::uint32_t crc32) {
  char text[9];
  std::snprintf(text, sizeof text, "%08x", static_cast<unsigned>(crc32));
  return text;
}

std::uint32_t checksum_from_json(const JsonObject& object) {
  const std::string text = object.text(keys::kCrc32);
  std::uint32_t crc32 = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, crc32, 16);
  if (error != std::errc() || stop != end || text.size() != 8) {
    throw_unexpected_json(object.where(keys::kCrc32), object.member(keys::kCrc32),
                          "8 hexadecimal digits");
  }
  return crc32;
}

std::string one_line(const nlohmann::ordered_json& json) {
  return json.dump(-1, ' ', true, nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace nanlocator
