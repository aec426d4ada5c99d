#include "record/birth_json.hpp"

#include <string>
#include <vector>

#include "nanlocator/error.hpp"

namespace nanlocator::inline record_room {
namespace {

/// Files written before births had operands list them by name and value.
constexpr const char* kOldOperands = "values";

struct OldOperand {
  std::string name;
  double value = 0;
};

constexpr auto json_fields(const OldOperand*) {
  return std::tuple(JsonField("name", &OldOperand::name), JsonField("value", &OldOperand::value));
}

Reached reached_from_old_text(const std::string& text) {
  constexpr std::string_view kModule = "module ";
  if (text == "other ranks") return {ReachedKind::other_ranks, {}};
  if (text == "loss" || text.starts_with("loss[")) return {ReachedKind::loss, text};
  if (text.starts_with(kModule)) return {ReachedKind::module, text.substr(kModule.size())};
  return {ReachedKind::parameter, text};
}

/// Converts to today's form; members that did not exist yet are empty.
nlohmann::json upgraded(const JsonObject& old) {
  Birth added;
  for (const auto& operand : member_from_json<std::vector<OldOperand>>(old, kOldOperands)) {
    added.operands.emplace_back().name = operand.name;
    added.operands.back().at_first_bad = operand.value;
  }
  for (const auto& text : member_from_json<std::vector<std::string>>(old, "reached")) {
    added.reached.push_back(reached_from_old_text(text));
  }
  const nlohmann::json complete = fields_to_json(added);
  nlohmann::json birth = old.value();
  for (const char* key :
       {"is_custom_operator", "custom_function", "literal_operator", "code", "framework_code",
        "operands", "extent", "weights", "reader", "writer", "last_seen", "inside", "reached"}) {
    birth[key] = complete[key];
  }
  birth.erase(kOldOperands);
  return birth;
}

}  // namespace

void add_maxima_before(std::vector<Birth>& births, const History& gradients, const History& weights,
                       std::int64_t iteration) {
  for (Birth& birth : births) {
    for (Magnitude& weight : birth.weights) {
      weight.before = maxima_before(weights, weight.parameter, iteration);
      weight.gradient_before = maxima_before(gradients, weight.parameter, iteration);
    }
  }
}

void read_fields(const JsonObject& object, BadExtent::Indices& indices) {
  read_fields(object, indices, json_fields(&indices));
  if (indices.last < indices.first || indices.count - 1 > indices.last - indices.first) {
    throw FormatError(object.where("count") + ": more indices than from first to last");
  }
}

void read_fields(const JsonObject& object, Birth& birth) {
  if (object.has(kOldOperands)) {
    const nlohmann::json today = upgraded(object);
    read_fields(JsonObject(today, object.source(), object.path()), birth);
    return;
  }
  read_fields(object, birth, json_fields(&birth));
}

}  // namespace nanlocator::inline record_room
