// Sources among values that crossed between ranks, and losses. Edges: program order on a rank, and
// the exchange in a collective or message (incident/crossings.hpp has both).
#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "locate/events/events.hpp"
#include "locate/events/fold.hpp"
#include "locate/make_origin.hpp"
#include "locate/origin_facts.hpp"

namespace nanlocator::inline locate_room::events {
namespace {

/// Limit on the facts that a source takes from open ones.
constexpr std::ptrdiff_t kMostFolded = 10;

class CrossingSources {
 public:
  explicit CrossingSources(const Findings& seen)
      : incident_(seen.incident()), crossings_(seen.crossings()) {}

  Crossed run(Sources& sources) {
    find_sinks(sources);
    find_computed();
    find_received();
    close_open();
    fold();
    Crossed crossed;
    for (const Source& each : found_) {
      if (each.origin.phase <= Phase::backward) crossed.replicas.insert(each.replica);
      if (each.site != Site::received || each.origin.phase != Phase::grad_reduced) continue;
      const auto& receivers = each.origin.facts.front().ranks;
      crossed.badly_reduced.insert(receivers.begin(), receivers.end());
    }
    follow_bad_reductions(crossed.badly_reduced);
    for (Source& each : found_) sources.add(std::move(each));
    return crossed;
  }

 private:
  int replica_of(int rank) const {
    const Place* const place = incident_.place_of(rank);
    return place != nullptr ? incident_.replica_of(*place) : -1;
  }

  const Meeting& meeting_of(const BoundaryEvent& event) const {
    return crossings_.meetings()[event.meeting];
  }

  bool is_masked(const BoundaryEvent& event) const {
    return event.sighting->phase <= Phase::backward &&
           masked_.contains(replica_of(event.rank->rank()));
  }

  struct Mates {
    std::set<int> finite, unknown;
  };

  // ---- sinks ----

  /// What reached neither a loss nor a gradient was masked, and explains nothing. Known only if
  /// every rank of the replica answered.
  void find_sinks(Sources& sources) {
    std::set<int> harmed, masked_ranks;
    for (const Place& place : incident_.places()) {
      const int replica = incident_.replica_of(place);
      const RankEvidence* const rank = place.evidence;
      const bool is_blind = rank == nullptr || !Crossings::is_watching(*rank);
      if (is_blind) blind_[replica].insert(place.rank);
      if (is_blind ||
          (crossings_.has_bad_activations(place.rank) &&
           (!rank->scanned(Phase::grad_local) || !rank->bad(Phase::grad_local).empty()))) {
        harmed.insert(replica);
      }
    }
    for (const BoundaryEvent& event : crossings_.events()) {
      if (event.role == RoleKind::loss) harmed.insert(replica_of(event.rank->rank()));
    }
    for (const BoundaryEvent& event : crossings_.events()) {
      const int replica = replica_of(event.rank->rank());
      const bool is_harmful = harmed.contains(replica) || !incident_.unplaced().empty();
      if (is_harmful || event.sighting->phase > Phase::backward) continue;
      masked_.insert(replica);
      masked_ranks.insert(event.rank->rank());
    }
    if (masked_.empty()) return;
    sources.add_fact({.kind = FactKind::masked_values, .ranks = sorted(masked_ranks)});
  }

  // ---- computed on a rank: sent bad, or a loss, with nothing bad before ----

  void find_computed() {
    // Ranks that differ only in tensor parallelism run in lockstep: if all are bad at once, they
    // are one source.
    using Point = std::tuple<int, int, int, Phase, int, int, std::string, std::string, std::string,
                             std::int64_t>;
    std::map<Point, std::vector<const BoundaryEvent*>> points;
    for (const BoundaryEvent& event : crossings_.events()) {
      const Sighting& sighting = *event.sighting;
      if (event.is_explained || event.role == RoleKind::received) continue;
      if (sighting.phase > Phase::backward || is_masked(event)) continue;
      const auto& at = event.rank->coordinates();
      const auto& crossing = sighting.crossing;
      points[{at.dp.rank, at.cp.rank, at.pp.rank, sighting.phase, sighting.microbatch.value_or(-1),
              sighting.chunk.value_or(-1), sighting.module, sighting.op,
              crossing ? crossing->group : "", crossing ? crossing->sequence : -1}]
          .push_back(&event);
    }
    for (const auto& [point, events] : points) add_computed(events);
  }

