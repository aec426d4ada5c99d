// Sources among weights and among gradients after backward. Edges: a reduction, from a gradient of
// any member to its sum on all; what the optimizer reads, from that sum; the update, from any
// gradient or their norm to every weight.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "locate/events/events.hpp"
#include "locate/make_origin.hpp"
#include "locate/origin_facts.hpp"

namespace nanlocator::inline locate_room::events {
namespace {

using BadList = std::vector<BadOnRank>;

// ---- weights ----

/// Ranks of the same part of the model that hold the same elements of it, finite.
std::set<int> ranks_with_clean_copies(const Findings& seen, const BadList& bad, Phase phase) {
  const std::string& name = bad.front().bad->name;
  std::map<std::pair<int, int>, BadList> by_part;  // tp, pp; one for each shard
  for (const BadOnRank& each : bad) {
    const auto& at = each.rank->coordinates();
    BadList& known = by_part[{at.tp.rank, at.pp.rank}];
    const bool is_new = std::ranges::none_of(known, [&](const BadOnRank& other) {
      return Findings::have_same_elements(*each.rank, *other.rank, name);
    });
    if (is_new) known.push_back(each);
  }
  std::set<int> clean;
  for (const auto& [part, shards] : by_part) {
    for (const Place* place : seen.groups().at(part)) {
      if (place->evidence == nullptr || place->evidence->status(phase, name) != Status::clean)
        continue;
      const bool is_copy = std::ranges::any_of(shards, [&](const BadOnRank& each) {
        return Findings::have_same_elements(*each.rank, *place->evidence, name);
      });
      if (is_copy) clean.insert(place->rank);
    }
  }
  return clean;
}

Origin origin_on(const Findings& seen, Phase phase, Cause cause, Confidence confidence,
                 const std::set<int>& candidates, const BadList& bad) {
  Origin origin = make_origin(seen.incident(), phase, cause, confidence, sorted(candidates));
  set_parameter(origin, bad.front().bad->name, *bad.front().bad->sighting);
  origin.direction = Direction::none;
  return origin;
}

/// That the others received it from its owners, if it has owners.
void add_gathered(Origin& origin, const std::set<int>& owners, const std::set<int>& ranks) {
  std::set<int> receivers;
  std::ranges::set_difference(ranks, owners, std::inserter(receivers, receivers.end()));
  if (owners.empty() || receivers.empty()) return;
  origin.facts.push_back(
      {.kind = FactKind::gathered_from_owner, .ranks = sorted(owners), .peers = sorted(receivers)});
}

/// Names the ranks that could have said more, if any.
void add_blind(Origin& origin, const std::set<int>& blind) {
  if (blind.empty()) return;
  origin.facts.push_back({.kind = FactKind::silent_here, .ranks = sorted(blind)});
}

/// Other copies of a weight, for which every rank scanned all of its elements.
std::set<int> ranks_with_clean_weight(const Findings& seen, const ParameterKey& key,
                                      const std::string& name) {
  std::set<int> clean;
  for (const Place* place : seen.holders_of(key)) {
    const RankEvidence* const rank = place->evidence;
    if (rank == nullptr || rank->status(Phase::params_before, name) != Status::clean) continue;
    clean.insert(place->rank);
  }
  return clean;
}

Source weight_source(const Findings& seen, const ParameterKey& key, const BadList& bad) {
  const std::set<int> owners = owners_of(bad);
  std::set<int> ranks = ranks_of(bad), gathering, blind;
  for (const BadOnRank& each : bad) {
    const auto group = seen.shard_group_of(*each.rank, *each.bad);
    gathering.insert(group.begin(), group.end());
  }
  const bool is_sharded = !gathering.empty();
  // What a rank gathers of a weight that others keep is bad, too.
  if (is_sharded && !owners.empty()) ranks = owners;
  if (!is_sharded) blind = seen.blind_holders(key, Phase::params_before);
  const std::set<int>& makers = owners.empty() ? ranks : owners;
  const std::set<int> clean = is_sharded
                                  ? ranks_with_clean_copies(seen, bad, Phase::params_before)
                                  : ranks_with_clean_weight(seen, key, bad.front().bad->name);
  const bool is_left = makers.size() < ranks.size();
  std::set<int> candidates = makers;
  candidates.insert(blind.begin(), blind.end());
  Origin origin =
      origin_on(seen, Phase::params_before, Cause::bad_weight,
                blind.empty() && !is_left ? Confidence::high : Confidence::medium, candidates, bad);
  Facts& facts = origin.facts;
  facts.push_back({.kind = FactKind::parameter_bad_before,
                   .ranks = sorted(ranks),
                   .bad = bad_count(bad.front().bad->sighting->stats)});
  add_gathered(origin, is_sharded ? makers : owners, is_sharded ? gathering : ranks);
  if (is_left || (is_sharded && clean.empty())) {
    facts.push_back({.kind = FactKind::owner_is_left, .ranks = sorted(makers)});
  } else if (!clean.empty()) {
    facts.push_back(
        {.kind = FactKind::copies_clean, .ranks = sorted(ranks), .peers = sorted(clean)});
  } else if (ranks.size() > 1) {
    facts.push_back({.kind = FactKind::every_copy_bad, .ranks = sorted(ranks)});
  } else {
    facts.push_back({.kind = FactKind::no_copy_elsewhere});
  }
  add_blind(origin, blind);
  return {.origin = std::move(origin), .site = Site::weight};
}

// ---- gradients after their reduction ----

class Reductions {
 public:
  Reductions(const Findings& seen, const Crossed& crossed, Sources& sources)
      : seen_(seen), crossed_(crossed), sources_(sources) {}

