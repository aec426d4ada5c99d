// Histories as JSON: docs/formats.md, "History"; their summaries stand in ledgers.
#pragma once

#include <nlohmann/json.hpp>
#include <span>
#include <tuple>
#include <vector>

#include "files/json_fields.hpp"
#include "nanlocator/record/history.hpp"

namespace nanlocator::inline record_room {

/// As short as a float is printed; NaN becomes null.
[[nodiscard]] nlohmann::ordered_json floats_to_json(std::span<const float> numbers);
/// Throws FormatError where it is no array of null and numbers that a float holds, 0 or more.
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
/// Throws FormatError also for lists that are not of the same length, and for null in them.
void read_fields(const JsonObject& object, Maxima& maxima);

constexpr auto json_fields(const HistorySummary*) {
  using H = HistorySummary;
  return std::tuple(JsonField("iterations", &H::iterations), FloatsField<H>{"absmax", &H::absmax},
                    FloatsField<H>{"norm", &H::norm}, JsonOrNull("parameter", &H::parameter));
}
/// Throws FormatError also for lists that are not of the same length, and for null in them.
void read_fields(const JsonObject& object, HistorySummary& summary);

}  // namespace nanlocator::inline record_room
