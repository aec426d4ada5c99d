#include "incident/findings.hpp"

#include <algorithm>
#include <array>
#include <iterator>
#include <limits>

namespace nanlocator::inline incident_room {

ParameterKey key_of(const RankEvidence& rank, const BadParameter& bad) {
  ParameterKey key{bad.name, rank.coordinates().tp.rank, rank.coordinates().pp.rank};
  if (!bad.position) return key;
  const ParameterRecord& parameter = rank.parameter(*bad.position);
  if (parameter.is_tp_duplicate) key.tp = -1;
  if (parameter.is_tied) {
    key.name.clear();
    key.pp = -1;
  }
  return key;
}

Findings::Findings(std::span<const Ledger> ledgers, int world_size)
    : incident_(ledgers, world_size), crossings_(incident_) {
  constexpr std::array kJudgedPhases = {Phase::params_before, Phase::grad_local,
                                        Phase::grad_reduced, Phase::grad_norm, Phase::params_after};
  for (const RankEvidence& rank : incident_.ranks()) {
    for (const Phase phase : kJudgedPhases) {
      for (const BadParameter& bad : rank.bad(phase)) {
        bad_[phase][key_of(rank, bad)].push_back({&rank, &bad});
        remember_order(rank, bad);
      }
    }
  }
  for (const Place& place : incident_.places()) {
    replicas_[incident_.replica_of(place)].push_back(&place);
    groups_[{place.tp, place.pp}].push_back(&place);
    if (place.evidence != nullptr) remember_bad_weights(place);
  }
}

/// A bad shard is bad on every rank that gathers it.
void Findings::remember_bad_weights(const Place& place) {
  for (const BadParameter& bad : place.evidence->bad(Phase::params_before)) {
    replicas_with_bad_weights_.insert(incident_.replica_of(place));
    for (const int rank : shard_group_of(*place.evidence, bad)) {
      if (const Place* member = incident_.place_of(rank)) {
        replicas_with_bad_weights_.insert(incident_.replica_of(*member));
      }
    }
  }
}

std::vector<int> Findings::shard_group_of(const RankEvidence& rank, const BadParameter& bad) const {
  if (!bad.position) return {};
  return rank.parameter(*bad.position).shard_group.ranks_below(incident_.world_size());
}

bool Findings::have_same_elements(const RankEvidence& rank, const RankEvidence& other,
                                  std::string_view name) {
  const auto own = rank.position_of(name), position = other.position_of(name);
  return own && position && rank.parameter(*own).shard == other.parameter(*position).shard;
}

const BadByKey& Findings::bad(Phase phase) const {
  static const BadByKey kNone;
  const auto found = bad_.find(phase);
  return found == bad_.end() ? kNone : found->second;
}

bool Findings::is_bad_in(Phase phase, const ParameterKey& key) const {
  return bad(phase).contains(key);
}

bool Findings::is_any_gradient_bad() const {
  return std::ranges::any_of(std::array{Phase::grad_local, Phase::grad_reduced, Phase::grad_norm},
                             [&](Phase phase) { return !bad(phase).empty(); });
}

bool Findings::have_only_finite_crossings(const Places& places) const {
  return incident_.unplaced().empty() && std::ranges::all_of(places, [&](const Place* place) {
           return place->evidence != nullptr && Crossings::is_watching(*place->evidence) &&
                  place->evidence->coordinates().cp.size == 1 &&
                  !crossings_.has_unseen(place->rank) &&
                  !crossings_.has_bad_activations(place->rank);
         });
}

void Findings::remember_order(const RankEvidence& rank, const BadParameter& bad) {
  Order order{std::numeric_limits<std::int64_t>::max(), 0};  // of unknown place: last
  if (bad.position) {
    const std::int64_t stage =
        std::int64_t{rank.parameter(*bad.position).chunk} * incident_.pipeline_size() +
        rank.coordinates().pp.rank;
    order = {-stage, *bad.position};
  }
  order_.try_emplace(bad.name, order);
}

std::vector<std::pair<const ParameterKey*, const std::vector<BadOnRank>*>>
Findings::in_backward_order(const BadByKey& keys) const {
  std::vector<std::pair<const ParameterKey*, const std::vector<BadOnRank>*>> ordered;
  for (const auto& [key, ranks] : keys) ordered.emplace_back(&key, &ranks);
  std::ranges::stable_sort(
      ordered, {}, [&](const auto& entry) { return order_.at(entry.second->front().bad->name); });
  return ordered;
}

std::vector<std::string> Findings::bad_parameters() const {
  std::vector<std::string> names;
  for (const auto& [name, order] : order_) names.push_back(name);
  std::ranges::stable_sort(names, {}, [&](const std::string& name) { return order_.at(name); });
  return names;
}

Places Findings::holders_of(const ParameterKey& key) const {
  Places holders;
  const auto add = [&](const Places& group) {
    holders.insert(holders.end(), group.begin(), group.end());
  };
  if (key.tp != -1 && key.pp != -1) {
    if (const auto found = groups_.find({key.tp, key.pp}); found != groups_.end()) {
      add(found->second);
    }
    return holders;
  }
  for (const auto& [where, group] : groups_) {
    const bool is_held =
        (key.tp == -1 || key.tp == where.first) && (key.pp == -1 || key.pp == where.second);
    if (is_held) add(group);
  }
  return holders;
}

bool Findings::is_blind(const Place& place, Phase phase) {
  return place.evidence == nullptr || !place.evidence->scanned(phase);
}

std::set<int> Findings::blind_holders(const ParameterKey& key, Phase phase) const {
  return blind_ranks(holders_of(key), phase);
}

bool Findings::is_anyone_blind(const Places& places, Phase phase) const {
  return !incident_.unplaced().empty() ||
         std::ranges::any_of(places, [&](const Place* place) { return is_blind(*place, phase); });
}

std::set<int> Findings::blind_ranks(const Places& places, Phase phase) const {
  std::set<int> blind(incident_.unplaced().begin(), incident_.unplaced().end());
  for (const Place* place : places) {
    if (is_blind(*place, phase)) blind.insert(place->rank);
  }
  return blind;
}

std::vector<int> sorted(const std::set<int>& ranks) {
  return {ranks.begin(), ranks.end()};
}

std::set<int> ranks_of(const std::vector<BadOnRank>& bad) {
  std::set<int> ranks;
  for (const auto& each : bad) ranks.insert(each.rank->rank());
  return ranks;
}

std::set<int> owners_of(const std::vector<BadOnRank>& bad) {
  std::set<int> owners;
  for (const BadOnRank& each : bad) {
    if (each.bad->is_owned) owners.insert(each.rank->rank());
  }
  return owners;
}

}  // namespace nanlocator::inline incident_room