  void run() {
    add_reduced();
    add_read();
  }

 private:
  bool is_bad(const ParameterKey& key, Phase phase) const { return seen_.is_bad_in(phase, key); }

  /// The result of a reduction on these ranks is a source among the crossings.
  bool has_crossed(const BadList& bad) const {
    return std::ranges::all_of(bad, [&](const BadOnRank& each) {
      return crossed_.badly_reduced.contains(each.rank->rank());
    });
  }

  /// Every rank that may hold it scanned it, and found it finite.
  bool are_inputs_finite(const ParameterKey& key, const BadList& bad) const {
    if (!seen_.incident().unplaced().empty()) return false;
    std::set<std::string_view> names;  // tied parameters have one on each stage
    for (const BadOnRank& each : bad) names.insert(each.bad->name);
    return std::ranges::all_of(seen_.holders_of(key), [&](const Place* place) {
      return !Findings::is_blind(*place, Phase::grad_local) &&
             std::ranges::all_of(names, [&](std::string_view name) {
               return !place->evidence->position_of(name) ||
                      place->evidence->status(Phase::grad_local, name) == Status::clean;
             });
    });
  }

  /// An all-reduce gives all of them the same: a copy that alone is bad was damaged after it.
  bool is_own_copy(const BadList& bad) const {
    return std::ranges::all_of(bad, [&](const BadOnRank& each) {
      return !ranks_with_clean_copies(seen_, {each}, Phase::grad_reduced).empty();
    });
  }

  /// The ranks that add up the gradient.
  RankList reducing(const BadOnRank& each) const {
    const auto group = seen_.shard_group_of(*each.rank, *each.bad);
    if (!group.empty()) return group;
    const auto& at = each.rank->coordinates();
    std::vector<int> ranks;
    for (const Place* place : seen_.groups().at({at.tp.rank, at.pp.rank})) {
      ranks.push_back(place->rank);
    }
    return ranks;
  }

  /// The ranks scanned what they got out of the reductions in its group, and it was finite.
  bool was_finite_on_arrival(const BadList& bad) const {
    return std::ranges::all_of(bad, [&](const BadOnRank& each) {
      const Ledger& ledger = each.rank->ledger();
      const RankList members = reducing(each);
      return ledger.is_complete &&
             std::ranges::any_of(ledger.crossings, [&](const CrossingCoverage& group) {
               return group.watches_gradients && group.is_whole() && group.members == members;
             });
    });
  }

