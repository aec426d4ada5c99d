#include "locate/weight_copies.hpp"

#include <algorithm>

namespace nanlocator {
namespace {

bool is_known(const Origin& origin) {
  return has_fact(origin.facts, FactKind::copies_clean) ||
         has_fact(origin.facts, FactKind::every_copy_bad) ||
         has_fact(origin.facts, FactKind::no_copy_elsewhere) ||
         has_fact(origin.facts, FactKind::owner_is_left);
}

Fact fact_of_copies(const Findings& findings, const RankEvidence& rank, const Origin& origin,
                    std::size_t position) {
  BadParameter bad;
  bad.name = origin.parameter;
  bad.position = position;
  Fact clean{.kind = FactKind::copies_clean, .ranks = origin.candidates};
  Fact same{.kind = FactKind::every_copy_bad, .ranks = origin.candidates};
  Fact unknown{.kind = FactKind::copies_not_scanned};
  for (const Place* place : findings.holders_of(key_of(rank, bad))) {
    if (std::ranges::binary_search(origin.candidates, place->rank)) continue;
    switch (place->evidence == nullptr
                ? Status::unknown
                : place->evidence->status(Phase::params_before, origin.parameter)) {
      case Status::clean:
        clean.peers.push_back(place->rank);
        break;
      case Status::bad:
        same.ranks.push_back(place->rank);
        break;
      case Status::unknown:
        unknown.ranks.push_back(place->rank);
        break;
    }
  }
  if (!clean.peers.empty()) return clean;
  std::ranges::sort(same.ranks);
  if (same.ranks.size() > 1) return same;
  return unknown.ranks.empty() ? Fact{.kind = FactKind::no_copy_elsewhere} : unknown;
}

}  // namespace

void judge_copies(const Findings& findings, std::vector<Origin>& origins) {
  for (Origin& origin : origins) {
    if (origin.cause != Cause::bad_weight || origin.candidates.empty() || is_known(origin))
      continue;
    const RankEvidence* const rank = findings.incident().find(origin.candidates.front());
    const auto position = rank == nullptr ? std::nullopt : rank->position_of(origin.parameter);
    // Of a parameter in shards the others hold other elements.
    if (!position || rank->parameter(*position).shard) continue;
    origin.facts.push_back(fact_of_copies(findings, *rank, origin, *position));
  }
}

}  // namespace nanlocator
