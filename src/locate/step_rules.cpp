#include "locate/step_rules.hpp"

#include <algorithm>
#include <cmath>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "locate/origin_facts.hpp"

namespace nanlocator::inline locate_room {
namespace {

class StepRules {
 public:
  explicit StepRules(Findings& findings) : findings_(findings) {}

  void judge_weights() {
    for (const auto& [key, bad] :
         findings_.in_backward_order(findings_.bad(Phase::params_before))) {
      if (findings_.is_full(Phase::params_before)) continue;
      if (!findings_.shard_group_of(*bad->front().rank, *bad->front().bad).empty()) {
        judge_weight_in_shards(*bad);
        continue;
      }
      const std::set<int> ranks = ranks_of(*bad);
      const std::set<int> blind = findings_.blind_holders(*key, Phase::params_before);
      const std::set<int> owners = owners_of(*bad);
      std::set<int> candidates = owners.empty() ? ranks : owners;
      candidates.insert(blind.begin(), blind.end());
      std::set<int> clean;
      for (const Place* place : findings_.holders_of(*key)) {
        if (place->evidence == nullptr) continue;
        if (place->evidence->status(Phase::params_before, bad->front().bad->name) ==
            Status::clean) {
          clean.insert(place->rank);
        }
      }
      Origin origin = findings_.make_origin(Phase::params_before, Cause::bad_weight,
                                            blind.empty() && candidates.size() >= ranks.size()
                                                ? Confidence::high
                                                : Confidence::medium,
                                            sorted(candidates));
      set_parameter(origin, bad->front().bad->name, *bad->front().bad->sighting);
      origin.direction = Direction::none;
      Facts& facts = origin.facts;
      facts.push_back({.kind = FactKind::parameter_bad_before,
                       .ranks = sorted(ranks),
                       .bad = bad_count(bad->front().bad->sighting->stats)});
      add_gathered_evidence(origin, owners, ranks);
      if (candidates.size() < ranks.size()) {
        facts.push_back({.kind = FactKind::owner_is_left, .ranks = sorted(owners)});
      } else if (!clean.empty()) {
        facts.push_back(
            {.kind = FactKind::copies_clean, .ranks = sorted(ranks), .peers = sorted(clean)});
      } else {
        facts.push_back(ranks.size() > 1
                            ? Fact{.kind = FactKind::every_copy_bad, .ranks = sorted(ranks)}
                            : Fact{.kind = FactKind::no_copy_elsewhere});
      }
      add_blind_evidence(origin, blind);
      findings_.add_origin(std::move(origin), FoundIn::weight);
    }
  }

  void judge_updates() {
    if (findings_.bad(Phase::params_after).empty() || findings_.is_any_gradient_bad()) return;
    if (rank_with_bad_norm() != nullptr)
      return;  // the norm explains it, and judge_norm_value reports it
    const std::set<int> unseen = ranks_without_gradients();
    for (const auto& [key, bad] : findings_.in_backward_order(findings_.bad(Phase::params_after))) {
      if (findings_.is_full(Phase::params_after)) continue;
      const std::set<int> ranks = ranks_of(*bad);
      const std::set<int> owners = owners_of(*bad);
      std::set<int> candidates = owners.empty() ? ranks : owners;
      candidates.insert(unseen.begin(), unseen.end());
      Origin origin = findings_.make_origin(
          Phase::params_after, unseen.empty() ? Cause::optimizer_update : Cause::unknown,
          unseen.empty() ? Confidence::high : Confidence::low, sorted(candidates));
      set_parameter(origin, bad->front().bad->name, *bad->front().bad->sighting);
      origin.direction = Direction::none;
      Facts& facts = origin.facts;
      facts.push_back({.kind = FactKind::parameter_bad_after,
                       .ranks = sorted(ranks),
                       .bad = bad_count(bad->front().bad->sighting->stats)});
      if (!unseen.empty()) {
        facts.push_back({.kind = FactKind::gradients_not_seen, .ranks = sorted(unseen)});
      }
      add_gathered_evidence(origin, owners, ranks);
      facts.push_back({.kind = FactKind::update_is_left, .other_ranks = owners.empty()});
      findings_.add_origin(std::move(origin));
    }
  }

  void judge_norm_value() {
    const RankEvidence* const witness = rank_with_bad_norm();
    if (witness == nullptr || findings_.is_any_gradient_bad()) return;
    double largest = -1;
    std::set<int> ranks;
    std::string parameter;
    for (const RankEvidence& rank : findings_.incident().ranks()) {
      const auto& absmax = rank.ledger().absmax;
      if (!absmax || !std::isfinite(*absmax) || *absmax < largest) continue;
      if (*absmax > largest) {
        ranks.clear();
        parameter = rank.ledger().absmax_parameter;
      }
      largest = *absmax;
      ranks.insert(rank.rank());
    }
    std::set<int> candidates = ranks;
    const std::set<int> unseen = ranks_without_gradients();
    candidates.insert(unseen.begin(), unseen.end());
    // The square of one fp32 number above sqrt(FLT_MAX) = 1.8e19 overflows. With many elements,
    // smaller ones do too, but not below 1e15: FLT_MAX / 1e30 is 3e8 elements of that size.
    const bool can_overflow = largest > 1e15;
    Origin origin = findings_.make_origin(Phase::grad_norm, Cause::unknown, Confidence::low,
                                          sorted(candidates));
    origin.direction = Direction::none;
    if (largest >= 0) origin.parameter = parameter;
    Facts& facts = origin.facts;
    facts.push_back({.kind = FactKind::norm_bad, .value = witness->ledger().gradient_norm});
    if (can_overflow) {
      facts.push_back({.kind = FactKind::norm_overflows, .value = largest});
      if (!has_history(candidates)) facts.push_back({.kind = FactKind::missing_history});
    } else if (largest >= 0) {
      facts.push_back({.kind = FactKind::norm_fits, .value = largest});
    } else {
      facts.push_back({.kind = FactKind::missing_largest});
    }
    if (!unseen.empty()) {
      facts.push_back({.kind = FactKind::gradients_not_seen, .ranks = sorted(unseen)});
    }
    findings_.add_origin(std::move(origin));
  }

