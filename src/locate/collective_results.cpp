#include "locate/collective_results.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>

namespace nanlocator {
namespace {

using ResultOf = std::map<int, const CollectiveResult*>;  // by rank

/// How far members' results may be apart by rounding alone: some collectives add in an order of
/// each member's own.
constexpr double kRounding = 0.01;

bool are_apart(double a, double b) {
  return std::abs(a - b) > kRounding * std::max(a, b);
}

bool are_apart(const CollectiveResult& a, const CollectiveResult& b) {
  return a.zeros != b.zeros || are_apart(a.absmax, b.absmax) ||
         are_apart(a.sum_of_squares, b.sum_of_squares);
}

/// The first collective of a group in which the rank got something else than another member, and
/// how many were compared up to it.
struct Comparison {
  std::int64_t compared = 0;
  std::vector<int> peers;  // with whom; ascending
  ResultOf first_different;
};

class Comparisons {
 public:
  Comparisons(const Incident& incident, const Origin& origin) : rank_(origin.candidates.front()) {
    for (const RankEvidence& each : incident.ranks()) {
      for (const CollectiveResult& result : each.ledger().collective_results) {
        const bool is_same_microbatch =
            !origin.microbatch || !result.microbatch || *origin.microbatch == *result.microbatch;
        if (!is_same_microbatch || result.crossing.peer) continue;
        const auto group = std::pair(result.crossing.group, result.crossing.members);
        by_group_[group][result.crossing.sequence][each.rank()] = &result;
      }
    }
  }

  [[nodiscard]] std::vector<std::pair<std::string, Comparison>> run() const {
    std::vector<std::pair<std::string, Comparison>> all;
    for (const auto& [group, results] : by_group_) {
      Comparison comparison = compare(results);
      if (comparison.compared > 0) all.emplace_back(group.first, std::move(comparison));
    }
    return all;
  }

 private:
  [[nodiscard]] Comparison compare(const std::map<std::int64_t, ResultOf>& by_sequence) const {
    Comparison comparison;
    std::set<int> peers;
    for (const auto& [sequence, results] : by_sequence) {
      const auto own = results.find(rank_);
      if (own == results.end() || results.size() < 2) continue;
      ++comparison.compared;
      bool is_different = false;
      for (const auto& [rank, result] : results) {
        if (rank == rank_) continue;
        peers.insert(rank);
        is_different |= result->fingerprint != own->second->fingerprint;
      }
      if (!is_different) continue;
      comparison.first_different = results;
      break;
    }
    comparison.peers.assign(peers.begin(), peers.end());
    return comparison;
  }

  int rank_;
  std::map<std::pair<std::string, RankList>, std::map<std::int64_t, ResultOf>> by_group_;
};

Fact fact_of_difference(int rank, const std::string& group, const ResultOf& results) {
  const CollectiveResult& own = *results.at(rank);
  Fact fact{.kind = FactKind::members_got_other_bits,
            .phase = own.phase,
            .microbatch = own.microbatch,
            .count = own.zeros,
            .value = own.absmax,
            .module = own.module,
            .op = own.op,
            .group = group};
  for (const auto& [each, result] : results) {
    if (result->fingerprint == own.fingerprint) {
      fact.ranks.push_back(each);
      continue;
    }
    fact.peers.push_back(each);
    fact.last_value = std::max(result->absmax, fact.last_value.value_or(0));
    fact.of = std::max(result->zeros, fact.of.value_or(0));
    if (are_apart(*result, own)) fact.kind = FactKind::members_got_other_values;
  }
  return fact;
}

bool is_computed(const Origin& origin) {
  return has_fact(origin.facts, FactKind::made_from_finite) ||
         has_fact(origin.facts, FactKind::made_from_inf);
}

}  // namespace

void compare_collective_results(const Incident& incident, std::vector<Origin>& origins) {
  for (Origin& origin : origins) {
    if (origin.candidates.size() != 1 || !is_computed(origin)) continue;
    const int rank = origin.candidates.front();
    for (const auto& [group, comparison] : Comparisons(incident, origin).run()) {
      Fact fact = comparison.first_different.empty()
                      ? Fact{.kind = FactKind::members_got_the_same,
                             .ranks = {rank},
                             .peers = comparison.peers,
                             .microbatch = origin.microbatch,
                             .count = comparison.compared,
                             .group = group}
                      : fact_of_difference(rank, group, comparison.first_different);
      if (fact.kind == FactKind::members_got_other_values) {
        origin.cause = Cause::collective_result;
        origin.detail = Detail::none;
      }
      origin.facts.insert(origin.facts.begin() + 1, std::move(fact));
    }
  }
}

}  // namespace nanlocator
