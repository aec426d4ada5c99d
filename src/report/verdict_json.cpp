#include "nanlocator/report/verdict_json.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "files/strict_json.hpp"
#include "map/coordinates_json.hpp"
#include "nanlocator/error.hpp"
#include "nanlocator/locate/cause_table.hpp"
#include "nanlocator/report/sentences.hpp"
#include "record/birth_json.hpp"
#include "record/bundle_keys.hpp"
#include "record/keys.hpp"
#include "record/record_json.hpp"
#include "record/sighting_json.hpp"
#include "report/fact_json.hpp"
#include "report/verdict_keys.hpp"

namespace nanlocator {
namespace {

using nlohmann::ordered_json;

ordered_json tensor_to_json(const OriginTensor& tensor) {
  ordered_json json;
  json[keys::kRole] = tensor.role;
  json[keys::kShape] = tensor.shape;
  json[keys::kDtype] = tensor.dtype;
  json[keys::kNan] = tensor.nan;
  json[keys::kPosInf] = tensor.pos_inf;
  json[keys::kNegInf] = tensor.neg_inf;
  json[keys::kFirstBad] = value_or_null(tensor.first_bad);
  json[keys::kFirstBadIndex] = tensor.first_bad_index;
  json[keys::kAbsmaxFinite] = number_or_null(tensor.absmax_finite);
  json[keys::kExtent] = extent_to_json(tensor.extent);
  return json;
}

OriginTensor tensor_from_json(const JsonObject& object) {
  OriginTensor tensor;
  tensor.role = object.text(keys::kRole);
  tensor.shape = sizes_from_json(object, keys::kShape);
  tensor.dtype = object.text(keys::kDtype);
  tensor.nan = object.integer(keys::kNan, 0);
  tensor.pos_inf = object.integer(keys::kPosInf, 0);
  tensor.neg_inf = object.integer(keys::kNegInf, 0);
  tensor.first_bad = object.optional_integer(keys::kFirstBad, 0);
  tensor.first_bad_index = sizes_from_json(object, keys::kFirstBadIndex);
  tensor.absmax_finite = optional_number(object, keys::kAbsmaxFinite);
  if (object.has(keys::kExtent)) tensor.extent = extent_from_json(object);  // not in version 1
  return tensor;
}

ordered_json origin_to_json(const Verdict& verdict, const Origin& origin) {
  ordered_json json;
  json[keys::kPhase] = name_of(origin.phase);
  json[keys::kDirection] =
      origin.direction ? ordered_json(name_of(*origin.direction)) : ordered_json(nullptr);
  json[keys::kIteration] = origin.iteration;
  json[keys::kMicrobatch] = value_or_null(origin.microbatch);
  json[keys::kChunk] = value_or_null(origin.chunk);
  json[keys::kCoordinates] =
      origin.coordinates ? coordinates_to_json(*origin.coordinates) : ordered_json(nullptr);
  json[keys::kCandidates] = origin.candidates;
  json[keys::kIsOnEveryCandidate] = origin.is_on_every_candidate;
  json[keys::kDataParallelReplica] = value_or_null(origin.data_parallel_replica);
  json[keys::kModule] = text_or_null(origin.module);
  json[keys::kOperator] = text_or_null(origin.op);
  json[keys::kForwardOperator] = text_or_null(origin.forward_op);
  json[keys::kParameter] = text_or_null(origin.parameter);
  json[keys::kCustomFunction] = text_or_null(origin.custom_function);
  json[keys::kCode] = code_to_json(origin.code);
  json[keys::kTensor] = origin.tensor ? tensor_to_json(*origin.tensor) : ordered_json(nullptr);
  json[keys::kCause] = name_of(origin.cause);
  json[keys::kTitle] = title_of(origin);
  json[keys::kDetail] =
      origin.detail == Detail::none ? ordered_json(nullptr) : ordered_json(name_of(origin.detail));
  json[keys::kOwner] = name_of(origin.owner);
  json[keys::kConfidence] = name_of(origin.place_confidence);  // its only one in version 1
  json[keys::kPlaceConfidence] = name_of(origin.place_confidence);
  json[keys::kCauseConfidence] = name_of(origin.cause_confidence);
  json[keys::kAlternatives] = ordered_json::array();
  for (const Suspect suspect : origin.alternatives) {
    json[keys::kAlternatives].push_back(name_of(suspect));
  }
  json[keys::kFacts] = facts_to_json(ordered_facts(origin));
  json[keys::kEvidence] = evidence_of(verdict, origin);
  json[keys::kRefutation] = name_of(origin.refutation);
  json[keys::kRefutedBy] = refutation_of(origin);
  json[keys::kActionKind] = name_of(origin.action);
  json[keys::kAction] = action_of(verdict, origin);
  json[keys::kBundle] = text_or_null(origin.bundle);
  json[keys::kCleanBefore] = text_or_null(origin.clean_before);
  json[keys::kCleanAfter] = text_or_null(origin.clean_after);
  return json;
}

/// A sentence where version 2 has facts.
void read_version_1(Origin& origin, const JsonObject& object) {
  origin.place_confidence = enum_from_json<Confidence>(object, keys::kConfidence);
  for (std::string& sentence : texts_from_json(object, keys::kEvidence)) {
    origin.facts.push_back({.kind = FactKind::stated, .text = std::move(sentence)});
  }
  (void)object.text(keys::kRefutedBy);  // follows from the cause
  complete(origin);
  origin.action = Action::stated;
  origin.facts.push_back({.kind = FactKind::stated_action, .text = object.text(keys::kAction)});
}

void read_version_2(Origin& origin, const JsonObject& object) {
  origin.forward_op = text_or_empty(object, keys::kForwardOperator);
  origin.custom_function = text_or_empty(object, keys::kCustomFunction);
  origin.code = code_from_json(object, keys::kCode);
  if (!object.member(keys::kDetail).is_null()) {
    origin.detail = enum_from_json<Detail>(object, keys::kDetail);
  }
  origin.owner = enum_from_json<Owner>(object, keys::kOwner);
  origin.place_confidence = enum_from_json<Confidence>(object, keys::kPlaceConfidence);
  origin.cause_confidence = enum_from_json<Confidence>(object, keys::kCauseConfidence);
  for (const std::string& name : texts_from_json(object, keys::kAlternatives)) {
    const auto known = std::ranges::find(kNames<Suspect>, name);
    if (known == kNames<Suspect>.end()) {
      throw_unexpected_json(object.where(keys::kAlternatives), object.member(keys::kAlternatives),
                            "known suspects");
    }
    origin.alternatives.push_back(static_cast<Suspect>(known - kNames<Suspect>.begin()));
  }
  origin.facts = facts_from_json(object, keys::kFacts);
  origin.refutation = enum_from_json<Refutation>(object, keys::kRefutation);
  origin.action = enum_from_json<Action>(object, keys::kActionKind);
}

Origin origin_from_json(const JsonObject& object, int version) {
  const auto is_null = [&](const char* key) { return object.member(key).is_null(); };
  Origin origin;
  origin.phase = phase_from_json(object, keys::kPhase);
  if (!is_null(keys::kDirection)) {
    origin.direction = enum_from_json<Direction>(object, keys::kDirection);
  }
  origin.iteration = object.integer(keys::kIteration, 0);
  origin.microbatch = object.optional_small_integer(keys::kMicrobatch, 0);
  origin.chunk = object.optional_small_integer(keys::kChunk, 0);
  if (!is_null(keys::kCoordinates)) {
    origin.coordinates = coordinates_from_json(object.object(keys::kCoordinates));
  }
  origin.candidates = ranks_from_json(object, keys::kCandidates);
  origin.is_on_every_candidate = object.boolean(keys::kIsOnEveryCandidate);
  origin.data_parallel_replica = object.optional_small_integer(keys::kDataParallelReplica, 0);
  origin.module = text_or_empty(object, keys::kModule);
  origin.op = text_or_empty(object, keys::kOperator);
  origin.parameter = text_or_empty(object, keys::kParameter);
  if (!is_null(keys::kTensor)) origin.tensor = tensor_from_json(object.object(keys::kTensor));
  origin.cause = enum_from_json<Cause>(object, keys::kCause);
  origin.bundle = text_or_empty(object, keys::kBundle);
  origin.clean_before = text_or_empty(object, keys::kCleanBefore);
  origin.clean_after = text_or_empty(object, keys::kCleanAfter);
  version == 1 ? read_version_1(origin, object) : read_version_2(origin, object);
  return origin;
}

ordered_json spread_to_json(const Spread& spread) {
  ordered_json json;
  json[keys::kRanks] = spread.ranks;
  json[keys::kParameters] = spread.parameters;
  json[keys::kFirstSeen] =
      spread.first_seen ? ordered_json(name_of(*spread.first_seen)) : ordered_json(nullptr);
  return json;
}

Spread spread_from_json(const JsonObject& object) {
  Spread spread;
  spread.ranks = ranks_from_json(object, keys::kRanks);
  spread.parameters = texts_from_json(object, keys::kParameters);
  if (!object.member(keys::kFirstSeen).is_null()) {
    spread.first_seen = phase_from_json(object, keys::kFirstSeen);
  }
  return spread;
}

RerunOutcome rerun_from_json(const JsonObject& object) {
  RerunOutcome rerun;
  rerun.done = object.boolean(keys::kDone);
  rerun.reproduced = object.optional_boolean(keys::kReproduced);
  rerun.not_restored = texts_from_json(object, keys::kNotRestored);
  return rerun;
}

ordered_json layout_to_json(const std::optional<JobLayout>& layout) {
  if (!layout) return nullptr;
  ordered_json mentioned = ordered_json::array();
  for (const auto& rank : layout->mentioned) mentioned.push_back(coordinates_to_json(rank));
  return {{keys::kFirstRank, coordinates_to_json(layout->first_rank)},
          {keys::kRanksPerHost, layout->ranks_per_host},
          {keys::kMentioned, std::move(mentioned)}};
}

void read_version_2(Verdict& verdict, const JsonObject& object) {
  const JsonObject job = object.object(keys::kJob);
  verdict.job.on_bad = text_or_empty(job, keys::kOnBad);
  verdict.job.are_weights_updated = job.optional_boolean(keys::kWeightsUpdated);
  if (!object.member(keys::kLayout).is_null()) {
    const JsonObject layout = object.object(keys::kLayout);
    verdict.layout = JobLayout{coordinates_from_json(layout.object(keys::kFirstRank)),
                               layout.small_integer(keys::kRanksPerHost, 1),
                               {}};
    if (layout.has(keys::kMentioned)) {
      verdict.layout->mentioned =
          objects_from_json<RankCoordinates>(layout, keys::kMentioned, coordinates_from_json);
    }
  }
  verdict.facts = facts_from_json(object, keys::kFacts);
  // Their sentences are the last notes.
  verdict.notes.resize(verdict.notes.size() - std::min(verdict.notes.size(), verdict.facts.size()));
}

}  // namespace

std::string to_json(const Verdict& verdict) {
  ordered_json json;
  json[keys::kVersion] = keys::kVerdictVersion;
  json[keys::kRun] = verdict.run_id;
  json[keys::kIteration] = verdict.iteration;
  json[keys::kStatus] = name_of(verdict.status);
  json[keys::kOrigins] = ordered_json::array();
  for (const Origin& origin : verdict.origins)
    json[keys::kOrigins].push_back(origin_to_json(verdict, origin));
  json[keys::kSpread] = spread_to_json(verdict.spread);
  json[keys::kClean] = verdict.clean;
  json[keys::kRerun] = {{keys::kDone, verdict.rerun.done},
                        {keys::kReproduced, value_or_null(verdict.rerun.reproduced)},
                        {keys::kNotRestored, verdict.rerun.not_restored}};
  json[keys::kJob] = {{keys::kOnBad, text_or_null(verdict.job.on_bad)},
                      {keys::kWeightsUpdated, value_or_null(verdict.job.are_weights_updated)}};
  json[keys::kLayout] = layout_to_json(verdict.layout);
  json[keys::kSilentRanks] = verdict.silent_ranks;
  json[keys::kNotes] = notes_of(verdict);
  json[keys::kFacts] = facts_to_json(verdict.facts);
  return json.dump(2, ' ', true, ordered_json::error_handler_t::replace) + "\n";
}

Verdict verdict_from_json(std::string_view text, const std::string& source) {
  const nlohmann::json json = parse_json(text, source);
  const JsonObject object(json, source);
  const auto known = integer_within(object.member(keys::kVersion), 1, keys::kVerdictVersion);
  if (!known) require_version(object, keys::kVerdictVersion);
  const auto version = static_cast<int>(known.value_or(keys::kVerdictVersion));
  Verdict verdict;
  verdict.run_id = object.text(keys::kRun);
  verdict.iteration = object.integer(keys::kIteration, 0);
  verdict.status = enum_from_json<VerdictStatus>(object, keys::kStatus);
  const auto& origins = object.member(keys::kOrigins);
  if (!origins.is_array()) {
    throw_unexpected_json(object.where(keys::kOrigins), origins, "an array of origins");
  }
  for (const auto& origin : origins) {
    std::string path = keys::kOrigins;
    path.append("[").append(std::to_string(verdict.origins.size())).append("]");
    verdict.origins.push_back(origin_from_json(JsonObject(origin, source, path), version));
  }
  verdict.spread = spread_from_json(object.object(keys::kSpread));
  verdict.clean = texts_from_json(object, keys::kClean);
  verdict.rerun = rerun_from_json(object.object(keys::kRerun));
  verdict.silent_ranks = ranks_from_json(object, keys::kSilentRanks);
  verdict.notes = texts_from_json(object, keys::kNotes);
  if (version > 1) read_version_2(verdict, object);
  return verdict;
}

}  // namespace nanlocator
