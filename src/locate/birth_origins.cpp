#include "locate/birth_origins.hpp"

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "locate/birth_facts.hpp"
#include "locate/origin_facts.hpp"
#include "locate/receipts.hpp"
#include "nanlocator/record/collective_kind.hpp"

namespace nanlocator::inline locate_room {
namespace {

/// Further bad weights that the evidence names.
constexpr std::size_t kMostNames = 4;

/// Identifies a birth across ranks and microbatches: 0/0 in one of them and 1/0 in another are one
/// division by zero.
using BirthIdentity =
    std::tuple<BirthKind, Phase, std::string, std::string, std::string, std::string>;

BirthIdentity identity_of(const Birth& birth) {
  const Sighting& place = birth.sighting;
  const BirthKind kind = birth.kind == BirthKind::inf ? BirthKind::nan : birth.kind;
  return {kind, place.phase, place.module, place.op, place.role.text(), place.parameter};
}

void add_rank(Origin& origin, const RankEvidence& rank) {
  origin.candidates.push_back(rank.rank());
  origin.is_on_every_candidate = true;
  origin.coordinates.reset();
  if (origin.data_parallel_replica != rank.coordinates().dp.rank) {
    origin.data_parallel_replica.reset();
  }
}

/// After a bad step every weight may be NaN, which is one fault, not one per weight: names the
/// first that was read, and counts the others on the same ranks.
void merge_bad_weights(std::vector<BornOrigin>& born) {
  std::map<std::vector<int>, std::size_t> first_by_ranks;
  std::vector<BornOrigin> kept;
  std::map<std::size_t, Fact> further;
  for (BornOrigin& each : born) {
    if (each.origin.cause == Cause::bad_weight) {
      const auto [entry, is_new] = first_by_ranks.try_emplace(each.origin.candidates, kept.size());
      if (!is_new) {
        Fact& others = further[entry->second];
        others.kind = FactKind::further_weights_bad;
        others.count = others.count.value_or(0) + 1;
        if (others.names.size() < kMostNames) others.names.push_back(each.origin.parameter);
        continue;
      }
    }
    kept.push_back(std::move(each));
  }
  for (auto& [first, others] : further) kept[first].origin.facts.push_back(std::move(others));
  born = std::move(kept);
}

bool is_of_kernel(const Origin& origin) {
  return !origin.op.empty() && (has_fact(origin.facts, FactKind::made_by_kernel) ||
                                has_fact(origin.facts, FactKind::left_unwritten));
}

/// The kind of fact that lists further places of the same kernel, or of the same operator on the
/// same group whose results were bad; empty for other origins.
std::optional<FactKind> elsewhere_of(const Origin& origin) {
  if (is_of_kernel(origin)) return FactKind::same_kernel_elsewhere;
  if (has_fact(origin.facts, FactKind::came_from_collective)) {
    return FactKind::same_collective_elsewhere;
  }
  return std::nullopt;
}

/// A broken kernel or collective fails in every layer that uses it: the first place leads.
void merge_repeated(std::vector<BornOrigin>& born) {
  using Key = std::tuple<std::string, std::string, Cause, std::vector<int>>;
  std::map<Key, std::size_t> first_by_key;
  std::vector<BornOrigin> kept;
  for (BornOrigin& each : born) {
    if (const auto kind = elsewhere_of(each.origin)) {
      const Key key(each.origin.op, each.origin.facts.front().group, each.origin.cause,
                    each.origin.candidates);
      const auto [entry, is_new] = first_by_key.try_emplace(key, kept.size());
      if (!is_new) {
        BornOrigin& first = kept[entry->second];
        add_elsewhere(first.origin, *kind, place_of(each.origin));
        first.reached.merge(each.reached);
        first.microbatches.merge(each.microbatches);
        continue;
      }
    }
    kept.push_back(std::move(each));
  }
  born = std::move(kept);
}

/// The same operator in several microbatches is one fault, listed under the first of them.
void describe_microbatches(BornOrigin& born) {
  if (born.microbatches.empty()) return;
  born.origin.microbatch = *born.microbatches.begin();
  if (born.microbatches.size() < 2) return;
  born.origin.facts.push_back({.kind = FactKind::same_in_microbatches,
                               .count = static_cast<std::int64_t>(born.microbatches.size())});
}

bool is_same_call(const Birth& birth, const Origin& origin) {
  const Sighting& place = birth.sighting;
  return place.op == origin.op && place.module == origin.module && place.phase == origin.phase;
}

/// Adds the tensor-parallel peers that were finite: they execute the same call on the same tensor
/// or on other parts of it.
void add_peers(const Incident& incident, Origin& origin) {
  if (origin.op.empty() || !has_fact(origin.facts, FactKind::made_from_finite)) return;
  const Place* const own = incident.place_of(origin.candidates.front());
  if (own == nullptr) return;
  Fact finite{.kind = FactKind::peers_finite, .module = origin.module, .op = origin.op};
  for (const Place& place : incident.places()) {
    const bool is_peer = place.pp == own->pp && place.dp == own->dp && place.cp == own->cp &&
                         std::ranges::count(origin.candidates, place.rank) == 0;
    if (!is_peer || place.evidence == nullptr) continue;
    const Ledger& ledger = place.evidence->ledger();
    const bool was_traced = ledger.is_complete && ledger.rerun && ledger.rerun->reproduced;
    const bool has_it = std::ranges::any_of(
        ledger.births, [&](const Birth& birth) { return is_same_call(birth, origin); });
    if (was_traced && !has_it) finite.peers.push_back(place.rank);
  }
  if (!finite.peers.empty()) origin.facts.push_back(std::move(finite));
}

bool is_received(const Root& root) {
  return root.birth->kind == BirthKind::collective;
}

bool has_sent(const Root& root) {
  return std::ranges::any_of(reached_by(root), [](const Reached& reached) {
    return reached.kind == ReachedKind::other_ranks;
  });
}

/// The first phase in which each rank had something bad that it sent on.
using Senders = std::map<int, Phase>;

Senders senders_in(const std::vector<Root>& roots) {
  Senders senders;
  for (const Root& root : roots) {
    if (!has_sent(root)) continue;
    const Phase phase = root.birth->sighting.phase;
    const auto [entry, is_new] = senders.try_emplace(root.rank->rank(), phase);
    if (!is_new) entry->second = std::min(entry->second, phase);
  }
  return senders;
}

/// True if another member of the collective can have made this rank's result bad: it received
/// something bad itself and sent it on, in an earlier phase, or in the same phase while this rank
/// sent nothing bad.
bool is_passed_on(const Root& root, const Senders& senders) {
  const Phase here = root.birth->sighting.phase;
  const bool has_sent_itself = has_sent(root);
  const auto can_have_sent = [&](const auto& sender) {
    return sender.first != root.rank->rank() &&
           (sender.second < here || (sender.second == here && !has_sent_itself));
  };
  const RankList& members = root.birth->members;
  if (members == RankList()) return std::ranges::any_of(senders, can_have_sent);
  return std::ranges::any_of(members.ranks_below(root.rank->coordinates().world_size),
                             [&](int member) {
                               const auto sender = senders.find(member);
                               return sender != senders.end() && can_have_sent(*sender);
                             });
}

/// True if the first pass saw a broadcast whose input on the origin's rank was bad, and whose
/// result this rank received.
bool was_broadcast_by(const Incident& incident, const Origin& origin, const Root& receipt) {
  const std::string& op = receipt.birth->sighting.op;
  if (collective_kind_of(op) != CollectiveKind::broadcast) return false;
  const auto is_it = [&](const Sighting& sent) {
    return sent.op == op && sent.crossing && sent.crossing->members == receipt.birth->members &&
           sent.role.kind() == RoleKind::sent;
  };
  return std::ranges::any_of(origin.candidates, [&](int rank) {
    const RankEvidence* sender = incident.find(rank);
    return sender != nullptr && std::ranges::any_of(sender->ledger().sightings, is_it);
  });
}

/// A reduction that returned Inf: its sum overflowed if the members' largest addends allow it.
void judge_sum(Origin& origin, const std::map<int, double>& addends) {
  const Fact& received = origin.facts.front();
  if (received.kind != FactKind::came_from_collective || !origin.tensor) return;
  const bool is_known =
      !received.peers.empty() &&
      std::ranges::all_of(received.peers, [&](int member) { return addends.contains(member); });
  if (!is_known || origin.tensor->nan > 0) return;
  double sum = 0;
  for (const auto& [rank, largest] : addends) sum += largest;
  auto overflow = sum_beyond_range(sum, received.peers.size(), origin.tensor->dtype);
  if (!overflow) return;
  origin.cause = Cause::collective_sum;
  origin.facts.push_back(*std::move(overflow));
}

}  // namespace

std::vector<BornOrigin> origins_of_births(const Incident& incident, bool has_crossings) {
  std::vector<Root> roots;
  for (const RankEvidence& rank : incident.ranks()) {
    for (Root& root : roots_of(rank)) roots.push_back(std::move(root));
  }
  const Senders senders =
      senders_in(roots);  // also of groups whose crossings the first pass judges
  std::vector<Root> received;
  const auto set_apart = [&](const auto& is_told_otherwise) {
    std::ranges::copy_if(roots, std::back_inserter(received), is_told_otherwise);
    std::erase_if(roots, is_told_otherwise);
  };
  if (has_crossings) {
    set_apart([&](const Root& root) {
      return is_received(root) && is_judged_in_first_pass(incident, root);
    });
  }
  if (std::ranges::all_of(roots, is_received)) {
    std::erase_if(roots, [&](const Root& root) { return is_passed_on(root, senders); });
  } else {
    set_apart(is_received);
  }

  std::vector<BornOrigin> born;
  std::vector<std::map<int, double>> addends;  // of each: the largest that a rank put in
  std::map<BirthIdentity, std::size_t> known;
  for (const Root& root : roots) {
    const auto [entry, is_new] = known.try_emplace(identity_of(*root.birth), born.size());
    if (is_new) {
      born.push_back({.origin = origin_of(root),
                      .is_received = is_received(root),
                      .is_opaque = root.birth->kind == BirthKind::opaque ||
                                   root.birth->kind == BirthKind::kernel});
    } else if (Origin& origin = born[entry->second].origin;
               origin.candidates.back() != root.rank->rank()) {
      add_rank(origin, *root.rank);
    }
    BornOrigin& each = born[entry->second];
    addends.resize(born.size());
    if (const auto largest = root.birth->largest_sent) {
      addends[entry->second].try_emplace(root.rank->rank(), *largest);
    }
    if (const auto microbatch = root.birth->sighting.microbatch) {
      each.microbatches.insert(*microbatch);
    }
    if (const auto position = root.birth->sighting.position) {
      each.positions.try_emplace(root.rank->rank(), *position);
    }
    for (Reached& reached : reached_by(root)) {
      if (reached.kind == ReachedKind::parameter) each.reached.insert(std::move(reached.name));
    }
  }
  for (std::size_t i = 0; i < born.size(); ++i) judge_sum(born[i].origin, addends[i]);
  // A buffer that DistributedDataParallel broadcasts has no name, because it is packed with others.
  // Watched crossings show the sender.
  for (const Root& root : received) {
    const auto& name = root.birth->sighting.parameter;
    const auto is_from = [&](const Origin& origin) {
      if (!name.empty()) return name == origin.parameter;
      return !has_crossings || was_broadcast_by(incident, origin, root);
    };
    for (BornOrigin& each : born) {
      if (is_from(each.origin)) {
        each.receivers.push_back(root.rank->rank());
      }
    }
  }
  merge_bad_weights(born);
  merge_repeated(born);
  for (BornOrigin& each : born) {
    describe_microbatches(each);
    Origin& origin = each.origin;
    add_peers(incident, origin);
    if (origin.candidates.size() < 2) continue;
    origin.facts.push_back({.kind = FactKind::same_on_ranks, .ranks = origin.candidates});
  }
  return born;
}

}  // namespace nanlocator::inline locate_room
