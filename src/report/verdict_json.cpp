#include "nanlocator/report/verdict_json.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "files/json_fields.hpp"
#include "map/coordinates_json.hpp"
#include "nanlocator/report/narrative.hpp"
#include "nanlocator/report/sentences.hpp"
#include "nanlocator/verdict/cause_table.hpp"
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
                    JsonAdded(JsonOrNull("why_not", &R::why_not)),
                    JsonAdded(JsonField("variants", &R::variants)));
}

constexpr auto json_fields(const JobState*) {
  return std::tuple(
      JsonOrNull("on_bad", &JobState::on_bad),
      JsonField("weights_updated", &JobState::are_weights_updated),
      JsonAdded(JsonField("framework_skips_update", &JobState::framework_skips_update)),
      JsonAdded(JsonField("is_discarded", &JobState::is_discarded)),
      JsonAdded(JsonField("was_traced", &JobState::was_traced)),
      JsonAdded(JsonField("weights_finite", &JobState::are_weights_finite)),
      JsonAdded(JsonField("restart", &JobState::restart)),
      JsonAdded(JsonField("restart_before", &JobState::restart_before)));
}

constexpr auto json_fields(const JobDecision*) {
  using D = JobDecision;
  return std::tuple(JsonField("kind", &D::kind), JsonField("origin", &D::origin),
                    JsonField("traced", &D::is_traced), JsonField("ranks", &D::ranks),
                    JsonAdded(JsonField("ended_rank", &D::ended_rank)), JsonWriteOnly{"hosts"},
                    JsonWriteOnly{"devices"}, JsonField("newest_step", &D::newest_step),
                    JsonField("check_first", &D::is_to_check), JsonField("page", &D::page),
                    JsonField("ticket", &D::ticket), JsonField("recurrence", &D::recurrence),
                    JsonField("rests_on", &D::rests_on));
}

constexpr auto json_fields(const CheckpointFile*) {
  return std::tuple(JsonField("step", &CheckpointFile::step),
                    JsonField("name", &CheckpointFile::name),
                    JsonAdded(JsonField("finite", &CheckpointFile::is_finite)),
                    JsonAdded(JsonOrNull("found", &CheckpointFile::found)),
                    JsonAdded(JsonField("largest", &CheckpointFile::largest)));
}

constexpr auto json_fields(const RankEnding*) {
  using E = RankEnding;
  return std::tuple(JsonField("rank", &E::rank), JsonField("kind", &E::kind),
                    JsonField("text", &E::text));
}

constexpr auto json_fields(const RankLog*) {
  using L = RankLog;
  return std::tuple(JsonField("rank", &L::rank), JsonField("log", &L::log),
                    JsonField("log_begin", &L::log_begin));
}

constexpr auto json_fields(const Launch*) {
  using L = Launch;
  constexpr std::int64_t kMostBefore = 1'000'000'000'000'000;  // and below zero: names from step 0
  return std::tuple(
      JsonOrNull("found", &L::found), JsonOrNull("scheduler", &L::scheduler),
      JsonOrNull("job_id", &L::job_id), JsonOrNull("job_name", &L::job_name),
      JsonField("attempt", &L::attempt), JsonOrNull("checkpoint_dir", &L::checkpoint_dir),
      JsonField("checkpoints", &L::checkpoints),
      JsonAdded(JsonField("steps_before", &L::steps_before, -kMostBefore, kMostBefore)),
      JsonAdded(JsonOrNull("log", &L::log)), JsonAdded(JsonField("log_begin", &L::log_begin)),
      JsonAdded(JsonField("logs", &L::logs)), JsonAdded(JsonField("endings", &L::endings)),
      JsonAdded(JsonOrNull("loaded", &L::loaded)), JsonAdded(JsonOrNull("saved", &L::saved)),
      JsonAdded(JsonField("loaded_elsewhere", &L::loaded_elsewhere)));
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
                    JsonAdded(JsonField("decision", &V::decision)), JsonWriteOnly{"narrative"},
                    JsonAdded(JsonField("launch", &V::launch)), JsonField("layout", &V::layout),
                    JsonField("silent_ranks", &V::silent_ranks), JsonField("notes", &V::notes),
                    JsonField("facts", &V::facts));
}

namespace {

constexpr int kVersion = 3;

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

nlohmann::ordered_json rows_to_json(const std::vector<std::pair<std::string, std::string>>& rows) {
  auto json = nlohmann::ordered_json::array();
  for (const auto& [label, text] : rows) json.push_back({label, text});
  return json;
}

nlohmann::ordered_json to_json(const Narrative& told) {
  return {{"severity", told.severity},
          {"code", told.code},
          {"action", told.action},
          {"restart", told.restart},
          {"hosts", told.hosts},
          {"load", told.load},
          {"page", told.page},
          {"ticket", told.ticket},
          {"rows", rows_to_json(told.rows)},
          {"place", told.place},
          {"source", told.source},
          {"marker", told.marker},
          {"details", rows_to_json(told.details)}};
}

/// The suspected ranks' machines, as far as the verdict knows them.
void add_machines(const Verdict& verdict, nlohmann::ordered_json& decision) {
  std::set<std::string> hosts, devices;
  for (const int rank : verdict.decision.ranks) {
    const RankCoordinates* const known = find_mentioned(verdict, rank);
    if (known == nullptr || known->host.empty()) continue;
    hosts.insert(known->host);
    devices.insert(known->host + " " + known->device);
  }
  decision["hosts"] = hosts;
  decision["devices"] = devices;
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
  add_machines(verdict, json["decision"]);
  json["narrative"] = to_json(narrative_of(verdict));
  return json.dump(2, ' ', true, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

Verdict verdict_from_json(std::string_view text, const std::string& source) {
  nlohmann::json json = parse_json(text, source);
  const JsonObject object(json, source);
  const bool is_version_1 = object.member("version") == 1;
  bool has_decision = false;
  if (is_version_1) {
    upgrade(json);
  } else {
    has_decision = object.member("version") != 2;
    require_version(object, has_decision ? kVersion : 2);
  }
  auto verdict = fields_from_json<Verdict>(object);
  if (is_version_1) {
    const JsonMember origins(object, "origins");
    for (std::size_t i = 0; i < verdict.origins.size(); ++i) {
      read_sentences(origins.element(i).object(), verdict.origins[i]);
    }
  }
  if (!has_decision) verdict.decision = decide(verdict);
  // The last notes are the sentences of the verdict's facts.
  verdict.notes.resize(verdict.notes.size() - std::min(verdict.notes.size(), verdict.facts.size()));
  return verdict;
}

}  // namespace nanlocator::inline report_room
