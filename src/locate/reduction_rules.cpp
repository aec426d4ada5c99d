#include "locate/reduction_rules.hpp"

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "locate/gradient_rules.hpp"
#include "locate/origin_facts.hpp"

namespace nanlocator::inline locate_room {
namespace {

class ReductionRules {
 public:
  explicit ReductionRules(Findings& findings) : findings_(findings) {}

  void judge_reduced() {
    std::set<ParameterKey> without_evidence;
    std::map<std::set<int>, OwnCopies> own_copies;  // by the ranks that hold them
    for (const auto& [key, bad] : findings_.in_backward_order(findings_.bad(Phase::grad_reduced))) {
      if (findings_.is_bad_in(Phase::grad_local, *key)) continue;  // received from a replica
      if (is_of_bad_reduction(*bad)) continue;
      if (is_clean_on_all_holders(*key, *bad, Phase::grad_local)) {
        add_collective_origin(*bad);
      } else if (has_clean_copy(*bad)) {
        OwnCopies& copies = own_copies[ranks_of(*bad)];
        if (copies.parameters++ == 0) copies.first = bad;
      } else {
        without_evidence.insert(*key);
      }
    }
    for (Origin& origin : collective_origins_) {
      findings_.add_origin(std::move(origin), FoundIn::late);
    }
    for (const auto& [ranks, copies] : own_copies) add_own_copies_origin(ranks, copies);
    judge_unseen_before(without_evidence, Phase::grad_reduced);
  }

  void judge_norm() {
    std::set<ParameterKey> without_evidence;
    std::vector<AfterReduction> found;
    for (const auto& [key, bad] : findings_.in_backward_order(findings_.bad(Phase::grad_norm))) {
      if (findings_.is_bad_in(Phase::grad_local, *key) ||
          findings_.is_bad_in(Phase::grad_reduced, *key)) {
        continue;
      }
      const bool was_clean = std::ranges::all_of(*bad, [&](const BadOnRank& each) {
        return was_clean_before_norm(*each.rank, each.bad->name);
      });
      if (is_of_bad_reduction(*bad)) continue;
      if (was_clean) {
        fold(found, *key, *bad);
      } else {
        without_evidence.insert(*key);
      }
    }
    for (const AfterReduction& each : found) add_norm_origin(each);
    judge_unseen_before(without_evidence, Phase::grad_norm);
  }

 private:
  /// Gradients that became bad between the reduction and the norm, and have one cause.
  struct AfterReduction {
    const ParameterKey* key = nullptr;
    const std::vector<BadOnRank>* first = nullptr;  // in backward order
    std::set<int> ranks;
    bool is_everything_bad = false;  // all gradients of these ranks
    std::int64_t parameters = 1;
  };

  /// Joins gradients that are bad on the same ranks; or on any, where all gradients of these ranks
  /// are bad, as after a multiplication by a factor that is Inf.
  static void fold(std::vector<AfterReduction>& found, const ParameterKey& key,
                   const std::vector<BadOnRank>& bad) {
    std::set<int> ranks = ranks_of(bad);
    const bool is_everything_bad = std::ranges::all_of(bad, [](const BadOnRank& each) {
      return each.rank->bad(Phase::grad_norm).size() == each.rank->scanned_count(Phase::grad_norm);
    });
    const auto known = std::ranges::find_if(found, [&](const AfterReduction& each) {
      return each.ranks == ranks || (each.is_everything_bad && is_everything_bad);
    });
    if (known == found.end()) {
      found.push_back({&key, &bad, std::move(ranks), is_everything_bad});
      return;
    }
    known->ranks.merge(ranks);
    ++known->parameters;
  }

  /// Parameters whose gradients are bad on the same ranks, while other ranks hold clean copies.
  struct OwnCopies {
    const std::vector<BadOnRank>* first = nullptr;  // in backward order
    std::int64_t parameters = 0;
  };

  /// True if the result of a reduction on these ranks is an origin already.
  bool is_of_bad_reduction(const std::vector<BadOnRank>& bad) const {
    return std::ranges::all_of(
        bad, [&](const BadOnRank& each) { return findings_.has_bad_reduction(each.rank->rank()); });
  }