  void add_reduced() {
    std::map<ParameterKey, const BadList*> unknown;  // before the reduction
    std::vector<Origin> sums;
    std::map<std::set<int>, std::pair<const BadList*, std::int64_t>> copies;  // first, count
    for (const auto& [key, bad] : seen_.in_backward_order(seen_.bad(Phase::grad_reduced))) {
      if (is_bad(*key, Phase::grad_local) || has_crossed(*bad)) continue;
      if (was_finite_on_arrival(*bad)) {
        read_bad(*key, *bad, Phase::grad_reduced);
      } else if (are_inputs_finite(*key, *bad)) {
        fold(sums, sum_of(*bad));
      } else if (is_own_copy(*bad)) {
        auto& [first, count] = copies.try_emplace(ranks_of(*bad), bad, 0).first->second;
        ++count;
      } else {
        unknown.emplace(*key, bad);
      }
    }
    fold_own_sums(unknown, sums);
    for (Origin& origin : sums) sources_.add({.origin = std::move(origin), .since = Part::late});
    for (const auto& [ranks, found] : copies) {
      const auto& [bad, count] = found;
      Origin origin =
          origin_on(seen_, Phase::grad_reduced, Cause::unknown, Confidence::medium, ranks, *bad);
      origin.facts.push_back({.kind = FactKind::clean_copy_after_reduction,
                              .ranks = sorted(ranks),
                              .count = count,
                              .bad = bad_count(bad->front().bad->sighting->stats)});
      sources_.add({.origin = std::move(origin)});
    }
    std::set<ParameterKey> keys;
    for (const auto& [key, bad] : unknown) keys.insert(key);
    add_shared_gradients(seen_, crossed_, keys, Phase::grad_reduced, sources_);
  }

  /// Takes what a reduction of the program's own made: where it overflowed in one gradient, Inf in
  /// another one of the same ranks is its, too.
  void fold_own_sums(std::map<ParameterKey, const BadList*>& unknown,
                     std::vector<Origin>& sums) const {
    std::map<std::set<int>, Origin> overflowed;
    for (const auto& [key, bad] : unknown) {
      if (auto sum = own_sum_of(key, *bad)) overflowed.try_emplace(ranks_of(*bad), *std::move(sum));
    }
    std::erase_if(unknown, [&](const auto& entry) {
      const BadList& bad = *entry.second;
      const auto found = overflowed.find(ranks_of(bad));
      const Sighting& sighting = *bad.front().bad->sighting;
      if (found == overflowed.end() || sighting.stats.nan > 0) return false;
      Origin& sum = found->second;
      if (sum.parameter != sighting.parameter) {
        add_elsewhere(sum, FactKind::same_collective_elsewhere, sighting.parameter);
      }
      return true;
    });
    for (auto& [ranks, sum] : overflowed) sums.push_back(std::move(sum));
  }

  /// A fault between the same ranks is in every gradient that they reduce: the first leads.
  static void fold(std::vector<Origin>& sums, Origin origin) {
    const auto same = std::ranges::find_if(sums, [&](const Origin& each) {
      return each.cause == origin.cause && each.candidates == origin.candidates;
    });
    if (same == sums.end()) {
      sums.push_back(std::move(origin));
    } else {
      add_elsewhere(*same, FactKind::same_collective_elsewhere, origin.parameter);
    }
  }

  /// A reduction of the program's own overflowed, if the re-run, which left it out, came to finite
  /// gradients.
  std::optional<Origin> own_sum_of(const ParameterKey& key, const BadList& bad) const {
    std::set<std::string_view> names;
    for (const BadOnRank& each : bad) names.insert(each.bad->name);
    std::set<int> members;
    for (const Place* place : seen_.holders_of(key)) {
      if (place->evidence == nullptr) return std::nullopt;
      const auto& rerun = place->evidence->ledger().rerun;
      if (!rerun || !rerun->without_reduction || rerun->reproduced != false) return std::nullopt;
      members.insert(place->rank);
    }
    const Sighting& sighting = *bad.front().bad->sighting;
    auto overflow = overflow_of_sum(seen_.incident(), sighting, sorted(members), names);
    if (members.size() < 2 || !overflow) return std::nullopt;
    Origin origin = origin_on(seen_, Phase::grad_reduced, Cause::collective_sum, Confidence::medium,
                              members, bad);
    origin.is_on_every_candidate = ranks_of(bad) == members;
    origin.facts.push_back(*std::move(overflow));
    return origin;
  }

