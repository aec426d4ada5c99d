#include "report/fact_json.hpp"

#include <string>

#include "record/birth_json.hpp"
#include "record/bundle_keys.hpp"
#include "record/keys.hpp"
#include "record/record_json.hpp"
#include "record/sighting_json.hpp"
#include "report/verdict_keys.hpp"

namespace nanlocator {
namespace {

using nlohmann::ordered_json;

// ---- out: an argument that is empty is not written ----

class Writer {
 public:
  explicit Writer(ordered_json& json) : json_(json) {}

  template <typename Value>
  void operator()(const char* key, const std::optional<Value>& value) const {
    if (value) json_[key] = json_of(*value);
  }
  template <typename Value>
  void operator()(const char* key, const std::vector<Value>& values) const {
    if (!values.empty()) json_[key] = json_of(values);
  }
  void operator()(const char* key, const std::string& text) const {
    if (!text.empty()) json_[key] = text;
  }
  void operator()(const char* key, bool flag) const {
    if (flag) json_[key] = true;
  }

 private:
  template <typename Value>
  static ordered_json json_of(const Value& value) {
    return value;
  }
  static ordered_json json_of(double number) { return number_to_json(number); }
  static ordered_json json_of(Phase phase) { return name_of(phase); }
  static ordered_json json_of(const Operand& operand) { return operand_to_json(operand); }
  static ordered_json json_of(const CodeLine& code) { return code_to_json(code); }
  static ordered_json json_of(const BadCount& bad) {
    return {{keys::kNan, bad.nan},
            {keys::kPosInf, bad.pos_inf},
            {keys::kNegInf, bad.neg_inf},
            {keys::kNumel, bad.numel}};
  }
  static ordered_json json_of(const std::vector<std::pair<std::string, double>>& values) {
    ordered_json list = ordered_json::array();
    for (const auto& [name, value] : values) {
      list.push_back({{keys::kName, name}, {keys::kValue, number_to_json(value)}});
    }
    return list;
  }

  ordered_json& json_;
};

// ---- in ----

class Reader {
 public:
  Reader(const JsonObject& object, const nlohmann::json& json) : object_(object), json_(json) {}

  template <typename Value>
  void operator()(const char* key, Value& value) const {
    if (json_.contains(key)) read(key, value);
  }

 private:
  void read(const char* key, std::vector<int>& ranks) const {
    ranks = ranks_from_json(object_, key);
  }
  void read(const char* key, std::vector<std::string>& texts) const {
    texts = texts_from_json(object_, key);
  }
  void read(const char* key, std::vector<std::pair<std::string, double>>& values) const {
    const auto& list = object_.member(key);
    if (!list.is_array()) throw_unexpected_json(object_.where(key), list, "an array of values");
    for (const auto& entry : list) {
      const std::string path = object_.path_to(key) + "[" + std::to_string(values.size()) + "]";
      const JsonObject value(entry, object_.source(), path);
      values.emplace_back(value.text(keys::kName), required_number(value, keys::kValue));
    }
  }
  void read(const char* key, std::optional<Phase>& phase) const {
    phase = phase_from_json(object_, key);
  }
  void read(const char* key, std::optional<int>& number) const {
    number = object_.small_integer(key, 0);
  }
  void read(const char* key, std::optional<std::int64_t>& number) const {
    number = object_.integer(key, 0);
  }
  void read(const char* key, std::optional<double>& number) const {
    number = required_number(object_, key);
  }
  void read(const char* key, std::optional<BadCount>& bad) const {
    const JsonObject counts = object_.object(key);
    bad = BadCount{counts.integer(keys::kNan, 0), counts.integer(keys::kPosInf, 0),
                   counts.integer(keys::kNegInf, 0), counts.integer(keys::kNumel, 0)};
  }
  void read(const char* key, std::optional<Operand>& operand) const {
    operand = operand_from_json(object_.object(key));
  }
  void read(const char* key, std::optional<CodeLine>& code) const {
    code = code_from_json(object_, key);
  }
  void read(const char* key, bool& flag) const { flag = object_.boolean(key); }
  void read(const char* key, std::string& text) const { text = object_.text(key); }

  const JsonObject& object_;
  const nlohmann::json& json_;
};

}  // namespace

ordered_json fact_to_json(const Fact& fact) {
  ordered_json json = {{keys::kKind, name_of(fact.kind)}};
  if (fact.source != FactSource::origin) json[keys::kSource] = name_of(fact.source);
  visit_arguments(fact, Writer(json));
  return json;
}

ordered_json facts_to_json(const Facts& facts) {
  ordered_json list = ordered_json::array();
  for (const Fact& fact : facts) list.push_back(fact_to_json(fact));
  return list;
}

Facts facts_from_json(const JsonObject& object, const char* key) {
  const auto& list = object.member(key);
  if (!list.is_array()) throw_unexpected_json(object.where(key), list, "an array of facts");
  Facts facts;
  for (const auto& entry : list) {
    const JsonObject json(entry, object.source(),
                          object.path_to(key) + "[" + std::to_string(facts.size()) + "]");
    Fact& fact = facts.emplace_back();
    fact.kind = enum_from_json<FactKind>(json, keys::kKind);
    if (entry.contains(keys::kSource))
      fact.source = enum_from_json<FactSource>(json, keys::kSource);
    visit_arguments(fact, Reader(json, entry));
  }
  return facts;
}

}  // namespace nanlocator
