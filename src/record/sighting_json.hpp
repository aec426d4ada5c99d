// Sightings as JSON, the same in ledgers, births and bundles: docs/formats.md, "Ledger".
#pragma once

#include <tuple>

#include "files/json_fields.hpp"
#include "map/rank_list_json.hpp"
#include "nanlocator/record/sighting.hpp"

namespace nanlocator::inline record_room {

constexpr auto json_fields(const TensorStats*) {
  using S = TensorStats;
  return std::tuple(
      JsonField("numel", &S::numel), JsonField("nan", &S::nan), JsonField("pos_inf", &S::pos_inf),
      JsonField("neg_inf", &S::neg_inf), JsonField("zeros", &S::zeros),
      JsonField("first_bad", &S::first_bad, -1), JsonField("finite_min", &S::finite_min),
      JsonField("finite_max", &S::finite_max), JsonField("absmin", &S::absmin),
      JsonField("absmax", &S::absmax), JsonField("sum_of_squares", &S::sum_of_squares),
      JsonField("fingerprint", &S::fingerprint));
}
/// Also throws FormatError if the counts exceed the elements.
void read_fields(const JsonObject& object, TensorStats& stats);

[[nodiscard]] nlohmann::ordered_json value_to_json(const TensorRole& role);
/// Throws FormatError if it is not text.
void read_value(const JsonMember& from, JsonRange range, TensorRole& role);

constexpr auto json_fields(const Crossing*) {
  using C = Crossing;
  return std::tuple(JsonField("group", &C::group), JsonField("members", &C::members),
                    JsonField("peer", &C::peer), JsonField("sequence", &C::sequence),
                    JsonOmitEmpty("carries_weights", &C::carries_weights));
}

constexpr auto json_fields(const Sighting*) {
  using S = Sighting;
  return std::tuple(JsonField("iteration", &S::iteration), JsonField("microbatch", &S::microbatch),
                    JsonField("chunk", &S::chunk), JsonField("phase", &S::phase),
                    JsonOrNull("module", &S::module), JsonOrNull("operator", &S::op),
                    JsonField("role", &S::role), JsonField("parameter_id", &S::parameter_id),
                    JsonOrNull("parameter", &S::parameter), JsonField("dtype", &S::dtype),
                    JsonField("shape", &S::shape), JsonField("stats", &S::stats),
                    JsonField("crossing", &S::crossing), JsonOmitEmpty("position", &S::position),
                    JsonField("valid_labels", &S::valid_labels));
}

}  // namespace nanlocator::inline record_room