  /// A bad loss with finite gradients: zero times NaN on a masked token, or a mean over no labels,
  /// whose derivative autograd takes as zero.
  void judge_losses() {
    if (findings_.is_any_gradient_bad() || !findings_.found().empty()) return;
    std::set<int> ranks;
    const Sighting* first = nullptr;
    for (const RankEvidence& rank : findings_.incident().ranks()) {
      if (rank.bad_losses().empty()) continue;
      ranks.insert(rank.rank());
      if (first == nullptr) first = rank.bad_losses().front();
    }
    if (first == nullptr) return;
    Origin origin =
        findings_.make_origin(Phase::loss, Cause::unknown, Confidence::medium, sorted(ranks));
    origin.direction = Direction::forward;
    origin.tensor = tensor_of(*first);
    origin.facts.push_back({.kind = FactKind::loss_bad_gradients_finite,
                            .ranks = sorted(ranks),
                            .bad = bad_count(first->stats)});
    findings_.add_origin(std::move(origin));
  }

 private:
  /// Each rank keeps other elements: bad ones belong to the ranks that keep them, whichever ranks
  /// gather them.
  void judge_weight_in_shards(const std::vector<BadOnRank>& bad) {
    const Sighting& sighting = *bad.front().bad->sighting;
    const std::string& name = bad.front().bad->name;
    // Gathered weights that other ranks keep (ZeRO-3's persistent parameters) are bad, too.
    const std::set<int> kept = owners_of(bad);
    const std::set<int> owners = kept.empty() ? ranks_of(bad) : kept;
    std::set<int> gathering, clean;
    for (const BadOnRank& each : bad) {
      const auto group = findings_.shard_group_of(*each.rank, *each.bad);
      gathering.insert(group.begin(), group.end());
    }
    for (const RankEvidence& rank : findings_.incident().ranks()) {
      const bool has_copy = std::ranges::any_of(bad, [&](const BadOnRank& each) {
        const auto &at = each.rank->coordinates(), &other = rank.coordinates();
        return at.tp == other.tp && at.pp == other.pp &&
               Findings::have_same_elements(*each.rank, rank, name);
      });
      if (has_copy && rank.status(Phase::params_before, name) == Status::clean) {
        clean.insert(rank.rank());
      }
    }
    Origin origin = findings_.make_origin(Phase::params_before, Cause::bad_weight, Confidence::high,
                                          sorted(owners));
    set_parameter(origin, name, sighting);
    origin.direction = Direction::none;
    origin.facts.push_back({.kind = FactKind::parameter_bad_before,
                            .ranks = sorted(owners),
                            .bad = bad_count(sighting.stats)});
    add_gathered_evidence(origin, owners, gathering);
    origin.facts.push_back(clean.empty()
                               ? Fact{.kind = FactKind::owner_is_left, .ranks = sorted(owners)}
                               : Fact{.kind = FactKind::copies_clean,
                                      .ranks = sorted(owners),
                                      .peers = sorted(clean)});
    findings_.add_origin(std::move(origin), FoundIn::weight);
  }

  bool has_history(const std::set<int>& ranks) const {
    return std::ranges::any_of(ranks, [&](int rank) {
      const RankEvidence* const evidence = findings_.incident().find(rank);
      return evidence != nullptr && evidence->ledger().history;
    });
  }

  const RankEvidence* rank_with_bad_norm() const {
    for (const RankEvidence& rank : findings_.incident().ranks()) {
      const auto& norm = rank.ledger().gradient_norm;
      if (norm && !std::isfinite(*norm)) return &rank;
    }
    return nullptr;
  }

  /// Ranks whose gradients were not seen in any phase. If theirs were bad, the norm would make
  /// every rank's parameters bad.
  std::set<int> ranks_without_gradients() const {
    std::set<int> ranks(findings_.incident().silent().begin(), findings_.incident().silent().end());
    for (const RankEvidence& rank : findings_.incident().ranks()) {
      if (!rank.scanned(Phase::grad_local) && !rank.scanned(Phase::grad_reduced) &&
          !rank.scanned(Phase::grad_norm)) {
        ranks.insert(rank.rank());
      }
    }
    return ranks;
  }

  Findings& findings_;
};

}  // namespace

void judge_weights(Findings& findings) {
  StepRules(findings).judge_weights();
}

void judge_updated_parameters(Findings& findings) {
  StepRules(findings).judge_updates();
}

void judge_norm_value(Findings& findings) {
  StepRules(findings).judge_norm_value();
}

void judge_losses(Findings& findings) {
  StepRules(findings).judge_losses();
}

}  // namespace nanlocator::inline locate_room