  void add_computed(const std::vector<const BoundaryEvent*>& events) {
    const BoundaryEvent& first = *events.front();
    const Sighting& sighting = *first.sighting;
    const bool is_loss = first.role == RoleKind::loss;
    const bool is_empty_loss = is_loss && sighting.valid_labels == 0;
    std::set<int> ranks;
    bool is_whole = true;
    for (const BoundaryEvent* event : events) {
      ranks.insert(event->rank->rank());
      is_whole &= event->rank->ledger().is_complete;
    }
    const std::vector<int> on = sorted(ranks);
    const Mates mates = is_loss ? Mates() : mates_of(first, ranks);
    const bool may_gather = !is_loss && crossings_.may_have_gathered(meeting_of(first));
    const Fact received = received_before(events, ranks);
    // Unknown events before it: what members of a group that gathers may have sent, and what was
    // received unseen.
    std::set<int> unknown;
    if (may_gather) unknown = mates.unknown;
    const bool is_gathered = !unknown.empty();
    if (received.other_ranks && !is_empty_loss) {
      unknown.insert(received.peers.begin(), received.peers.end());
    }
    const bool has_seen_all = received.kind == FactKind::received_finite_before;
    const bool is_sure =
        is_empty_loss || (ranks.size() == 1 && mates.unknown.empty() && has_seen_all);
    std::set<int> candidates = ranks;
    candidates.insert(unknown.begin(), unknown.end());
    const bool is_open = !unknown.empty() || !is_whole;
    Origin origin =
        make_origin(incident_, sighting.phase,
                    is_empty_loss && unknown.empty() ? Cause::empty_loss_mask : Cause::unknown,
                    is_open   ? Confidence::low
                    : is_sure ? Confidence::high
                              : Confidence::medium,
                    sorted(candidates));
    set_place(origin, sighting);
    Facts& facts = origin.facts;
    facts.push_back(is_loss ? loss_fact(sighting, on) : sent_fact(first, on));
    if (is_gathered) {
      facts.push_back(
          {.kind = FactKind::gathered_from_unknown, .ranks = on, .peers = sorted(mates.unknown)});
    } else {
      facts.push_back(received);
      if (unknown.empty()) add_surroundings(origin, first, ranks, mates, may_gather);
      if (!is_whole) facts.push_back({.kind = FactKind::ledger_cut_off});
      if (!is_empty_loss) facts.push_back({.kind = FactKind::missing_operator});
    }
    add(std::move(origin), Site::computed, is_open, sighting, replica_of(first.rank->rank()));
  }

  /// What is known to be finite around a source on these ranks; its last fact is what they
  /// received.
  void add_surroundings(Origin& origin, const BoundaryEvent& first, const std::set<int>& ranks,
                        const Mates& mates, bool may_gather) const {
    const std::vector<int> on = sorted(ranks);
    const bool is_empty_loss = origin.cause == Cause::empty_loss_mask;
    Facts& facts = origin.facts;
    Fact& received = facts.back();
    const bool has_seen_all = received.kind == FactKind::received_finite_before;
    if (has_seen_all && may_gather) received.group = first.sighting->crossing->group;
    auto gathered = is_empty_loss ? std::nullopt : weights_gathered_unseen(incident_, on);
    if (has_seen_all && gathered) received.peers = gathered->peers;
    if (gathered) facts.push_back(*std::move(gathered));
    if (ranks.size() > 1) facts.push_back({.kind = FactKind::lockstep_ranks});
    if (!mates.finite.empty()) {
      facts.push_back({.kind = FactKind::mates_gave_finite, .ranks = sorted(mates.finite)});
    }
    if (!mates.unknown.empty()) {
      facts.push_back({.kind = FactKind::mates_unknown, .ranks = sorted(mates.unknown)});
    }
    const bool are_weights_finite = std::ranges::all_of(ranks, [&](int each) {
      const RankEvidence* const rank = incident_.find(each);
      return rank != nullptr && rank->scanned(Phase::params_before) &&
             rank->bad(Phase::params_before).empty();
    });
    if (are_weights_finite) facts.push_back({.kind = FactKind::weights_finite, .ranks = on});
  }

  /// What these ranks, bad at the same point, had received. `other_ranks`: unknown events among it
  /// may have made them bad, as no rank that received the same is finite here.
  Fact received_before(const std::vector<const BoundaryEvent*>& events,
                       const std::set<int>& ranks) const {
    const bool is_loss = events.front()->role == RoleKind::loss;
    Fact fact{.kind = FactKind::received_finite_before, .ranks = sorted(ranks), .loss = is_loss};
    std::set<int> from;
    for (const BoundaryEvent* event : events) {
      const UnseenReceipt unseen = crossings_.unseen_before(*event);
      if (unseen.from.empty()) continue;
      from.insert(unseen.from.begin(), unseen.from.end());
      const bool is_finite_elsewhere =
          !is_loss && std::ranges::any_of(unseen.shared_by, [&](int rank) {
            return crossings_.given_by(rank, meeting_of(*event)) == Given::finite;
          });
      fact.other_ranks = fact.other_ranks || !is_finite_elsewhere;
    }
    if (from.empty()) return fact;
    fact.kind = FactKind::received_unseen_before;
    fact.loss = false;
    fact.peers = sorted(from);
    return fact;
  }