  Origin sum_of(const BadList& bad) const {
    const Sighting& sighting = *bad.front().bad->sighting;
    const std::set<int> ranks = ranks_of(bad);
    std::set<std::string_view> names;
    std::set<int> members;
    for (const BadOnRank& each : bad) names.insert(each.bad->name);
    for (const BadOnRank& each : bad) {
      const auto& at = each.rank->coordinates();
      for (const Place* place : seen_.groups().at({at.tp.rank, at.pp.rank})) {
        const bool holds = std::ranges::any_of(names, [&](std::string_view name) {
          return place->evidence->position_of(name).has_value();
        });
        if (holds || ranks.contains(place->rank)) members.insert(place->rank);
      }
    }
    const bool is_in_shards = std::ranges::any_of(bad, [](const BadOnRank& each) {
      return each.bad->position && each.rank->parameter(*each.bad->position).shard;
    });
    const bool is_alone = members.size() == 1, is_copy = is_own_copy(bad);
    auto overflow = overflow_of_sum(seen_.incident(), sighting, sorted(members), names);
    const std::set<int>& candidates = is_copy || is_alone ? ranks : members;
    Origin origin =
        origin_on(seen_, Phase::grad_reduced,
                  is_alone               ? Cause::unknown
                  : overflow && !is_copy ? Cause::collective_sum
                                         : Cause::collective_result,
                  candidates.size() == 1 ? Confidence::high : Confidence::medium, candidates, bad);
    origin.is_on_every_candidate = origin.cause == Cause::collective_sum && ranks == candidates;
    Facts& facts = origin.facts;
    facts.push_back({.kind = FactKind::clean_before_reduction,
                     .ranks = sorted(ranks),
                     .peers = sorted(members),
                     .bad = bad_count(sighting.stats)});
    if (is_alone) {
      facts.push_back({.kind = FactKind::nobody_else_holds_it});
    } else if (is_copy) {
      facts.push_back({.kind = FactKind::own_copy_bad,
                       .ranks = sorted(ranks),
                       .peers = sorted(ranks_with_clean_copies(seen_, bad, Phase::grad_reduced))});
    } else if (is_in_shards) {
      facts.push_back({.kind = FactKind::only_owner_keeps_sum, .ranks = sorted(ranks)});
    } else if (ranks == members) {
      facts.push_back({.kind = FactKind::every_member_bad});
    }
    if (overflow) facts.push_back(*std::move(overflow));
    if (origin.cause == Cause::collective_result) {
      facts.push_back({.kind = FactKind::not_seen_on_arrival});
    }
    return origin;
  }

  // ---- as the optimizer reads them ----

  struct Read {
    const ParameterKey* key = nullptr;
    const BadList* first = nullptr;
    std::set<int> ranks;
    bool is_everything = false;  // all gradients of these ranks, as a factor that is Inf makes them
    std::int64_t parameters = 0;
  };

  void read_bad(const ParameterKey& key, const BadList& bad, Phase phase) {
    Read read{&key, &bad, ranks_of(bad), std::ranges::all_of(bad, [&](const BadOnRank& each) {
                return each.rank->bad(phase).size() == each.rank->scanned_count(phase);
              })};
    auto same = std::ranges::find_if(read_, [&](const Read& each) {
      return each.ranks == read.ranks || (each.is_everything && read.is_everything);
    });
    if (same == read_.end()) same = read_.insert(read_.end(), read);
    same->ranks.merge(read.ranks);
    ++same->parameters;
  }

  void add_read() {
    std::set<ParameterKey> unknown;
    for (const auto& [key, bad] : seen_.in_backward_order(seen_.bad(Phase::grad_norm))) {
      if (is_bad(*key, Phase::grad_local) || is_bad(*key, Phase::grad_reduced)) continue;
      if (has_crossed(*bad)) continue;
      if (!std::ranges::all_of(*bad, was_finite_before)) {
        unknown.insert(*key);
        continue;
      }
      read_bad(*key, *bad, Phase::grad_norm);
    }
    for (const Read& each : read_) add_read(each);
    add_shared_gradients(seen_, crossed_, unknown, Phase::grad_norm, sources_);
  }

  /// After the reduction, or before it if there is no rank to reduce with.
  static bool was_finite_before(const BadOnRank& each) {
    const auto& at = each.rank->coordinates();
    return each.rank->status(Phase::grad_reduced, each.bad->name) == Status::clean ||
           (at.dp.size * at.cp.size == 1 &&
            each.rank->status(Phase::grad_local, each.bad->name) == Status::clean);
  }

