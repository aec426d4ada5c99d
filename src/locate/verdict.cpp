#include "nanlocator/locate/verdict.hpp"

#include <array>
#include <nlohmann/json.hpp>
#include <utility>

#include "files/strict_json.hpp"
#include "map/coordinates_json.hpp"
#include "nanlocator/error.hpp"
#include "record/keys.hpp"
#include "record/record_json.hpp"
#include "record/sighting_json.hpp"

namespace nanlocator {
namespace {

using nlohmann::ordered_json;

template <typename Value, std::size_t count>
using Names = std::array<std::pair<Value, std::string_view>, count>;

constexpr Names<VerdictStatus, 4> kStatusNames = {{{VerdictStatus::clean, "clean"},
                                                   {VerdictStatus::benign, "benign"},
                                                   {VerdictStatus::located, "located"},
                                                   {VerdictStatus::partial, "partial"}}};
constexpr Names<Confidence, 3> kConfidenceNames = {
    {{Confidence::low, "low"}, {Confidence::medium, "medium"}, {Confidence::high, "high"}}};
constexpr Names<Direction, 3> kDirectionNames = {{{Direction::forward, "forward"},
                                                  {Direction::backward, "backward"},
                                                  {Direction::none, "none"}}};
constexpr Names<Cause, 19> kCauseNames = {{{Cause::bad_weight, "bad_weight"},
                                           {Cause::bad_buffer, "bad_buffer"},
                                           {Cause::bad_input, "bad_input"},
                                           {Cause::empty_loss_mask, "empty_loss_mask"},
                                           {Cause::operator_overflow, "operator_overflow"},
                                           {Cause::operator_undefined, "operator_undefined"},
                                           {Cause::operator_bug, "operator_bug"},
                                           {Cause::memory_corruption, "memory_corruption"},
                                           {Cause::not_reproduced, "not_reproduced"},
                                           {Cause::collective_result, "collective_result"},
                                           {Cause::collective_sum, "collective_sum"},
                                           {Cause::pipeline_transfer, "pipeline_transfer"},
                                           {Cause::recompute_mismatch, "recompute_mismatch"},
                                           {Cause::optimizer_update, "optimizer_update"},
                                           {Cause::optimizer_state, "optimizer_state"},
                                           {Cause::divergence, "divergence"},
                                           {Cause::user_hook, "user_hook"},
                                           {Cause::loss_scale, "loss_scale"},
                                           {Cause::unknown, "unknown"}}};

template <typename Value, std::size_t count>
std::string_view find_name(const Names<Value, count>& names, Value value) noexcept {
  for (const auto& [candidate, name] : names) {
    if (candidate == value) return name;
  }
  return "unknown";
}

template <typename Value, std::size_t count>
Value value_from_json(const Names<Value, count>& names, const JsonObject& object, const char* key) {
  const std::string text = object.text(key);
  std::string known;
  for (const auto& [value, name] : names) {
    if (name == text) return value;
    known += (known.empty() ? "" : ", ") + std::string(name);
  }
  throw_unexpected_json(object.where(key), object.member(key), "one of " + known);
}

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
  return tensor;
}

ordered_json origin_to_json(const Origin& origin) {
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
  json[keys::kParameter] = text_or_null(origin.parameter);
  json[keys::kTensor] = origin.tensor ? tensor_to_json(*origin.tensor) : ordered_json(nullptr);
  json[keys::kCause] = name_of(origin.cause);
  json[keys::kConfidence] = name_of(origin.confidence);
  json[keys::kEvidence] = origin.evidence;
  json[keys::kRefutedBy] = origin.refutation;
  json[keys::kAction] = origin.action;
  json[keys::kBundle] = text_or_null(origin.bundle);
  json[keys::kCleanBefore] = text_or_null(origin.clean_before);
  json[keys::kCleanAfter] = text_or_null(origin.clean_after);
  return json;
}

Origin origin_from_json(const JsonObject& object) {
  const auto is_null = [&](const char* key) { return object.member(key).is_null(); };
  Origin origin;
  origin.phase = phase_from_json(object, keys::kPhase);
  if (!is_null(keys::kDirection)) {
    origin.direction = value_from_json(kDirectionNames, object, keys::kDirection);
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
  origin.cause = value_from_json(kCauseNames, object, keys::kCause);
  origin.confidence = value_from_json(kConfidenceNames, object, keys::kConfidence);
  origin.evidence = texts_from_json(object, keys::kEvidence);
  origin.refutation = object.text(keys::kRefutedBy);
  origin.action = object.text(keys::kAction);
  origin.bundle = text_or_empty(object, keys::kBundle);
  origin.clean_before = text_or_empty(object, keys::kCleanBefore);
  origin.clean_after = text_or_empty(object, keys::kCleanAfter);
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

}  // namespace

std::string_view name_of(VerdictStatus status) noexcept {
  return find_name(kStatusNames, status);
}
std::string_view name_of(Confidence confidence) noexcept {
  return find_name(kConfidenceNames, confidence);
}
std::string_view name_of(Direction direction) noexcept {
  return find_name(kDirectionNames, direction);
}
std::string_view name_of(Cause cause) noexcept {
  return find_name(kCauseNames, cause);
}

std::string to_json(const Verdict& verdict) {
  ordered_json json;
  json[keys::kVersion] = keys::kVerdictVersion;
  json[keys::kRun] = verdict.run_id;
  json[keys::kIteration] = verdict.iteration;
  json[keys::kStatus] = name_of(verdict.status);
  json[keys::kOrigins] = ordered_json::array();
  for (const Origin& origin : verdict.origins)
    json[keys::kOrigins].push_back(origin_to_json(origin));
  json[keys::kSpread] = spread_to_json(verdict.spread);
  json[keys::kClean] = verdict.clean;
  json[keys::kRerun] = {{keys::kDone, verdict.rerun.done},
                        {keys::kReproduced, value_or_null(verdict.rerun.reproduced)},
                        {keys::kNotRestored, verdict.rerun.not_restored}};
  json[keys::kSilentRanks] = verdict.silent_ranks;
  json[keys::kNotes] = verdict.notes;
  return json.dump(2, ' ', true, ordered_json::error_handler_t::replace) + "\n";
}

Verdict verdict_from_json(std::string_view text, const std::string& source) {
  const nlohmann::json json = parse_json(text, source);
  const JsonObject object(json, source);
  require_version(object, keys::kVerdictVersion);
  Verdict verdict;
  verdict.run_id = object.text(keys::kRun);
  verdict.iteration = object.integer(keys::kIteration, 0);
  verdict.status = value_from_json(kStatusNames, object, keys::kStatus);
  const auto& origins = object.member(keys::kOrigins);
  if (!origins.is_array()) {
    throw_unexpected_json(object.where(keys::kOrigins), origins, "an array of origins");
  }
  for (const auto& origin : origins) {
    std::string path = keys::kOrigins;
    path.append("[").append(std::to_string(verdict.origins.size())).append("]");
    verdict.origins.push_back(origin_from_json(JsonObject(origin, source, path)));
  }
  verdict.spread = spread_from_json(object.object(keys::kSpread));
  verdict.clean = texts_from_json(object, keys::kClean);
  verdict.rerun = rerun_from_json(object.object(keys::kRerun));
  verdict.silent_ranks = ranks_from_json(object, keys::kSilentRanks);
  verdict.notes = texts_from_json(object, keys::kNotes);
  return verdict;
}

}  // namespace nanlocator
