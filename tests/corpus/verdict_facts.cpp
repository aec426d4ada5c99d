#include "corpus/verdict_facts.hpp"

#include <algorithm>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "nanlocator/map/rank_coordinates.hpp"

namespace nanlocator::corpus {
namespace {

using nlohmann::ordered_json;

template <typename Value>
void add(ordered_json& json, const char* key, const Value& value) {
  if constexpr (HasNames<Value>) {
    json[key] = name_of(value);
  } else if (value != Value()) {
    json[key] = value;
  }
}

/// A known value is written, even false or 0.
template <typename Value>
void add(ordered_json& json, const char* key, const std::optional<Value>& value) {
  if (!value) return;
  if constexpr (HasNames<Value>) {
    json[key] = name_of(*value);
  } else {
    json[key] = *value;
  }
}

ordered_json sorted_kinds(const Facts& facts) {
  std::vector<std::string_view> kinds;
  for (const Fact& fact : facts) kinds.push_back(name_of(fact.kind));
  std::ranges::sort(kinds);
  return kinds;
}

std::string last_part(const std::string& path) {
  return path.substr(path.rfind('/') + 1);
}

ordered_json facts_of(const OriginTensor& tensor) {
  ordered_json json = {{"role", tensor.role.text()}};
  add(json, "nan", tensor.nan);
  add(json, "inf", tensor.pos_inf + tensor.neg_inf);
  add(json, "first_bad", tensor.first_bad);
  return json;
}

ordered_json facts_of(const Origin& origin) {
  ordered_json json;
  add(json, "phase", origin.phase);
  add(json, "direction", origin.direction);
  add(json, "iteration", origin.iteration);
  add(json, "microbatch", origin.microbatch);
  add(json, "chunk", origin.chunk);
  if (origin.coordinates) json["rank"] = origin.coordinates->rank;
  add(json, "candidates", describe_ranks(origin.candidates));
  add(json, "is_on_every_candidate", origin.is_on_every_candidate);
  add(json, "data_parallel_replica", origin.data_parallel_replica);
  add(json, "module", origin.module);
  add(json, "operator", origin.op);
  add(json, "forward_operator", origin.forward_op);
  add(json, "custom_function", origin.custom_function);
  add(json, "parameter", origin.parameter);
  if (origin.code) {
    json["code"] = last_part(origin.code->file) + ":" + std::to_string(origin.code->line);
  }
  if (origin.tensor) json["tensor"] = facts_of(*origin.tensor);
  add(json, "cause", origin.cause);
  if (origin.detail != Detail::none) add(json, "detail", origin.detail);
  add(json, "owner", origin.owner);
  add(json, "place_confidence", origin.place_confidence);
  add(json, "cause_confidence", origin.cause_confidence);
  for (const Suspect suspect : origin.alternatives)
    json["alternatives"].push_back(name_of(suspect));
  json["facts"] = sorted_kinds(origin.facts);
  add(json, "refutation", origin.refutation);
  add(json, "action", origin.action);
  add(json, "bundle", origin.bundle);
  add(json, "clean_before", origin.clean_before);
  add(json, "clean_after", origin.clean_after);
  return json;
}

ordered_json facts_of(const Spread& spread) {
  ordered_json json = {{"ranks", describe_ranks(spread.ranks)},
                       {"parameters", spread.parameters.size()}};
  add(json, "first_seen", spread.first_seen);
  return json;
}

ordered_json facts_of(const RerunOutcome& rerun) {
  ordered_json json = {{"done", rerun.done}};
  add(json, "reproduced", rerun.reproduced);
  add(json, "not_restored", rerun.not_restored.size());
  for (const VariantOutcome& each : rerun.variants) {
    json["variants"].push_back(std::string(name_of(each.variant)) +
                               (each.is_bad ? ": bad" : ": finite"));
  }
  return json;
}

ordered_json facts_of(const JobState& job) {
  ordered_json json;
  add(json, "on_bad", job.on_bad);
  add(json, "weights_updated", job.are_weights_updated);
  add(json, "framework_skips_update", job.framework_skips_update);
  add(json, "weights_finite", job.are_weights_finite);
  add(json, "restart", job.restart);
  add(json, "restart_before", job.restart_before);
  return json;
}

ordered_json facts_of(const JobDecision& decision) {
  ordered_json json;
  add(json, "kind", decision.kind);
  add(json, "origin", decision.origin);
  add(json, "traced", decision.is_traced);
  add(json, "ranks", describe_ranks(decision.ranks));
  add(json, "newest_step", decision.newest_step);
  add(json, "check_first", decision.is_to_check);
  add(json, "page", decision.page);
  add(json, "ticket", decision.ticket);
  return json;
}

}  // namespace

ordered_json facts_of(const Verdict& verdict) {
  ordered_json json;
  add(json, "status", verdict.status);
  add(json, "iteration", verdict.iteration);
  json["origins"] = ordered_json::array();
  for (const Origin& origin : verdict.origins) json["origins"].push_back(facts_of(origin));
  json["spread"] = facts_of(verdict.spread);
  json["rerun"] = facts_of(verdict.rerun);
  json["job"] = facts_of(verdict.job);
  json["decision"] = facts_of(verdict.decision);
  add(json, "silent_ranks", describe_ranks(verdict.silent_ranks));
  add(json, "notes", verdict.notes.size());
  if (!verdict.facts.empty()) json["facts"] = sorted_kinds(verdict.facts);
  return json;
}

}  // namespace nanlocator::corpus