  /// Not every rank reported these in the phase before. If a rank had bad weights, those are taken
  /// as the cause.
  void judge_unseen_before(const std::set<ParameterKey>& keys, Phase phase) {
    if (findings_.bad(Phase::params_before).empty()) judge_merged_gradients(findings_, keys, phase);
  }

  /// True if every rank that may hold the parameter scanned it in `phase` and found it clean.
  bool is_clean_on_all_holders(const ParameterKey& key, const std::vector<BadOnRank>& bad,
                               Phase phase) const {
    if (!findings_.incident().unplaced().empty()) return false;
    std::set<std::string_view> names;
    for (const auto& each : bad) names.insert(each.bad->name);
    return std::ranges::all_of(findings_.holders_of(key), [&](const Place* place) {
      if (findings_.is_blind(*place, phase)) return false;
      return std::ranges::all_of(names, [&](std::string_view name) {
        const auto position = place->evidence->position_of(name);
        return !position || place->evidence->status(phase, *position) == Status::clean;
      });
    });
  }

  /// True if another data-parallel rank of a bad rank's group holds the same elements, clean. An
  /// all-reduce gives all of them the same result, so the bad copy was damaged after it.
  bool has_clean_copy(const std::vector<BadOnRank>& bad) const {
    return std::ranges::all_of(bad, [&](const BadOnRank& each) {
      const RankCoordinates& own = each.rank->coordinates();
      return std::ranges::any_of(
          findings_.groups().at({own.tp.rank, own.pp.rank}), [&](const Place* place) {
            return place->evidence != nullptr &&
                   Findings::have_same_elements(*each.rank, *place->evidence, each.bad->name) &&
                   place->evidence->status(Phase::grad_reduced, each.bad->name) == Status::clean;
          });
    });
  }

  /// One cause on these ranks, however many of their gradients it spoiled.
  void add_own_copies_origin(const std::set<int>& ranks, const OwnCopies& copies) {
    if (findings_.is_full(Phase::grad_reduced)) return;
    const BadParameter& bad = *copies.first->front().bad;
    Origin origin = findings_.make_origin(Phase::grad_reduced, Cause::unknown, Confidence::medium,
                                          sorted(ranks));
    set_parameter(origin, bad.name, *bad.sighting);
    origin.direction = Direction::none;
    origin.facts.push_back({.kind = FactKind::clean_copy_after_reduction,
                            .ranks = sorted(ranks),
                            .count = copies.parameters,
                            .bad = bad_count(bad.sighting->stats)});
    findings_.add_origin(std::move(origin));
  }

  /// A fault between the same ranks affects every gradient that they reduce: the first one leads.
  void add_collective_origin(const std::vector<BadOnRank>& bad) {
    Origin origin = collective_origin_of(bad);
    const auto known = std::ranges::find_if(collective_origins_, [&](const Origin& each) {
      return each.cause == origin.cause && each.candidates == origin.candidates;
    });
    if (known == collective_origins_.end()) {
      collective_origins_.push_back(std::move(origin));
    } else {
      add_elsewhere(*known, FactKind::same_collective_elsewhere, origin.parameter);
    }
  }

