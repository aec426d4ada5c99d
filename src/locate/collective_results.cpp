#include "locate/judges.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>

namespace nanlocator::inline locate_room {
namespace {

using ResultOf = std::map<int, const CollectiveResult*>;  // by rank

/// The largest relative difference of members' results from rounding alone: some collectives add in
/// a different order on each member.
constexpr double kRounding = 0.01;

bool are_apart(double a, double b) {
  return std::abs(a - b) > kRounding * std::max(a, b);
}

bool are_apart(const CollectiveResult& a, const CollectiveResult& b) {
  return a.zeros != b.zeros || are_apart(a.absmax, b.absmax) ||
         are_apart(a.sum_of_squares, b.sum_of_squares);
}

/// The first collective of a group whose result on the rank differed from another member's, and the
/// number of collectives compared up to it.
struct Comparison {
  std::int64_t compared = 0;
  std::vector<int> peers;  // compared with; ascending
  ResultOf first_different;
};

/// The members' results of each group, by the sequence numbers of its collectives.
class MemberResults {
 public:
  explicit MemberResults(const Incident& incident) {
    for (const RankEvidence& each : incident.ranks()) {
      for (const CollectiveResult& result : each.ledger().collective_results) {
        const std::pair group(result.crossing.group, result.crossing.members);
        by_group_[group][result.crossing.sequence][each.rank()] = &result;
      }
    }
  }

  /// By name, the groups in which `rank` can be compared. If `microbatch` is known, only its
  /// collectives and those without a microbatch count.
  [[nodiscard]] std::vector<std::pair<std::string, Comparison>> compared_with(
      int rank, std::optional<int> microbatch) const {
    std::vector<std::pair<std::string, Comparison>> all;
    for (const auto& [group, by_sequence] : by_group_) {
      Comparison comparison = compare(by_sequence, rank, microbatch);
      if (comparison.compared > 0) all.emplace_back(group.first, std::move(comparison));
    }
    return all;
  }

 private:
  using BySequence = std::map<std::int64_t, ResultOf>;

  [[nodiscard]] static Comparison compare(const BySequence& by_sequence, int rank,
                                          std::optional<int> microbatch) {
    Comparison comparison;
    std::set<int> peers;
    for (const auto& [sequence, results] : by_sequence) {
      const auto own = results.find(rank);
      if (own == results.end()) continue;
      ResultOf compared;
      bool is_different = false;
      for (const auto& [each, result] : results) {
        if (microbatch && result->microbatch && *result->microbatch != *microbatch) continue;
        compared.emplace(each, result);
        is_different |= result->fingerprint != own->second->fingerprint;
      }
      if (!compared.contains(rank) || compared.size() < 2) continue;
      ++comparison.compared;
      for (const auto& [each, result] : compared) {
        if (each != rank) peers.insert(each);
      }
      if (!is_different) continue;
      comparison.first_different = std::move(compared);
      break;
    }
    comparison.peers.assign(peers.begin(), peers.end());
    return comparison;
  }

  std::map<std::pair<std::string, RankList>, BySequence> by_group_;
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

void judge_collective_results(const Incident& incident, std::vector<Origin>& origins) {
  const MemberResults results(incident);
  for (Origin& origin : origins) {
    if (origin.candidates.size() != 1 || !is_computed(origin)) continue;
    const int rank = origin.candidates.front();
    for (const auto& [group, comparison] : results.compared_with(rank, origin.microbatch)) {
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

}  // namespace nanlocator::inline locate_room
