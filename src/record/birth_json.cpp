#include "record/birth_json.hpp"

#include <string>

#include "nanlocator/error.hpp"
#include "record/bundle_keys.hpp"
#include "record/keys.hpp"
#include "record/record_json.hpp"
#include "record/sighting_json.hpp"

namespace nanlocator {
namespace {

using nlohmann::ordered_json;

/// The value that the member `key` names, as `from_name` knows it.
template <typename FromName>
auto named_value(const JsonObject& object, const char* key, FromName from_name,
                 const char* expected) {
  const auto value = from_name(object.text(key));
  if (!value) throw_unexpected_json(object.where(key), object.member(key), expected);
  return *value;
}

template <typename Values, typename ToJson>
ordered_json array_of(const Values& values, const ToJson& to_json) {
  auto array = ordered_json::array();
  for (const auto& value : values) array.push_back(to_json(value));
  return array;
}

BadExtent::Indices indices_from_json(const JsonObject& object) {
  BadExtent::Indices indices;
  indices.first = object.integer(keys::kFirst, 0);
  indices.last = object.integer(keys::kLast, indices.first);
  indices.count = object.integer(keys::kCount, 1);
  if (indices.count - 1 > indices.last - indices.first) {
    throw FormatError(object.where(keys::kCount) + ": more indices than from first to last");
  }
  return indices;
}

}  // namespace

ordered_json code_to_json(const std::optional<CodeLine>& code) {
  if (!code) return nullptr;
  ordered_json json;
  json[keys::kFile] = code->file;
  json[keys::kLine] = code->line;
  json[keys::kFunction] = code->function;
  json[keys::kText] = text_or_null(code->text);
  return json;
}

std::optional<CodeLine> code_from_json(const JsonObject& birth, const char* key) {
  if (birth.member(key).is_null()) return std::nullopt;
  const JsonObject object = birth.object(key);
  return CodeLine{.file = object.text(keys::kFile),
                  .line = object.small_integer(keys::kLine, 0),
                  .function = object.text(keys::kFunction),
                  .text = text_or_empty(object, keys::kText)};
}

ordered_json operand_to_json(const Operand& operand) {
  ordered_json json;
  json[keys::kName] = operand.name;
  json[keys::kElement] = value_or_null(operand.element);
  json[keys::kDtype] = text_or_null(operand.dtype);
  json[keys::kShape] = operand.shape;
  json[keys::kStats] = operand.stats ? stats_to_json(*operand.stats) : ordered_json(nullptr);
  json[keys::kNegatives] = value_or_null(operand.negatives);
  json[keys::kIgnored] = value_or_null(operand.ignored);
  json[keys::kNumber] = number_or_null(operand.number);
  json[keys::kAtFirstBad] = number_or_null(operand.at_first_bad);
  return json;
}

Operand operand_from_json(const JsonObject& object) {
  Operand operand;
  operand.name = object.text(keys::kName);
  operand.element = object.optional_small_integer(keys::kElement, 0);
  operand.dtype = text_or_empty(object, keys::kDtype);
  operand.shape = sizes_from_json(object, keys::kShape);
  if (!object.member(keys::kStats).is_null()) {
    operand.stats = stats_from_json(object.object(keys::kStats));
  }
  operand.negatives = object.optional_integer(keys::kNegatives, 0);
  if (object.has(keys::kIgnored)) operand.ignored = object.optional_integer(keys::kIgnored, 0);
  operand.number = optional_number(object, keys::kNumber);
  operand.at_first_bad = optional_number(object, keys::kAtFirstBad);
  return operand;
}

ordered_json extent_to_json(const std::optional<BadExtent>& extent) {
  if (!extent) return nullptr;
  ordered_json json;
  json[keys::kDimensions] = array_of(extent->dimensions, [](const BadExtent::Indices& indices) {
    return ordered_json{
        {keys::kFirst, indices.first}, {keys::kLast, indices.last}, {keys::kCount, indices.count}};
  });
  json[keys::kIsBlock] = extent->is_block;
  return json;
}

std::optional<BadExtent> extent_from_json(const JsonObject& birth) {
  if (birth.member(keys::kExtent).is_null()) return std::nullopt;
  const JsonObject object = birth.object(keys::kExtent);
  return BadExtent{.dimensions = objects_from_json<BadExtent::Indices>(object, keys::kDimensions,
                                                                       indices_from_json),
                   .is_block = object.boolean(keys::kIsBlock)};
}

namespace {

ordered_json magnitude_to_json(const Magnitude& magnitude) {
  return {{keys::kParameter, magnitude.parameter},
          {keys::kAbsmax, number_to_json(magnitude.absmax)}};
}

Magnitude magnitude_from_json(const JsonObject& object) {
  return {object.text(keys::kParameter), required_number(object, keys::kAbsmax)};
}

ordered_json reached_to_json(const Reached& reached) {
  return {{keys::kKind, name_of(reached.kind)}, {keys::kName, text_or_null(reached.name)}};
}

Reached reached_from_json(const JsonObject& object) {
  return {named_value(object, keys::kKind, reached_kind_from_name,
                      "what a birth reached, such as \"loss\""),
          text_or_empty(object, keys::kName)};
}

// ---- Births of ledgers that were written before births had operands ----------------------------

Reached reached_from_old_text(const std::string& text) {
  constexpr std::string_view kModule = "module ";
  if (text == "other ranks") return {ReachedKind::other_ranks, {}};
  if (text == "loss" || text.starts_with("loss[")) return {ReachedKind::loss, text};
  if (text.starts_with(kModule)) return {ReachedKind::module, text.substr(kModule.size())};
  return {ReachedKind::parameter, text};
}

void read_old_shape(const JsonObject& object, Birth& birth) {
  birth.operands =
      objects_from_json<Operand>(object, keys::kOldValues, [](const JsonObject& value) {
        Operand operand;
        operand.name = value.text(keys::kName);
        operand.at_first_bad = required_number(value, keys::kValue);
        return operand;
      });
  for (const std::string& text : texts_from_json(object, keys::kReached)) {
    birth.reached.push_back(reached_from_old_text(text));
  }
}

}  // namespace

nlohmann::ordered_json birth_to_json(const Birth& birth) {
  ordered_json json;
  json[keys::kKind] = name_of(birth.kind);
  json[keys::kSighting] = sighting_to_json(birth.sighting);
  json[keys::kIsModuleInferred] = birth.is_module_inferred;
  json[keys::kIsCustomOperator] = birth.is_custom_operator;
  json[keys::kNode] = text_or_null(birth.node);
  json[keys::kForwardOperator] = text_or_null(birth.forward_op);
  json[keys::kCustomFunction] = text_or_null(birth.custom_function);
  json[keys::kParent] = value_or_null(birth.parent);
  json[keys::kLiteralOperator] = text_or_null(birth.literal_op);
  json[keys::kCode] = code_to_json(birth.code);
  json[keys::kFrameworkCode] = code_to_json(birth.framework_code);
  json[keys::kOperands] = array_of(birth.operands, operand_to_json);
  json[keys::kExtent] = extent_to_json(birth.extent);
  json[keys::kWeights] = array_of(birth.weights, magnitude_to_json);
  json[keys::kReader] = text_or_null(birth.reader);
  json[keys::kWriter] = text_or_null(birth.writer);
  json[keys::kLastSeen] = name_of(birth.last_seen);
  json[keys::kInside] = text_or_null(birth.inside);
  json[keys::kStack] = birth.stack;
  json[keys::kReached] = array_of(birth.reached, reached_to_json);
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
  birth.stack = texts_from_json(object, keys::kStack);
  birth.bundle = text_or_empty(object, keys::kBundle);
  birth.replay = named_value(object, keys::kReplay, replay_conclusion_from_name,
                             "a conclusion such as \"varies\"");
  birth.replay_lines = texts_from_json(object, keys::kReplayLines);
  if (object.has(keys::kOldValues)) {
    read_old_shape(object, birth);
    return birth;
  }
  birth.is_custom_operator = object.boolean(keys::kIsCustomOperator);
  birth.custom_function = text_or_empty(object, keys::kCustomFunction);
  birth.literal_op = text_or_empty(object, keys::kLiteralOperator);
  birth.code = code_from_json(object, keys::kCode);
  birth.framework_code = code_from_json(object, keys::kFrameworkCode);
  birth.operands = objects_from_json<Operand>(object, keys::kOperands, operand_from_json);
  birth.extent = extent_from_json(object);
  birth.weights = objects_from_json<Magnitude>(object, keys::kWeights, magnitude_from_json);
  birth.reader = text_or_empty(object, keys::kReader);
  birth.writer = text_or_empty(object, keys::kWriter);
  birth.last_seen = named_value(object, keys::kLastSeen, last_seen_from_name,
                                "what was last seen of memory, such as \"finite\"");
  birth.inside = text_or_empty(object, keys::kInside);
  birth.reached = objects_from_json<Reached>(object, keys::kReached, reached_from_json);
  return birth;
}

}  // namespace nanlocator