  Origin collective_origin_of(const std::vector<BadOnRank>& bad) const {
    const Sighting& sighting = *bad.front().bad->sighting;
    const std::string& name = bad.front().bad->name;
    const std::set<int> ranks = ranks_of(bad);
    std::set<std::pair<int, int>> groups;  // (tp, pp) of the bad ranks
    std::set<std::string_view> names;
    for (const auto& each : bad) {
      groups.emplace(each.rank->coordinates().tp.rank, each.rank->coordinates().pp.rank);
      names.insert(each.bad->name);
    }
    std::set<int> members, clean;
    for (const auto& group : groups) {
      for (const Place* place : findings_.groups().at(group)) {
        // Tied parameters have a different name on each stage.
        const auto holds = [&](std::string_view each) {
          return place->evidence->position_of(each).has_value();
        };
        if (!std::ranges::any_of(names, holds) && !ranks.contains(place->rank)) continue;
        members.insert(place->rank);
        if (place->evidence->status(Phase::grad_reduced, name) == Status::clean &&
            std::ranges::any_of(bad, [&](const BadOnRank& each) {
              return Findings::have_same_elements(*each.rank, *place->evidence, name);
            })) {
          clean.insert(place->rank);
        }
      }
    }
    const bool is_in_shards = std::ranges::any_of(bad, [](const BadOnRank& each) {
      return each.bad->position && each.rank->parameter(*each.bad->position).shard;
    });
    const bool is_own_copy = has_clean_copy(bad);
    const bool is_alone = members.size() == 1;
    auto overflow = overflow_of_sum(findings_.incident(), sighting, sorted(members), names);
    const std::set<int>& candidates = is_own_copy || is_alone ? ranks : members;
    Origin origin = findings_.make_origin(
        Phase::grad_reduced,
        is_alone                   ? Cause::unknown
        : overflow && !is_own_copy ? Cause::collective_sum
                                   : Cause::collective_result,
        candidates.size() == 1 ? Confidence::high : Confidence::medium, sorted(candidates));
    set_parameter(origin, name, sighting);
    origin.direction = Direction::none;
    Facts& facts = origin.facts;
    facts.push_back({.kind = FactKind::clean_before_reduction,
                     .ranks = sorted(ranks),
                     .peers = sorted(members),
                     .bad = bad_count(sighting.stats)});
    if (is_alone) {
      facts.push_back({.kind = FactKind::nobody_else_holds_it});
    } else if (is_own_copy) {
      facts.push_back(
          {.kind = FactKind::own_copy_bad, .ranks = sorted(ranks), .peers = sorted(clean)});
    } else if (is_in_shards) {
      facts.push_back({.kind = FactKind::only_owner_keeps_sum, .ranks = sorted(ranks)});
    } else if (ranks == members) {
      facts.push_back({.kind = FactKind::every_member_bad});
    }
    if (overflow) facts.push_back(*std::move(overflow));
    return origin;
  }

  /// True if clean after the reduction, or before it if there is no rank to reduce with.
  bool was_clean_before_norm(const RankEvidence& rank, const std::string& name) const {
    if (rank.status(Phase::grad_reduced, name) == Status::clean) return true;
    const auto& at = rank.coordinates();
    return at.dp.size * at.cp.size == 1 && rank.status(Phase::grad_local, name) == Status::clean;
  }

  void add_norm_origin(const AfterReduction& found) {
    if (findings_.is_full(Phase::grad_norm)) return;
    const std::vector<BadOnRank>& bad = *found.first;
    const std::set<int>& ranks = found.ranks;
    std::set<int> candidates = ranks;
    const bool is_shared_further = found.key->tp == -1 || found.key->pp == -1;
    std::set<int> blind;
    if (is_shared_further) blind = findings_.blind_holders(*found.key, Phase::grad_norm);
    // What a silent rank sent may have come from anywhere in its replica.
    for (const Place& place : findings_.incident().places()) {
      if (!blind.contains(place.rank)) continue;
      for (const Place* mate : findings_.replicas().at(findings_.incident().replica_of(place))) {
        candidates.insert(mate->rank);
      }
    }
    if (is_shared_further)
      candidates.insert(findings_.incident().unplaced().begin(),
                        findings_.incident().unplaced().end());
    Origin origin = findings_.make_origin(Phase::grad_norm, Cause::unknown,
                                          !blind.empty()          ? Confidence::low
                                          : candidates.size() > 1 ? Confidence::medium
                                                                  : Confidence::high,
                                          sorted(candidates));
    set_parameter(origin, bad.front().bad->name, *bad.front().bad->sighting);
    origin.direction = Direction::none;
    origin.facts.push_back({.kind = FactKind::clean_after_reduction,
                            .ranks = sorted(ranks),
                            .count = found.parameters,
                            .bad = bad_count(bad.front().bad->sighting->stats)});
    origin.facts.push_back(
        {.kind = FactKind::between_reduction_and_norm, .other_ranks = is_shared_further});
    add_blind_evidence(origin, blind);
    findings_.add_origin(std::move(origin), FoundIn::late);
  }

  Findings& findings_;
  std::vector<Origin> collective_origins_;
};

}  // namespace

void judge_reduced_gradients(Findings& findings) {
  ReductionRules(findings).judge_reduced();
}

void judge_norm_gradients(Findings& findings) {
  ReductionRules(findings).judge_norm();
}

}  // namespace nanlocator::inline locate_room
