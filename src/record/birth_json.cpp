#include "record/birth_json.hpp"

#include <string>

#include "record/bundle_keys.hpp"
#include "record/keys.hpp"
#include "record/record_json.hpp"
#include "record/sighting_json.hpp"

namespace nanlocator {
namespace {

/// The value that the member `key` names, as `from_name` knows it.
template <typename FromName>
auto named_value(const JsonObject& object, const char* key, FromName from_name,
                 const char* expected) {
  const auto value = from_name(object.text(key));
  if (!value) throw_unexpected_json(object.where(key), object.member(key), expected);
  return *value;
}

std::string element_path(const JsonObject& object, std::size_t index) {
  return object.path_to(keys::kValues) + "[" + std::to_string(index) + "]";
}

std::vector<std::pair<std::string, double>> values_from_json(const JsonObject& object) {
  const auto& list = object.member(keys::kValues);
  const std::string where = object.where(keys::kValues);
  if (!list.is_array()) throw_unexpected_json(where, list, "an array of names and values");
  std::vector<std::pair<std::string, double>> values;
  for (const auto& entry : list) {
    const JsonObject value(entry, object.source(), element_path(object, values.size()));
    values.emplace_back(value.text(keys::kName),
                        number_from_json(value.member(keys::kValue), value.where(keys::kValue)));
  }
  return values;
}

}  // namespace

nlohmann::ordered_json birth_to_json(const Birth& birth) {
  nlohmann::ordered_json json;
  json[keys::kKind] = name_of(birth.kind);
  json[keys::kSighting] = sighting_to_json(birth.sighting);
  json[keys::kIsModuleInferred] = birth.is_module_inferred;
  json[keys::kNode] = text_or_null(birth.node);
  json[keys::kForwardOperator] = text_or_null(birth.forward_op);
  json[keys::kParent] = value_or_null(birth.parent);
  json[keys::kValues] = nlohmann::ordered_json::array();
  for (const auto& [name, value] : birth.values) {
    json[keys::kValues].push_back({{keys::kName, name}, {keys::kValue, number_to_json(value)}});
  }
  json[keys::kInputs] = birth.inputs;
  json[keys::kStack] = birth.stack;
  json[keys::kReached] = birth.reached;
  json[keys::kBundle] = text_or_null(birth.bundle);
  json[keys::kReplay] = name_of(birth.replay);
  json[keys::kReplayLines] = birth.replay_lines;
  return json;
}

Birth birth_from_json(const JsonObject& object) {
  Birth birth;
  birth.kind =
      named_value(object, keys::kKind, birth_kind_from_name, "the kind of a birth such as \"nan\"");
  birth.sighting = sighting_from_json(object.object(keys::kSighting));
  birth.is_module_inferred = object.boolean(keys::kIsModuleInferred);
  birth.node = text_or_empty(object, keys::kNode);
  birth.forward_op = text_or_empty(object, keys::kForwardOperator);
  birth.parent = object.optional_small_integer(keys::kParent, 0);
  birth.values = values_from_json(object);
  birth.inputs = texts_from_json(object, keys::kInputs);
  birth.stack = texts_from_json(object, keys::kStack);
  birth.reached = texts_from_json(object, keys::kReached);
  birth.bundle = text_or_empty(object, keys::kBundle);
  birth.replay = named_value(object, keys::kReplay, replay_conclusion_from_name,
                             "a conclusion such as \"varies\"");
  birth.replay_lines = texts_from_json(object, keys::kReplayLines);
  return birth;
}

}  // namespace nanlocator
