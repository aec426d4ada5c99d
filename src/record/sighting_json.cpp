#include "record/sighting_json.hpp"

#include <string>

#include "nanlocator/error.hpp"

namespace nanlocator::inline record_room {

nlohmann::ordered_json value_to_json(const TensorRole& role) {
  return role.text();
}

void read_value(const JsonMember& from, JsonRange /*range*/, TensorRole& role) {
  role = TensorRole(from.text());
}

void read_fields(const JsonObject& object, TensorStats& stats) {
  read_fields(object, stats, json_fields(&stats));
  const std::int64_t numel = stats.numel;  // the sum of four counts may exceed 2^63 - 1
  if (stats.zeros > numel || stats.pos_inf > numel || stats.nan > numel - stats.pos_inf ||
      stats.neg_inf > numel - stats.pos_inf - stats.nan) {
    throw FormatError(object.where() + ": more NaN, Inf or zeros than the " +
                      std::to_string(numel) + " elements");
  }
}

}  // namespace nanlocator::inline record_room