  // ---- bad when received, with nothing bad sent ----

  void find_received() {
    for (const Meeting& meeting : crossings_.meetings()) {
      if (!meeting.sent.empty() || meeting.received.empty()) continue;
      const BoundaryEvent& first = crossings_.events()[meeting.received.front()];
      if (is_masked(first)) continue;
      std::set<int> receivers, unknown;
      for (const std::size_t each : meeting.received) {
        receivers.insert(crossings_.events()[each].rank->rank());
      }
      for (const int rank : meeting.givers) {
        if (crossings_.given_by(rank, meeting) == Given::unknown) unknown.insert(rank);
      }
      if (meeting.givers.empty() || !unknown.empty()) {
        // What silent ranks leave open about reductions of gradients, the gradients' edges say.
        if (first.sighting->phase > Phase::backward) continue;
        add_from_unknown(meeting, *first.sighting, receivers, unknown);
      } else {
        add_changed(meeting, *first.sighting, receivers);
      }
    }
  }

  void add_from_unknown(const Meeting& meeting, const Sighting& sighting,
                        const std::set<int>& receivers, const std::set<int>& unknown) {
    std::set<int> candidates = receivers;
    candidates.insert(unknown.begin(), unknown.end());
    Origin origin =
        make_origin(incident_, sighting.phase, Cause::unknown, Confidence::low, sorted(candidates));
    set_place(origin, sighting);
    Fact fact = fact_of(FactKind::received_from_unknown, sighting, sorted(receivers));
    if (!meeting.receiver) name_collective(fact, sighting, meeting);
    fact.peers = sorted(unknown);
    origin.facts.push_back(std::move(fact));
    add(std::move(origin), Site::received, true, sighting, replica_of(*receivers.begin()));
  }

  void add_changed(const Meeting& meeting, const Sighting& sighting,
                   const std::set<int>& receivers) {
    const std::string parameter = sighting.phase > Phase::backward
                                      ? reduced_parameter(sighting, *receivers.begin())
                                      : std::string();
    const bool is_sum = !meeting.receiver && meeting.kind && is_reduction(*meeting.kind);
    auto overflow = is_sum
                        ? overflow_of_sum(incident_, sighting, meeting.givers,
                                          parameter.empty() ? std::set<std::string_view>{}
                                                            : std::set<std::string_view>{parameter})
                        : std::nullopt;
    std::set<int> clean(meeting.givers.begin(), meeting.givers.end());
    for (const int rank : receivers) clean.erase(rank);
    // By the addends themselves, not by how large the rest of the sum is.
    const bool is_known_to_overflow = overflow && overflow->kind == FactKind::sum_may_exceed_range;
    // A reduce-scatter gives each member a sum of its own, to which all contribute.
    const bool is_own_sum = is_sum && !gives_all_members_the_same(*meeting.kind) &&
                            !clean.empty() &&
                            (sighting.phase == Phase::grad_reduced || is_known_to_overflow);
    const bool is_own_copy = !meeting.receiver && !clean.empty() && !is_own_sum;
    const std::vector<int> received = sorted(receivers);
    const std::vector<int>& candidates = is_own_sum ? meeting.givers : received;
    Origin origin =
        make_origin(incident_, sighting.phase,
                    meeting.receiver           ? Cause::pipeline_transfer
                    : overflow && !is_own_copy ? Cause::collective_sum
                                               : Cause::collective_result,
                    candidates.size() == 1 ? Confidence::high : Confidence::medium, candidates);
    set_place(origin, sighting);
    origin.parameter = parameter;
    origin.is_on_every_candidate =
        origin.cause == Cause::collective_sum && candidates == received && received.size() > 1;
    Facts& facts = origin.facts;
    if (meeting.receiver) {
      facts.push_back(fact_of(FactKind::message_changed, sighting, received));
      facts.back().peers = meeting.givers;
    } else {
      facts.push_back(fact_of(FactKind::collective_changed, sighting, received));
      name_collective(facts.back(), sighting, meeting);
      facts.push_back(
          is_own_sum ? Fact{.kind = FactKind::only_owner_keeps_sum, .ranks = received}
          : is_own_copy
              ? Fact{.kind = FactKind::own_copy_bad, .ranks = received, .peers = sorted(clean)}
              : Fact{.kind = FactKind::every_member_bad});
    }
    if (overflow) facts.push_back(*std::move(overflow));
    add(std::move(origin), Site::received, false, sighting, replica_of(*receivers.begin()));
  }

