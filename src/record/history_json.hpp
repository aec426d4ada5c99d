// Histories as JSON: docs/formats.md, "History"; ledgers contain their summaries.
#pragma once

#include <nlohmann/json.hpp>
#include <span>
#include <tuple>
#include <vector>

#include "files/json_fields.hpp"
#include "nanlocator/record/history.hpp"

namespace nanlocator::inline record_room {

/// As short as a float prints; NaN becomes null.
[[nodiscard]] nlohmann::ordered_json floats_to_json(std::span<const float> numbers);
/// Throws FormatError unless it is an array of null and numbers within a float's range, 0 or more.
[[nodiscard]] std::vector<float> floats_from_json(const JsonMember& from);

template <class Struct>
struct FloatsField {
  const char* key;
  std::vector<float> Struct::*member;

  void write(nlohmann::ordered_json& json, const Struct& value) const {
    json[key] = floats_to_json(value.*member);
  }
  void read(const JsonObject& object, Struct& value) const {
    value.*member = floats_from_json(JsonMember(object, key));
  }
};

constexpr auto json_fields(const ParameterHistory*) {
  using P = ParameterHistory;
  return std::tuple(JsonField("id", &P::id), JsonField("name", &P::name),
                    FloatsField<P>{"norm", &P::norm}, FloatsField<P>{"absmax", &P::absmax},
                    JsonField("nonfinite", &P::nonfinite));
}

constexpr auto json_fields(const Maxima*) {
  return std::tuple(JsonField("iterations", &Maxima::iterations),
                    FloatsField<Maxima>{"absmax", &Maxima::absmax});
}
/// Also throws FormatError for lists of different lengths, and for null in them.
void read_fields(const JsonObject& object, Maxima& maxima);

constexpr auto json_fields(const HistorySummary*) {
  using H = HistorySummary;
  return std::tuple(JsonField("iterations", &H::iterations), FloatsField<H>{"absmax", &H::absmax},
                    FloatsField<H>{"norm", &H::norm}, JsonOrNull("parameter", &H::parameter));
}
/// Also throws FormatError for lists of different lengths, and for null in them.
void read_fields(const JsonObject& object, HistorySummary& summary);

}  // namespace nanlocator::inline record_room
