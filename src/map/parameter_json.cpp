#include "map/parameter_json.hpp"

#include <algorithm>
#include <cstdio>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>

#include "files/utf8.hpp"
#include "map/rank_list_json.hpp"
#include "nanlocator/error.hpp"

namespace nanlocator::inline map_room {
namespace {

/// The product of the sizes, or empty if it exceeds 2^63 - 1.
std::optional<std::int64_t> checked_numel(const std::vector<std::int64_t>& shape) {
  std::int64_t product = 1;
  for (const std::int64_t size : shape) {
    if (__builtin_mul_overflow(product, size, &product)) return std::nullopt;
  }
  return product;
}

void append_escaped_unit(std::string& out, unsigned unit) {
  char escaped[7];
  std::snprintf(escaped, sizeof escaped, "\\u%04x", unit & 0xffff);
  out += escaped;
}

using P = ParameterInfo;
// Before and after shape and dtype, which are null together if only id and name are known.
constexpr auto kIdentity = std::tuple(JsonField("id", &P::id), JsonField("name", &P::name),
                                      JsonField("raw_name", &P::raw_name));
constexpr auto kPlace = std::tuple(
    JsonField("layer", &P::layer), JsonField("chunk", &P::chunk), JsonField("bucket", &P::bucket),
    JsonField("bucket_offset", &P::bucket_offset), JsonField("shard", &P::shard),
    JsonOmitEmpty("shard_group", &P::shard_group), JsonOmitEmpty("reduce_dtype", &P::reduce_dtype),
    JsonOmitEmpty("placements", &P::placements), JsonField("is_expert", &P::is_expert),
    JsonField("is_shared", &P::is_shared), JsonField("is_tp_duplicate", &P::is_tp_duplicate),
    JsonField("is_tied", &P::is_tied), JsonField("may_be_untouched", &P::may_be_untouched));

}  // namespace

nlohmann::ordered_json parameter_to_json(const ParameterInfo& parameter) {
  nlohmann::ordered_json json;
  write_fields(json, parameter, kIdentity);
  const bool is_known = !parameter.dtype.empty();
  json["shape"] = is_known ? nlohmann::ordered_json(parameter.shape) : nullptr;
  json["dtype"] = is_known ? nlohmann::ordered_json(parameter.dtype) : nullptr;
  write_fields(json, parameter, kPlace);
  return json;
}

ParameterInfo parameter_from_json(const nlohmann::json& value, const std::string& source,
                                  std::string path) {
  const JsonObject object(value, source, std::move(path));
  ParameterInfo parameter;
  read_fields(object, parameter, kIdentity);
  if (object.member("dtype").is_null()) {
    if (!object.member("shape").is_null()) {
      throw_unexpected_json(object.where("dtype"), object.member("dtype"),
                            "a string, because the shape is known");
    }
  } else {
    parameter.dtype = object.text("dtype");
    if (parameter.dtype.empty()) {
      throw FormatError(object.where("dtype") + ": found an empty string, expected a dtype");
    }
    parameter.shape = member_from_json<std::vector<std::int64_t>>(object, "shape");
  }
  read_fields(object, parameter, kPlace);
  return parameter;
}

void check_parameter(const ParameterInfo& parameter) {
  if (parameter.name.empty()) {
    throw UsageError("parameter " + std::to_string(parameter.id) + " has an empty name");
  }
  if (!is_utf8(parameter.name) || !is_utf8(parameter.raw_name) || !is_utf8(parameter.dtype)) {
    throw UsageError("parameter " + std::to_string(parameter.id) +
                     ": its name, raw name or dtype is not UTF-8");
  }
  const auto complain = [&](const std::string& what) {
    throw UsageError("parameter " + std::to_string(parameter.id) + " (" + parameter.name +
                     "): " + what);
  };
  for (const std::int64_t size : parameter.shape) {
    if (size < 0) complain("size " + std::to_string(size) + " in its shape, expected 0 or more");
  }
  const auto numel = checked_numel(parameter.shape);
  if (!numel) complain("its shape has more elements than 2^63 - 1");
  if (parameter.dtype.empty() && (!parameter.shape.empty() || parameter.shard)) {
    complain("a shape or a shard without a dtype; give all of them or none");
  }
  if (parameter.layer.value_or(0) < 0) complain("a negative layer");
  if (parameter.chunk < 0) complain("a negative chunk");
  if (parameter.bucket.value_or(0) < 0) complain("a negative bucket");
  if (parameter.bucket_offset.value_or(0) < 0) complain("a negative bucket offset");
  if (parameter.shard) {
    const auto [begin, end, row] = *parameter.shard;
    if (begin < 0 || begin > end || end > (row > 0 ? row : *numel)) {
      complain("the shard " + std::to_string(begin) + ".." + std::to_string(end) +
               " is not a range within its " + std::to_string(row > 0 ? row : *numel) +
               (row > 0 ? " elements per row" : " elements"));
    }
    if (row < 0 || (row > 0 && *numel % row != 0)) {
      complain("rows of " + std::to_string(row) + " elements, but in all " +
               std::to_string(*numel));
    }
  } else if (parameter.shard_group != RankList()) {
    complain("ranks that keep it in shards, but no shard");
  }
  if (!std::ranges::all_of(parameter.placements, is_utf8))
    complain("a placement that is not UTF-8");
}

std::string to_python_json_string(std::string_view text) {
  // CPython, Lib/json/encoder.py, ESCAPE_ASCII: quotes, backslashes and everything outside ' ' to
  // '~' are escaped; beyond U+FFFF as two surrogates; hexadecimal digits in lower case.
  std::string out = "\"";
  while (!text.empty()) {
    const auto point = take_code_point(text);
    if (!point) throw UsageError("text that is not UTF-8 cannot be written as JSON");
    switch (*point) {
      case U'"':
        out += "\\\"";
        break;
      case U'\\':
        out += "\\\\";
        break;
      case U'\n':
        out += "\\n";
        break;
      case U'\r':
        out += "\\r";
        break;
      case U'\t':
        out += "\\t";
        break;
      case U'\f':
        out += "\\f";
        break;
      case U'\b':
        out += "\\b";
        break;
      default:
        if (*point >= U' ' && *point <= U'~') {
          out += static_cast<char>(*point);
        } else if (*point < 0x10000) {
          append_escaped_unit(out, *point);
        } else {
          append_escaped_unit(out, 0xd800 | ((*point - 0x10000) >> 10));
          append_escaped_unit(out, 0xdc00 | ((*point - 0x10000) & 0x3ff));
        }
    }
  }
  return out + "\"";
}

std::vector<std::string> names_from_id_name_json(std::string_view text, const std::string& source) {
  const nlohmann::json json = parse_json(text, source);
  if (!json.is_object()) throw_unexpected_json(source, json, "an object of ids and names");
  std::vector<std::string> names(json.size());
  // As many keys as names, all different: if every id below n exists, there can be no other.
  for (std::size_t id = 0; id < names.size(); ++id) {
    const std::string key = std::to_string(id);
    const auto name = json.find(key);
    if (name == json.end()) {
      throw FormatError(source + ": the id \"" + key + "\" is missing; expected the ids 0 to " +
                        std::to_string(names.size() - 1) + ", as there are " +
                        std::to_string(names.size()) + " entries");
    }
    if (!name->is_string()) throw_unexpected_json(source + ": " + key, *name, "a name");
    names[id] = name->get<std::string>();
  }
  return names;
}

}  // namespace nanlocator::inline map_room
