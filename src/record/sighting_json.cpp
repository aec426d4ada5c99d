#include "record/sighting_json.hpp"

#include "nanlocator/error.hpp"
#include "record/keys.hpp"
#include "record/record_json.hpp"

namespace nanlocator {
namespace {

using nlohmann::ordered_json;

ordered_json crossing_to_json(const Crossing& crossing) {
  ordered_json json;
  json[keys::kGroup] = crossing.group;
  json[keys::kMembers] = rank_list_to_json(crossing.members);
  json[keys::kPeer] = value_or_null(crossing.peer);
  json[keys::kSequence] = crossing.sequence;
  return json;
}

Crossing crossing_from_json(const JsonObject& object) {
  Crossing crossing;
  crossing.group = object.text(keys::kGroup);
  crossing.members = rank_list_from_json(object, keys::kMembers);
  crossing.peer = object.optional_small_integer(keys::kPeer, 0);
  crossing.sequence = object.integer(keys::kSequence, 0);
  return crossing;
}

}  // namespace

TensorStats stats_from_json(const JsonObject& object) {
  const auto number = [&](const char* key) { return required_number(object, key); };
  TensorStats stats;
  stats.numel = object.integer(keys::kNumel, 0);
  const auto count = [&](const char* key) {
    const auto& value = object.member(key);
    const auto found = integer_within(value, 0, stats.numel);
    return found ? *found : json_integer(value, object.where(key), 0, stats.numel);
  };
  stats.nan = count(keys::kNan);
  stats.pos_inf = count(keys::kPosInf);
  stats.neg_inf = count(keys::kNegInf);
  if (stats.nan > stats.numel - stats.pos_inf ||
      stats.nan + stats.pos_inf > stats.numel - stats.neg_inf) {
    throw FormatError(object.where() + ": more NaN and Inf than the " +
                      std::to_string(stats.numel) + " elements");
  }
  stats.zeros = count(keys::kZeros);
  stats.first_bad = object.integer(keys::kFirstBad, -1);
  stats.finite_min = number(keys::kFiniteMin);
  stats.finite_max = number(keys::kFiniteMax);
  stats.absmin = number(keys::kAbsmin);
  stats.absmax = number(keys::kAbsmax);
  stats.sum_of_squares = number(keys::kSumOfSquares);
  stats.fingerprint =
      bits_from_json(object.member(keys::kFingerprint), object.where(keys::kFingerprint));
  return stats;
}

nlohmann::ordered_json stats_to_json(const TensorStats& stats) {
  ordered_json json;
  json[keys::kNumel] = stats.numel;
  json[keys::kNan] = stats.nan;
  json[keys::kPosInf] = stats.pos_inf;
  json[keys::kNegInf] = stats.neg_inf;
  json[keys::kZeros] = stats.zeros;
  json[keys::kFirstBad] = stats.first_bad;
  json[keys::kFiniteMin] = number_to_json(stats.finite_min);
  json[keys::kFiniteMax] = number_to_json(stats.finite_max);
  json[keys::kAbsmin] = number_to_json(stats.absmin);
  json[keys::kAbsmax] = number_to_json(stats.absmax);
  json[keys::kSumOfSquares] = number_to_json(stats.sum_of_squares);
  json[keys::kFingerprint] = bits_to_json(stats.fingerprint);
  return json;
}

Phase phase_from_json(const JsonObject& object, const char* key) {
  const auto phase = phase_from_name(object.text(key));
  if (!phase) {
    throw_unexpected_json(object.where(key), object.member(key),
                          "the name of a phase such as \"grad_local\"");
  }
  return *phase;
}

nlohmann::ordered_json sighting_to_json(const Sighting& sighting) {
  ordered_json json;
  json[keys::kIteration] = sighting.iteration;
  json[keys::kMicrobatch] = value_or_null(sighting.microbatch);
  json[keys::kChunk] = value_or_null(sighting.chunk);
  json[keys::kPhase] = name_of(sighting.phase);
  json[keys::kModule] = text_or_null(sighting.module);
  json[keys::kOperator] = text_or_null(sighting.op);
  json[keys::kRole] = sighting.role;
  json[keys::kParameterId] = value_or_null(sighting.parameter_id);
  json[keys::kParameter] = text_or_null(sighting.parameter);
  json[keys::kDtype] = sighting.dtype;
  json[keys::kShape] = sighting.shape;
  json[keys::kStats] = stats_to_json(sighting.stats);
  json[keys::kCrossing] =
      sighting.crossing ? crossing_to_json(*sighting.crossing) : ordered_json(nullptr);
  // A count below zero is a loss function's mistake: unknown, and no reason to lose the ledger.
  const bool has_count = sighting.valid_labels && *sighting.valid_labels >= 0;
  json[keys::kValidLabels] =
      has_count ? ordered_json(*sighting.valid_labels) : ordered_json(nullptr);
  return json;
}

Sighting sighting_from_json(const JsonObject& object) {
  Sighting sighting;
  sighting.iteration = object.integer(keys::kIteration, 0);
  sighting.microbatch = object.optional_small_integer(keys::kMicrobatch, 0);
  sighting.chunk = object.optional_small_integer(keys::kChunk, 0);
  sighting.phase = phase_from_json(object, keys::kPhase);
  sighting.module = text_or_empty(object, keys::kModule);
  sighting.op = text_or_empty(object, keys::kOperator);
  sighting.role = object.text(keys::kRole);
  sighting.parameter_id = object.optional_integer(keys::kParameterId, 0);
  sighting.parameter = text_or_empty(object, keys::kParameter);
  sighting.dtype = object.text(keys::kDtype);
  sighting.shape = sizes_from_json(object, keys::kShape);
  sighting.stats = stats_from_json(object.object(keys::kStats));
  if (!object.member(keys::kCrossing).is_null()) {
    sighting.crossing = crossing_from_json(object.object(keys::kCrossing));
  }
  sighting.valid_labels = object.optional_integer(keys::kValidLabels, 0);
  return sighting;
}

}  // namespace nanlocator
