#include "nanlocator/report/verdict_json.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "files/json_fields.hpp"
#include "map/coordinates_json.hpp"
#include "nanlocator/locate/cause_table.hpp"
#include "nanlocator/report/sentences.hpp"
#include "record/birth_json.hpp"
#include "record/rerun_variant_json.hpp"
#include "record/sighting_json.hpp"
#include "report/fact_json.hpp"

namespace nanlocator::inline report_room {

constexpr auto json_fields(const OriginTensor*) {
  using T = OriginTensor;
  return std::tuple(JsonField("role", &T::role), JsonField("shape", &T::shape),
                    JsonField("dtype", &T::dtype), JsonField("nan", &T::nan),
                    JsonField("pos_inf", &T::pos_inf), JsonField("neg_inf", &T::neg_inf),
                    JsonField("first_bad", &T::first_bad),
                    JsonField("first_bad_index", &T::first_bad_index),
                    JsonField("absmax_finite", &T::absmax_finite),
                    JsonAdded(JsonField("extent", &T::extent)));  // not in version 1
}

constexpr auto json_fields(const Origin*) {
  using O = Origin;
  return std::tuple(
      JsonField("phase", &O::phase), JsonField("direction", &O::direction),
      JsonField("iteration", &O::iteration), JsonField("microbatch", &O::microbatch),
      JsonField("chunk", &O::chunk), JsonField("coordinates", &O::coordinates),
      JsonField("candidates", &O::candidates),
      JsonField("is_on_every_candidate", &O::is_on_every_candidate),
      JsonField("data_parallel_replica", &O::data_parallel_replica),
      JsonOrNull("module", &O::module), JsonOrNull("operator", &O::op),
      JsonOrNull("forward_operator", &O::forward_op), JsonOrNull("parameter", &O::parameter),
      JsonOrNull("custom_function", &O::custom_function), JsonField("code", &O::code),
      JsonField("tensor", &O::tensor), JsonField("cause", &O::cause), JsonWriteOnly{"title"},
      JsonOrNull("detail", &O::detail), JsonField("owner", &O::owner), JsonWriteOnly{"confidence"},
      JsonField("place_confidence", &O::place_confidence),
      JsonField("cause_confidence", &O::cause_confidence),
      JsonField("alternatives", &O::alternatives), JsonField("facts", &O::facts),
      JsonWriteOnly{"evidence"}, JsonField("refutation", &O::refutation),
      JsonWriteOnly{"refuted_by"}, JsonField("action_kind", &O::action), JsonWriteOnly{"action"},
      JsonOrNull("bundle", &O::bundle), JsonOrNull("clean_before", &O::clean_before),
      JsonOrNull("clean_after", &O::clean_after));
}

constexpr auto json_fields(const Spread*) {
  return std::tuple(JsonField("ranks", &Spread::ranks),
                    JsonField("parameters", &Spread::parameters),
                    JsonField("first_seen", &Spread::first_seen));
}

constexpr auto json_fields(const RerunOutcome*) {
  using R = RerunOutcome;
  return std::tuple(JsonField("done", &R::done), JsonField("reproduced", &R::reproduced),
                    JsonField("not_restored", &R::not_restored),
                    JsonAdded(JsonField("variants", &R::variants)));
}

constexpr auto json_fields(const JobState*) {
  return std::tuple(
      JsonOrNull("on_bad", &JobState::on_bad),
      JsonField("weights_updated", &JobState::are_weights_updated),
      JsonAdded(JsonField("framework_skips_update", &JobState::framework_skips_update)),
      JsonAdded(JsonField("weights_finite", &JobState::are_weights_finite)),
      JsonAdded(JsonField("restart", &JobState::restart)),
      JsonAdded(JsonField("restart_before", &JobState::restart_before)));
}

constexpr auto json_fields(const JobLayout*) {
  return std::tuple(JsonField("first_rank", &JobLayout::first_rank),
                    JsonField("ranks_per_host", &JobLayout::ranks_per_host, 1),
                    JsonAdded(JsonField("mentioned", &JobLayout::mentioned)));
}

constexpr auto json_fields(const Verdict*) {
  using V = Verdict;
  return std::tuple(JsonField("run", &V::run_id), JsonField("iteration", &V::iteration),
                    JsonField("status", &V::status), JsonField("origins", &V::origins),
                    JsonField("spread", &V::spread), JsonField("clean", &V::clean),
                    JsonField("rerun", &V::rerun), JsonField("job", &V::job),
                    JsonField("layout", &V::layout), JsonField("silent_ranks", &V::silent_ranks),
                    JsonField("notes", &V::notes), JsonField("facts", &V::facts));
}

namespace {

constexpr int kVersion = 2;

/// Upgrades version 1 to version 2: new fields are empty, and its confidence was about the place.
void upgrade(nlohmann::json& verdict) {
  const nlohmann::json empty = fields_to_json(Verdict());
  for (const char* key : {"job", "layout", "facts"}) verdict[key] = empty[key];
  const nlohmann::json empty_origin = fields_to_json(Origin());
  const auto origins = verdict.find("origins");
  if (origins == verdict.end() || !origins->is_array()) return;  // the reader reports it
  for (auto& origin : *origins) {
    if (!origin.is_object()) continue;
    for (const char* key :
         {"forward_operator", "custom_function", "code", "detail", "owner", "cause_confidence",
          "alternatives", "facts", "refutation", "action_kind"}) {
      origin[key] = empty_origin[key];
    }
    if (origin.contains("confidence")) origin["place_confidence"] = origin["confidence"];
  }
}

/// Version 1 has sentences instead of facts.
void read_sentences(const JsonObject& object, Origin& origin) {
  for (auto& sentence : member_from_json<std::vector<std::string>>(object, "evidence")) {
    origin.facts.push_back({.kind = FactKind::stated, .text = std::move(sentence)});
  }
  complete(origin);
  origin.action = Action::stated;
  origin.facts.push_back({.kind = FactKind::stated_action, .text = object.text("action")});
}

}  // namespace

std::string to_json(const Verdict& verdict) {
  Verdict in_order = verdict;
  for (Origin& origin : in_order.origins) origin.facts = ordered_facts(origin);
  in_order.notes = notes_of(verdict);
  nlohmann::ordered_json json = {{"version", kVersion}};
  write_fields(json, in_order, json_fields(&in_order));
  for (std::size_t i = 0; i < verdict.origins.size(); ++i) {
    const Origin& origin = verdict.origins[i];
    auto& written = json["origins"][i];
    written["title"] = title_of(origin);
    written["confidence"] = name_of(origin.place_confidence);  // version 1's only confidence
    written["evidence"] = evidence_of(verdict, origin);
    written["refuted_by"] = refutation_of(origin);
    written["action"] = action_of(verdict, origin);
  }
  return json.dump(2, ' ', true, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

Verdict verdict_from_json(std::string_view text, const std::string& source) {
  nlohmann::json json = parse_json(text, source);
  const JsonObject object(json, source);
  const bool is_version_1 = object.member("version") == 1;
  if (is_version_1) {
    upgrade(json);
  } else {
    require_version(object, kVersion);
  }
  auto verdict = fields_from_json<Verdict>(object);
  if (is_version_1) {
    const JsonMember origins(object, "origins");
    for (std::size_t i = 0; i < verdict.origins.size(); ++i) {
      read_sentences(origins.element(i).object(), verdict.origins[i]);
    }
  }
  // The last notes are the sentences of the verdict's facts.
  verdict.notes.resize(verdict.notes.size() - std::min(verdict.notes.size(), verdict.facts.size()));
  return verdict;
}

}  // namespace nanlocator::inline report_room