  /// The only parameter that a reduction can have spoiled: of its shape (tied embeddings are
  /// reduced one by one), or of its module.
  std::string reduced_parameter(const Sighting& sighting, int receiver) const {
    if (!sighting.parameter.empty()) return sighting.parameter;
    const RankEvidence& rank = *incident_.find(receiver);
    std::set<std::string> of_shape, of_module;
    for (const Phase phase : {Phase::grad_reduced, Phase::grad_norm}) {
      for (const BadParameter& bad : rank.bad(phase)) {
        if (rank.status(Phase::grad_local, bad.name) == Status::bad) continue;
        if (bad.sighting->shape == sighting.shape) of_shape.insert(bad.name);
        if (bad.name.starts_with(sighting.module)) of_module.insert(bad.name);
      }
    }
    if (of_shape.size() == 1) return *of_shape.begin();
    return of_module.size() == 1 ? *of_module.begin() : "";
  }

  /// A rank puts the bad result of a reduction into the next one.
  void follow_bad_reductions(std::set<int>& spoiled) const {
    const auto is_spoiled = [&](std::size_t event) {
      return spoiled.contains(crossings_.events()[event].rank->rank());
    };
    for (std::size_t known = 0; known != spoiled.size();) {
      known = spoiled.size();
      for (const Meeting& meeting : crossings_.meetings()) {
        if (meeting.sent.empty() || !std::ranges::all_of(meeting.sent, is_spoiled)) continue;
        for (const std::size_t event : meeting.received) {
          const BoundaryEvent& received = crossings_.events()[event];
          if (received.sighting->phase == Phase::grad_reduced)
            spoiled.insert(received.rank->rank());
        }
      }
    }
  }

  // ---- open sources ----

  /// An unknown event made an open source. If its replica has another source of its microbatch that
  /// is not later, that made the unknown event bad; otherwise nothing orders the replica's open
  /// sources, which are one.
  void close_open() {
    std::map<int, std::vector<std::size_t>> certain;  // by replica
    std::vector<Source> found;
    for (Source& each : found_) {
      if (each.is_open) continue;
      certain[each.replica].push_back(found.size());
      found.push_back(std::move(each));
    }
    std::map<int, std::size_t> joined;  // by replica
    for (Source& open : found_) {
      if (!open.is_open) continue;
      const std::vector<std::size_t>& others = certain[open.replica];
      const auto is_before = [&](std::size_t i) {
        const Origin &a = found[i].origin, &b = open.origin;
        return a.phase <= b.phase &&
               (!a.microbatch || !b.microbatch || a.microbatch == b.microbatch);
      };
      const auto source = std::ranges::find_if(others, is_before);
      if (source != others.end()) {
        Origin& origin = found[*source].origin;
        fold_into(origin, open.origin);
        origin.place_confidence = std::min(origin.place_confidence, Confidence::medium);
        continue;
      }
      const auto [entry, is_new] = joined.try_emplace(open.replica, found.size());
      if (is_new) {
        std::set<int> candidates(open.origin.candidates.begin(), open.origin.candidates.end());
        candidates.insert(incident_.unplaced().begin(), incident_.unplaced().end());
        candidates.merge(std::set(blind_[open.replica]));
        set_candidates(open.origin, incident_, sorted(candidates));
        found.push_back(std::move(open));
        continue;
      }
      Source& first = found[entry->second];
      fold_into(first.origin, open.origin);
      first.microbatches.merge(open.microbatches);
      std::set<int> candidates(first.origin.candidates.begin(), first.origin.candidates.end());
      candidates.insert(open.origin.candidates.begin(), open.origin.candidates.end());
      set_candidates(first.origin, incident_, sorted(candidates));
    }
    found_ = std::move(found);
  }

  static void fold_into(Origin& origin, const Origin& other) {
    if (std::ranges::count(origin.facts, FactSource::folded, &Fact::source) >= kMostFolded) return;
    origin.facts.push_back(other.facts.front());
    origin.facts.back().source = FactSource::folded;
  }

  // ---- fold ----