  void add_read(const Read& read) {
    const Incident& incident = seen_.incident();
    // Duplicates and tied parameters are summed once more in between.
    const bool is_shared = read.key->tp == -1 || read.key->pp == -1;
    const std::set<int> blind =
        is_shared ? seen_.blind_holders(*read.key, Phase::grad_norm) : std::set<int>{};
    std::set<int> candidates = read.ranks;
    for (const int rank : blind) {
      candidates.insert(rank);
      const Place* const place = incident.place_of(rank);
      if (place == nullptr) continue;
      for (const Place* mate : seen_.replicas().at(incident.replica_of(*place))) {
        candidates.insert(mate->rank);
      }
    }
    Origin origin = origin_on(seen_, Phase::grad_norm, Cause::unknown,
                              !blind.empty()          ? Confidence::low
                              : candidates.size() > 1 ? Confidence::medium
                                                      : Confidence::high,
                              candidates, *read.first);
    origin.facts.push_back({.kind = FactKind::clean_after_reduction,
                            .ranks = sorted(read.ranks),
                            .count = read.parameters,
                            .bad = bad_count(read.first->front().bad->sighting->stats)});
    origin.facts.push_back(
        {.kind = FactKind::between_reduction_and_norm, .other_ranks = is_shared});
    add_blind(origin, blind);
    sources_.add({.origin = std::move(origin), .since = Part::late});
  }

