#include "report/fact_json.hpp"

#include "record/birth_json.hpp"

namespace nanlocator::inline report_room {

constexpr auto json_fields(const BadCount*) {
  using B = BadCount;
  return std::tuple(JsonField("nan", &B::nan), JsonField("pos_inf", &B::pos_inf),
                    JsonField("neg_inf", &B::neg_inf), JsonField("numel", &B::numel));
}

nlohmann::ordered_json value_to_json(const Fact& fact) {
  nlohmann::ordered_json json = {{"kind", name_of(fact.kind)}};
  if (fact.source != FactSource::origin) json["source"] = name_of(fact.source);
  visit_arguments(fact, [&]<typename Value>(const char* key, const Value& value) {
    if (value != Value()) json[key] = nanlocator::value_to_json(value);
  });
  return json;
}

void read_value(const JsonMember& from, JsonRange range, Fact& fact) {
  const JsonObject object = from.object();
  fact.kind = member_from_json<FactKind>(object, "kind");
  const auto read_if_there = [&](const char* key, auto& value) {
    if (!object.has(key)) return;
    if constexpr (requires {
                    value.emplace();
                    *value;
                  }) {
      read_value(JsonMember(object, key), range, value.emplace());  // null: not an argument
    } else {
      read_value(JsonMember(object, key), range, value);
    }
  };
  read_if_there("source", fact.source);
  visit_arguments(fact, read_if_there);
}

}  // namespace nanlocator::inline report_room