  /// The same in several microbatches is one source, listed under the first; and so is a collective
  /// that fails on the same ranks again and again, in several places.
  void fold() {
    std::ranges::stable_sort(
        found_, {}, [](const Source& each) { return each.origin.microbatch.value_or(-1); });
    const auto merge = [](Source& first, Source& other) {
      first.microbatches.merge(other.microbatches);
    };
    fold_by(
        found_,
        [](const Source& each) {
          const Origin& origin = each.origin;
          return std::optional(std::tuple(origin.candidates, each.site, each.is_open, origin.phase,
                                          origin.cause, origin.chunk, origin.module, origin.op,
                                          each.group));
        },
        merge);
    for (Source& each : found_) {
      if (each.microbatches.size() < 2) continue;
      each.origin.facts.push_back({.kind = FactKind::same_in_microbatches,
                                   .count = static_cast<std::int64_t>(each.microbatches.size())});
    }
    std::ranges::stable_sort(found_, {}, [](const Source& each) {
      const Origin& origin = each.origin;
      return std::tuple(origin.phase, origin.microbatch.value_or(-1), origin.candidates);
    });
    using Collective = std::tuple<std::vector<int>, Cause, std::string, std::string>;
    fold_by(
        found_,
        [](const Source& each) -> std::optional<Collective> {
          const Fact& fact = each.origin.facts.front();
          if (fact.kind != FactKind::collective_changed) return std::nullopt;
          return Collective(each.origin.candidates, each.origin.cause, fact.op, fact.group);
        },
        [&](Source& first, Source& other) {
          add_elsewhere(first.origin, FactKind::same_collective_elsewhere, place_of(other.origin));
          merge(first, other);
        });
  }

  // ---- shared ----

  /// What the other members of a collective put into it.
  Mates mates_of(const BoundaryEvent& event, const std::set<int>& ranks) const {
    Mates mates;
    const Meeting& meeting = meeting_of(event);
    for (const int rank : meeting.givers) {
      if (ranks.contains(rank)) continue;
      const Given given = crossings_.given_by(rank, meeting);
      if (given == Given::finite) mates.finite.insert(rank);
      if (given == Given::unknown) mates.unknown.insert(rank);
    }
    return mates;
  }

  static Fact fact_of(FactKind kind, const Sighting& sighting, const std::vector<int>& ranks) {
    return {.kind = kind,
            .ranks = ranks,
            .phase = sighting.phase,
            .microbatch = sighting.microbatch,
            .bad = bad_count(sighting.stats)};
  }

  static Fact loss_fact(const Sighting& sighting, const std::vector<int>& ranks) {
    Fact fact = fact_of(FactKind::loss_bad, sighting, ranks);
    fact.count = sighting.valid_labels;
    return fact;
  }

  Fact sent_fact(const BoundaryEvent& event, const std::vector<int>& ranks) const {
    const Meeting& meeting = meeting_of(event);
    Fact fact =
        fact_of(meeting.receiver ? FactKind::sent_bad : FactKind::gave_bad, *event.sighting, ranks);
    if (!meeting.receiver) {
      name_collective(fact, *event.sighting, meeting);
    } else if (ranks.size() == 1) {
      fact.peers = {*meeting.receiver};
    }
    return fact;
  }

  static void name_collective(Fact& fact, const Sighting& sighting, const Meeting& meeting) {
    fact.op = sighting.op;
    fact.module = sighting.module;
    fact.group = sighting.crossing->group;
    fact.peers = meeting.givers;
  }

  static void set_place(Origin& origin, const Sighting& sighting) {
    origin.direction = direction_of(sighting.phase);
    origin.microbatch = sighting.microbatch;
    origin.chunk = sighting.chunk;
    origin.module = sighting.module;
    // What was sent was computed before.
    if (sighting.role.kind() != RoleKind::sent) origin.op = sighting.op;
    origin.tensor = tensor_of(sighting);
  }

  void add(Origin origin, Site site, bool is_open, const Sighting& sighting, int replica) {
    Source source{
        .origin = std::move(origin), .site = site, .is_open = is_open, .replica = replica};
    if (site == Site::received && !is_open) source.since.reset();
    if (sighting.microbatch) source.microbatches.insert(*sighting.microbatch);
    source.position = sighting.position;
    if (sighting.crossing) source.group = sighting.crossing->group;
    found_.push_back(std::move(source));
  }

  const Incident& incident_;
  const Crossings& crossings_;
  std::map<int, std::set<int>> blind_;  // by replica: ranks that did not report what they sent
  std::set<int> masked_;                // replicas
  std::vector<Source> found_;
};

}  // namespace

Crossed add_crossings(const Findings& seen, Sources& sources) {
  if (seen.crossings().events().empty()) return {};
  return CrossingSources(seen).run(sources);
}

}  // namespace nanlocator::inline locate_room::events