  const Findings& seen_;
  const Crossed& crossed_;
  Sources& sources_;
  std::vector<Read> read_;
};

// ---- the update ----

const RankEvidence* rank_with_bad_norm(const Incident& incident) {
  const auto found = std::ranges::find_if(incident.ranks(), [](const RankEvidence& rank) {
    const auto& norm = rank.ledger().gradient_norm;
    return norm && !std::isfinite(*norm);
  });
  return found != incident.ranks().end() ? &*found : nullptr;
}

/// True if a re-run saw what made gradients bad which the first pass did not come to scan, as an
/// error ended its backward: the norm follows from them.
bool is_norm_explained(const RankEvidence& witness) {
  return std::ranges::any_of(witness.ledger().births, [](const Birth& birth) {
    return std::ranges::count(birth.reached, ReachedKind::parameter, &Reached::kind) > 0;
  });
}

/// Unknown events that the norm and every update depend on.
std::set<int> ranks_without_gradients(const Incident& incident) {
  std::set<int> ranks(incident.silent().begin(), incident.silent().end());
  for (const RankEvidence& rank : incident.ranks()) {
    if (!rank.scanned(Phase::grad_local) && !rank.scanned(Phase::grad_reduced) &&
        !rank.scanned(Phase::grad_norm)) {
      ranks.insert(rank.rank());
    }
  }
  return ranks;
}

void add_unknown_gradients(Origin& origin, const std::set<int>& unknown) {
  if (unknown.empty()) return;
  origin.facts.push_back({.kind = FactKind::gradients_not_seen, .ranks = sorted(unknown)});
}

void add_norm(const Incident& incident, const RankEvidence& witness, Sources& sources) {
  double largest = -1;
  std::set<int> candidates = ranks_without_gradients(incident);
  std::set<int> ranks;
  std::string parameter;
  for (const RankEvidence& rank : incident.ranks()) {
    const double absmax = rank.ledger().absmax.value_or(-1);
    if (absmax < 0 || !std::isfinite(absmax) || absmax < largest) continue;
    if (absmax > largest) {
      ranks.clear();
      parameter = rank.ledger().absmax_parameter;
    }
    largest = absmax;
    ranks.insert(rank.rank());
  }
  const std::set<int> unknown = candidates;
  candidates.merge(ranks);
  Origin origin =
      make_origin(incident, Phase::grad_norm, Cause::unknown, Confidence::low, sorted(candidates));
  origin.direction = Direction::none;
  origin.parameter = parameter;
  Facts& facts = origin.facts;
  facts.push_back({.kind = FactKind::norm_bad, .value = witness.ledger().gradient_norm});
  // fp32 cannot hold the square of 1.8e19, nor the sum of 3e8 squares of 1e15.
  if (largest > 1e15) {
    facts.push_back({.kind = FactKind::norm_overflows, .value = largest});
    const bool has_history = std::ranges::any_of(candidates, [&](int rank) {
      const RankEvidence* const evidence = incident.find(rank);
      return evidence != nullptr && evidence->ledger().history;
    });
    if (!has_history) facts.push_back({.kind = FactKind::missing_history});
  } else if (largest >= 0) {
    facts.push_back({.kind = FactKind::norm_fits, .value = largest});
  } else {
    facts.push_back({.kind = FactKind::missing_largest});
  }
  add_unknown_gradients(origin, unknown);
  sources.add({.origin = std::move(origin), .since = Part::late});
}

/// One update made the weights bad that are bad on the same ranks, and so did a learning rate that
/// is NaN all of them on all ranks.
struct Updated {
  const BadList* first = nullptr;
  std::set<int> ranks, owners;
  bool is_everything = false;  // all weights of these ranks
  std::vector<std::string> others{};
};

bool is_every_weight_bad(const BadOnRank& each) {
  return each.rank->bad(Phase::params_after).size() ==
         each.rank->scanned_count(Phase::params_after);
}

std::vector<Updated> updated_weights(const Findings& seen) {
  std::vector<Updated> found;
  for (const auto& [key, bad] : seen.in_backward_order(seen.bad(Phase::params_after))) {
    Updated updated{bad, ranks_of(*bad), owners_of(*bad),
                    std::ranges::all_of(*bad, is_every_weight_bad)};
    const auto same = std::ranges::find_if(found, [&](const Updated& each) {
      return (each.ranks == updated.ranks && each.owners == updated.owners) ||
             (each.is_everything && updated.is_everything);
    });
    if (same == found.end()) {
      found.push_back(std::move(updated));
      continue;
    }
    same->ranks.merge(updated.ranks);
    same->owners.merge(updated.owners);
    same->others.push_back(bad->front().bad->name);
  }
  return found;
}

void add_updated(const Findings& seen, const Updated& updated, const std::set<int>& unknown,
                 Sources& sources) {
  const auto& [first, ranks, owners, is_everything, others] = updated;
  const BadList& bad = *first;
  std::set<int> candidates = owners.empty() ? ranks : owners;
  candidates.insert(unknown.begin(), unknown.end());
  Origin origin = origin_on(seen, Phase::params_after,
                            unknown.empty() ? Cause::optimizer_update : Cause::unknown,
                            unknown.empty() ? Confidence::high : Confidence::low, candidates, bad);
  origin.facts.push_back({.kind = FactKind::parameter_bad_after,
                          .ranks = sorted(ranks),
                          .bad = bad_count(bad.front().bad->sighting->stats)});
  for (const std::string& name : others) {
    add_elsewhere(origin, FactKind::further_weights_bad, name);
    origin.facts.back().phase = Phase::params_after;
  }
  add_unknown_gradients(origin, unknown);
  add_gathered(origin, owners, ranks);
  origin.facts.push_back({.kind = FactKind::update_is_left, .other_ranks = owners.empty()});
  sources.add({.origin = std::move(origin), .since = Part::late});
}

/// Zero times NaN on a masked token, or a mean over no labels, whose derivative autograd takes as
/// zero.
void add_losses(const Incident& incident, Sources& sources) {
  std::set<int> ranks;
  const Sighting* first = nullptr;
  for (const RankEvidence& rank : incident.ranks()) {
    if (rank.bad_losses().empty()) continue;
    ranks.insert(rank.rank());
    if (first == nullptr) first = rank.bad_losses().front();
  }
  if (first == nullptr) return;
  Origin origin =
      make_origin(incident, Phase::loss, Cause::unknown, Confidence::medium, sorted(ranks));
  origin.direction = Direction::forward;
  origin.tensor = tensor_of(*first);
  origin.facts.push_back({.kind = FactKind::loss_bad_gradients_finite,
                          .ranks = sorted(ranks),
                          .bad = bad_count(first->stats)});
  sources.add({.origin = std::move(origin)});
}

}  // namespace

void add_weights(const Findings& seen, Sources& sources) {
  for (const auto& [key, bad] : seen.in_backward_order(seen.bad(Phase::params_before))) {
    if (!sources.is_full(Phase::params_before)) sources.add(weight_source(seen, *key, *bad));
  }
}

void add_reductions(const Findings& seen, const Crossed& crossed, Sources& sources) {
  Reductions(seen, crossed, sources).run();
}

void add_updates(const Findings& seen, Sources& sources) {
  // Any of these makes every weight and the norm bad.
  if (seen.is_any_gradient_bad() || !seen.bad(Phase::params_before).empty()) return;
  const Incident& incident = seen.incident();
  if (const RankEvidence* const witness = rank_with_bad_norm(incident)) {
    if (!is_norm_explained(*witness)) add_norm(incident, *witness, sources);
  } else {
    const std::set<int> unknown = ranks_without_gradients(incident);
    for (const Updated& each : updated_weights(seen)) {
      if (!sources.is_full(Phase::params_after)) add_updated(seen, each, unknown, sources);
    }
  }
  if (sources.all().empty()) add_losses(incident, sources);
}

}  // namespace nanlocator::inline locate_room::events
