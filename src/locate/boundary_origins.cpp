#include "locate/boundary_origins.hpp"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "locate/origin_facts.hpp"

namespace nanlocator::inline locate_room {
namespace {

/// Limit on the facts that an origin takes from origins folded into it.
constexpr std::ptrdiff_t kMostFolded = 10;

/// Identifies ranks that differ only in tensor parallelism, at one point of the program. Without
/// sequence parallelism they compute the same from the same inputs, so if all of them are bad at
/// once, they cannot be separated.
using Lockstep =
    std::tuple<int, int, int, Phase, int, int, std::string, std::string, std::string, std::int64_t>;

/// Identifies the same fault across microbatches.
using CrossingIdentity =
    std::tuple<std::vector<int>, FoundIn, Phase, Cause, int, std::string, std::string, std::string>;

class Finder {
 public:
  Finder(const Incident& incident, const Crossings& crossings)
      : incident_(incident), crossings_(crossings) {}

  BoundaryOrigins run() {
    find_masked_replicas();
    find_births_on_ranks();
    find_faults_between_ranks();
    settle_what_silent_ranks_sent();
    fold_microbatches();
    std::ranges::stable_sort(drafts_, {}, [](const Draft& draft) {
      const Origin& origin = draft.found.origin;
      return std::tuple(origin.phase, origin.microbatch.value_or(-1), origin.candidates);
    });
    for (Draft& draft : drafts_) {
      if (draft.found.origin.phase <= Phase::backward) {
        found_.replicas.insert(draft.replica);
      }
      found_.origins.push_back(std::move(draft.found));
    }
    fold_repeated();
    follow_bad_reductions();
    return std::move(found_);
  }

 private:
  struct Draft {
    FoundOrigin found;
    int replica = -1;
    std::string group;
  };

  int replica_of(int rank) const {
    const Place* place = incident_.place_of(rank);
    return place != nullptr ? incident_.replica_of(*place) : -1;
  }

  bool is_blind(const Place& place) const {
    return place.evidence == nullptr || !Crossings::is_watching(*place.evidence);
  }

  /// The replica's ranks, and ranks of unknown place, that did not report their sends.
  std::set<int> blind_in(int replica) const {
    std::set<int> blind(incident_.unplaced().begin(), incident_.unplaced().end());
    const auto found = blind_by_replica_.find(replica);
    if (found != blind_by_replica_.end()) blind.insert(found->second.begin(), found->second.end());
    return blind;
  }

  // ---- masked bad values ----

  /// A bad value that reached neither a loss nor a gradient was masked, so it was intended or
  /// harmless and explains nothing. Concluded only if every rank of the replica answered.
  void find_masked_replicas() {
    std::map<int, bool> is_harmful;
    for (const Place& place : incident_.places()) {
      const int replica = incident_.replica_of(place);
      if (is_blind(place)) {
        is_harmful[replica] = true;
        blind_by_replica_[replica].push_back(place.rank);
        continue;
      }
      if (!crossings_.has_bad_activations(place.rank)) continue;
      is_harmful[replica] |= !place.evidence->scanned(Phase::grad_local) ||
                             !place.evidence->bad(Phase::grad_local).empty();
    }
    for (const BoundaryEvent& event : crossings_.events()) {
      if (event.role == RoleKind::loss) is_harmful[replica_of(event.rank->rank())] = true;
    }
    std::set<int> masked;
    for (const BoundaryEvent& event : crossings_.events()) {
      if (event.sighting->phase > Phase::backward) continue;
      const int replica = replica_of(event.rank->rank());
      if (is_harmful[replica] || !incident_.unplaced().empty()) continue;
      masked_.insert(replica);
      masked.insert(event.rank->rank());
    }
    if (masked.empty()) return;
    found_.facts.push_back(
        {.kind = FactKind::masked_values, .ranks = {masked.begin(), masked.end()}});
  }

  // ---- births on a rank: a bad send or loss with no bad value before it ----

  void find_births_on_ranks() {
    std::map<Lockstep, std::vector<const BoundaryEvent*>> groups;
    for (const BoundaryEvent& event : crossings_.events()) {
      const Sighting& sighting = *event.sighting;
      if (event.is_explained || event.role == RoleKind::received) continue;
      if (sighting.phase > Phase::backward) continue;  // the gradient rules judge those
      if (masked_.contains(replica_of(event.rank->rank()))) continue;
      const auto& at = event.rank->coordinates();
      groups[{at.dp.rank, at.cp.rank, at.pp.rank, sighting.phase, sighting.microbatch.value_or(-1),
              sighting.chunk.value_or(-1), sighting.module, sighting.op,
              sighting.crossing ? sighting.crossing->group : std::string(),
              sighting.crossing ? sighting.crossing->sequence : -1}]
          .push_back(&event);
    }
    for (const auto& [where, events] : groups) add_birth_on_ranks(events);
  }

  void add_birth_on_ranks(const std::vector<const BoundaryEvent*>& events) {
    const BoundaryEvent& first = *events.front();
    const Sighting& sighting = *first.sighting;
    const bool is_loss = first.role == RoleKind::loss;
    std::set<int> ranks;
    bool is_whole = true;
    for (const BoundaryEvent* event : events) {
      ranks.insert(event->rank->rank());
      is_whole &= event->rank->ledger().is_complete;
    }
    const std::set<int> silent = silent_mates(first);
    if (!silent.empty() && crossings_.may_have_gathered(crossings_.meetings()[first.meeting])) {
      add_maybe_gathered(first, ranks, silent);
      return;
    }
    const bool is_empty_loss = is_loss && sighting.valid_labels == 0;
    const Fact received = received_before(events, ranks);
    if (received.other_ranks && !is_empty_loss) {
      add_maybe_received(first, ranks, received);
      return;
    }
    const int replica = replica_of(first.rank->rank());
    const bool has_seen_all = received.kind == FactKind::received_finite_before;
    const bool is_sure =
        is_whole && (is_empty_loss || (ranks.size() == 1 && silent.empty() && has_seen_all));
    Origin origin = make_origin(incident_, sighting.phase,
                                is_empty_loss ? Cause::empty_loss_mask : Cause::unknown,
                                !is_whole ? Confidence::low
                                : is_sure ? Confidence::high
                                          : Confidence::medium,
                                {ranks.begin(), ranks.end()});
    set_place(origin, sighting);
    const std::vector<int> on(ranks.begin(), ranks.end());
    Facts& facts = origin.facts;
    facts.push_back(is_loss ? loss_fact(sighting, on) : sent_fact(first, on));
    facts.push_back(received);
    if (has_seen_all && !is_loss &&
        crossings_.may_have_gathered(crossings_.meetings()[first.meeting])) {
      facts.back().group = sighting.crossing->group;
    }
    auto gathered = is_empty_loss ? std::nullopt : weights_gathered_unseen(incident_, on);
    if (has_seen_all && gathered) facts.back().peers = gathered->peers;
    if (gathered) facts.push_back(*std::move(gathered));
    if (ranks.size() > 1) facts.push_back({.kind = FactKind::lockstep_ranks});
    if (!is_loss) add_mates(origin, first, ranks);
    add_weights(origin, ranks);
    if (!is_whole) facts.push_back({.kind = FactKind::ledger_cut_off});
    if (!is_empty_loss) facts.push_back({.kind = FactKind::missing_operator});
    add(std::move(origin), is_whole ? FoundIn::sent : FoundIn::unseen, sighting, replica);
  }

  /// What these ranks, bad at the same point, had received. If not all of it was scanned, another
  /// rank may have sent it (`other_ranks`), unless a rank that received the same is clean here.
  Fact received_before(const std::vector<const BoundaryEvent*>& events,
                       const std::set<int>& ranks) const {
    const bool is_loss = events.front()->role == RoleKind::loss;
    Fact fact{.kind = FactKind::received_finite_before,
              .ranks = {ranks.begin(), ranks.end()},
              .loss = is_loss};
    std::set<int> from;
    for (const BoundaryEvent* event : events) {
      const UnseenReceipt unseen = crossings_.unseen_before(*event);
      if (unseen.from.empty()) continue;
      from.insert(unseen.from.begin(), unseen.from.end());
      const bool is_clean_elsewhere =
          !is_loss && std::ranges::any_of(unseen.shared_by, [&](int rank) {
            return crossings_.given_by(rank, crossings_.meetings()[event->meeting]) ==
                   Given::finite;
          });
      fact.other_ranks = fact.other_ranks || !is_clean_elsewhere;
    }
    if (from.empty()) return fact;
    fact.kind = FactKind::received_unseen_before;
    fact.loss = false;
    fact.peers.assign(from.begin(), from.end());
    return fact;
  }

  /// Adds an origin for a bad send or loss that may come from another rank's input to an unscanned
  /// transfer.
  void add_maybe_received(const BoundaryEvent& first, const std::set<int>& ranks,
                          const Fact& received) {
    const Sighting& sighting = *first.sighting;
    std::set<int> candidates = ranks;
    candidates.insert(received.peers.begin(), received.peers.end());
    Origin origin = make_origin(incident_, sighting.phase, Cause::unknown, Confidence::low,
                                {candidates.begin(), candidates.end()});
    set_place(origin, sighting);
    const std::vector<int> on(ranks.begin(), ranks.end());
    origin.facts.push_back(first.role == RoleKind::loss ? loss_fact(sighting, on)
                                                        : sent_fact(first, on));
    origin.facts.push_back(received);
    origin.facts.push_back({.kind = FactKind::missing_operator});
    add(std::move(origin), FoundIn::unseen, sighting, replica_of(first.rank->rank()));
  }

  /// Adds an origin for a bad send that may come from a silent rank: gathered values are not
  /// scanned on the receivers.
  void add_maybe_gathered(const BoundaryEvent& first, const std::set<int>& ranks,
                          const std::set<int>& silent) {
    std::set<int> candidates = ranks;
    candidates.insert(silent.begin(), silent.end());
    const Sighting& sighting = *first.sighting;
    Origin origin = make_origin(incident_, sighting.phase, Cause::unknown, Confidence::low,
                                {candidates.begin(), candidates.end()});
    set_place(origin, sighting);
    const std::vector<int> on(ranks.begin(), ranks.end());
    origin.facts.push_back(sent_fact(first, on));
    origin.facts.push_back({.kind = FactKind::gathered_from_unknown,
                            .ranks = on,
                            .peers = {silent.begin(), silent.end()}});
    add(std::move(origin), FoundIn::unseen, sighting, replica_of(first.rank->rank()));
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
    const Sighting& sighting = *event.sighting;
    const Meeting& meeting = crossings_.meetings()[event.meeting];
    if (meeting.receiver) {
      Fact fact = fact_of(FactKind::sent_bad, sighting, ranks);
      if (ranks.size() == 1) fact.peers = {*meeting.receiver};
      return fact;
    }
    Fact fact = fact_of(FactKind::gave_bad, sighting, ranks);
    name_collective(fact, sighting, meeting);
    return fact;
  }

  static void name_collective(Fact& fact, const Sighting& sighting, const Meeting& meeting) {
    fact.op = sighting.op;
    fact.module = sighting.module;
    fact.group = sighting.crossing->group;
    fact.peers = meeting.givers;
  }

  /// Members that did not report their input to the collective.
  std::set<int> silent_mates(const BoundaryEvent& event) const {
    std::set<int> silent;
    if (event.role != RoleKind::sent) return silent;
    const Meeting& meeting = crossings_.meetings()[event.meeting];
    for (const int rank : meeting.givers) {
      if (crossings_.given_by(rank, meeting) == Given::unknown) silent.insert(rank);
    }
    return silent;
  }

  void add_mates(Origin& origin, const BoundaryEvent& event, const std::set<int>& ranks) const {
    const Meeting& meeting = crossings_.meetings()[event.meeting];
    std::set<int> finite, unknown;
    for (const int rank : meeting.givers) {
      if (ranks.contains(rank)) continue;
      switch (crossings_.given_by(rank, meeting)) {
        case Given::finite:
          finite.insert(rank);
          break;
        case Given::unknown:
          unknown.insert(rank);
          break;
        case Given::bad:
          break;  // an origin of its own, or explained by an earlier one
      }
    }
    if (!finite.empty()) {
      origin.facts.push_back(
          {.kind = FactKind::mates_gave_finite, .ranks = {finite.begin(), finite.end()}});
    }
    if (!unknown.empty()) {
      origin.facts.push_back(
          {.kind = FactKind::mates_unknown, .ranks = {unknown.begin(), unknown.end()}});
    }
  }

  void add_weights(Origin& origin, const std::set<int>& ranks) const {
    const bool are_clean = std::ranges::all_of(ranks, [&](int each) {
      const RankEvidence* rank = incident_.find(each);
      return rank != nullptr && rank->scanned(Phase::params_before) &&
             rank->bad(Phase::params_before).empty();
    });
    if (are_clean) {
      origin.facts.push_back(
          {.kind = FactKind::weights_finite, .ranks = {ranks.begin(), ranks.end()}});
    }
  }

  // ---- bad when received, finite when sent ----

  void find_faults_between_ranks() {
    for (const Meeting& meeting : crossings_.meetings()) {
      if (!meeting.sent.empty() || meeting.received.empty()) continue;
      std::set<int> receivers, unknown;
      for (const std::size_t each : meeting.received) {
        receivers.insert(crossings_.events()[each].rank->rank());
      }
      for (const int rank : meeting.givers) {
        if (crossings_.given_by(rank, meeting) == Given::unknown) unknown.insert(rank);
      }
      const Sighting& sighting = *crossings_.events()[meeting.received.front()].sighting;
      const int replica = replica_of(*receivers.begin());
      if (sighting.phase <= Phase::backward && masked_.contains(replica)) continue;
      if (meeting.givers.empty() || !unknown.empty()) {
        // For reduced gradients, the gradient rules handle what silent ranks leave open.
        if (sighting.phase <= Phase::backward) {
          add_from_unknown(meeting, sighting, receivers, unknown, replica);
        }
      } else {
        add_between_ranks(meeting, sighting, receivers, replica);
      }
    }
  }

  void add_between_ranks(const Meeting& meeting, const Sighting& sighting,
                         const std::set<int>& receivers, int replica) {
    const std::string parameter = sighting.phase > Phase::backward
                                      ? reduced_parameter(sighting, *receivers.begin())
                                      : std::string();
    std::set<std::string_view> parameters;
    if (!parameter.empty()) parameters.insert(parameter);
    auto overflow = !meeting.receiver && meeting.kind && is_reduction(*meeting.kind)
                        ? overflow_of_sum(incident_, sighting, meeting.givers, parameters)
                        : std::nullopt;
    std::set<int> clean(meeting.givers.begin(), meeting.givers.end());
    for (const int rank : receivers) clean.erase(rank);
    // A reduce-scatter of gradients gives each member a sum of its own, to which all members
    // contribute.
    const bool is_own_sum = sighting.phase == Phase::grad_reduced && meeting.kind &&
                            is_reduction(*meeting.kind) &&
                            !gives_all_members_the_same(*meeting.kind) && !clean.empty();
    const bool is_own_copy = !meeting.receiver && !clean.empty() && !is_own_sum;
    const std::vector<int> received(receivers.begin(), receivers.end());
    const std::vector<int>& candidates = is_own_sum ? meeting.givers : received;
    Origin origin =
        make_origin(incident_, sighting.phase,
                    meeting.receiver           ? Cause::pipeline_transfer
                    : overflow && !is_own_copy ? Cause::collective_sum
                                               : Cause::collective_result,
                    candidates.size() == 1 ? Confidence::high : Confidence::medium, candidates);
    set_place(origin, sighting);
    origin.parameter = parameter;
    Facts& facts = origin.facts;
    if (meeting.receiver) {
      facts.push_back(fact_of(FactKind::message_changed, sighting, received));
      facts.back().peers = meeting.givers;
    } else {
      facts.push_back(fact_of(FactKind::collective_changed, sighting, received));
      name_collective(facts.back(), sighting, meeting);
      facts.push_back(is_own_sum ? Fact{.kind = FactKind::only_owner_keeps_sum, .ranks = received}
                      : is_own_copy ? Fact{.kind = FactKind::own_copy_bad,
                                           .ranks = received,
                                           .peers = {clean.begin(), clean.end()}}
                                    : Fact{.kind = FactKind::every_member_bad});
    }
    if (overflow) facts.push_back(*std::move(overflow));
    add(std::move(origin), FoundIn::received, sighting, replica);
  }

  /// The parameter whose gradient a reduction returned: the only bad one of that shape after it
  /// (tied embeddings are reduced one by one), or the only one of that module.
  std::string reduced_parameter(const Sighting& sighting, int receiver) const {
    if (!sighting.parameter.empty()) return sighting.parameter;
    const RankEvidence* const rank = incident_.find(receiver);
    std::set<std::string> of_shape, of_module;
    for (const Phase phase : {Phase::grad_reduced, Phase::grad_norm}) {
      for (const BadParameter& bad : rank->bad(phase)) {
        if (rank->status(Phase::grad_local, bad.name) == Status::bad) continue;
        if (bad.sighting->shape == sighting.shape) of_shape.insert(bad.name);
        if (bad.name.starts_with(sighting.module)) of_module.insert(bad.name);
      }
    }
    if (of_shape.size() == 1) return *of_shape.begin();
    return of_module.size() == 1 ? *of_module.begin() : "";
  }

  void add_from_unknown(const Meeting& meeting, const Sighting& sighting,
                        const std::set<int>& receivers, const std::set<int>& unknown, int replica) {
    std::set<int> candidates = receivers;
    candidates.insert(unknown.begin(), unknown.end());
    Origin origin = make_origin(incident_, sighting.phase, Cause::unknown, Confidence::low,
                                {candidates.begin(), candidates.end()});
    set_place(origin, sighting);
    Fact fact =
        fact_of(FactKind::received_from_unknown, sighting, {receivers.begin(), receivers.end()});
    if (!meeting.receiver) name_collective(fact, sighting, meeting);
    fact.peers.assign(unknown.begin(), unknown.end());
    origin.facts.push_back(std::move(fact));
    add(std::move(origin), FoundIn::unseen, sighting, replica);
  }

  // ---- silent ranks ----

  /// A silent rank may have received what it sent. If the replica has a certain origin that is not
  /// later, that origin is the source; otherwise all such values are one origin, because nothing
  /// orders them.
  void settle_what_silent_ranks_sent() {
    std::vector<Draft> certain, unseen;
    for (Draft& draft : drafts_) {
      (draft.found.found_in == FoundIn::unseen ? unseen : certain).push_back(std::move(draft));
    }
    const EarliestOrigins earliest(certain);
    std::map<int, Draft> folded;
    std::map<int, std::set<int>> candidates;
    for (Draft& draft : unseen) {
      if (const auto source = earliest.source_of(draft)) {
        Origin& origin = certain[*source].found.origin;
        fold_into(origin, draft.found.origin);
        origin.place_confidence = std::min(origin.place_confidence, Confidence::medium);
        continue;
      }
      candidates[draft.replica].insert(draft.found.origin.candidates.begin(),
                                       draft.found.origin.candidates.end());
      const auto [entry, is_new] = folded.try_emplace(draft.replica, std::move(draft));
      if (is_new) continue;
      fold_into(entry->second.found.origin, draft.found.origin);
      entry->second.found.microbatches.merge(draft.found.microbatches);
    }
    drafts_ = std::move(certain);
    for (auto& [replica, draft] : folded) {
      candidates[replica].merge(blind_in(replica));
      set_candidates(draft.found.origin, incident_,
                     {candidates[replica].begin(), candidates[replica].end()});
      drafts_.push_back(std::move(draft));
    }
  }

  /// The origin of the earliest phase for each replica and microbatch.
  class EarliestOrigins {
   public:
    explicit EarliestOrigins(const std::vector<Draft>& drafts) : drafts_(drafts) {
      for (std::size_t i = 0; i < drafts.size(); ++i) {
        const int microbatch = drafts[i].found.origin.microbatch.value_or(kUnknown);
        for (const int each : {microbatch, kAny}) {
          const auto [entry, is_new] = earliest_.try_emplace({drafts[i].replica, each}, i);
          if (!is_new && phase_of(i) < phase_of(entry->second)) entry->second = i;
        }
      }
    }

    /// The origin that may be the source of what `draft` sent.
    [[nodiscard]] std::optional<std::size_t> source_of(const Draft& draft) const {
      const auto microbatch = draft.found.origin.microbatch;
      for (const int each : {microbatch.value_or(kAny), kUnknown}) {
        const auto found = earliest_.find({draft.replica, each});
        if (found != earliest_.end() && phase_of(found->second) <= draft.found.origin.phase) {
          return found->second;
        }
      }
      return std::nullopt;
    }

   private:
    static constexpr int kUnknown = -1;
    static constexpr int kAny = -2;
    [[nodiscard]] Phase phase_of(std::size_t i) const { return drafts_[i].found.origin.phase; }

    const std::vector<Draft>& drafts_;
    std::map<std::pair<int, int>, std::size_t> earliest_;  // by replica and microbatch
  };

  static void fold_into(Origin& origin, const Origin& other) {
    const auto folded = std::ranges::count(origin.facts, FactSource::folded, &Fact::source);
    if (folded >= kMostFolded) return;
    Fact seen = other.facts.front();
    seen.source = FactSource::folded;
    origin.facts.push_back(std::move(seen));
  }

  // ---- microbatches ----

  /// A deterministic operator fails in each microbatch: one origin, listed under the first of them.
  void fold_microbatches() {
    std::vector<Draft> folded;
    std::map<CrossingIdentity, std::size_t> known;
    std::ranges::stable_sort(
        drafts_, {}, [](const Draft& draft) { return draft.found.origin.microbatch.value_or(-1); });
    for (Draft& draft : drafts_) {
      const Origin& origin = draft.found.origin;
      const auto [entry, is_new] =
          known.try_emplace({origin.candidates, draft.found.found_in, origin.phase, origin.cause,
                             origin.chunk.value_or(-1), origin.module, origin.op, draft.group},
                            folded.size());
      if (is_new) {
        folded.push_back(std::move(draft));
      } else {
        folded[entry->second].found.microbatches.merge(draft.found.microbatches);
      }
    }
    drafts_ = std::move(folded);
    for (Draft& draft : drafts_) {
      const std::size_t count = draft.found.microbatches.size();
      if (count < 2) continue;
      draft.found.origin.facts.push_back(
          {.kind = FactKind::same_in_microbatches, .count = static_cast<std::int64_t>(count)});
    }
  }

  // ---- collectives ----

  /// Some ranks alone receive bad results of the same collective again and again: the first one
  /// leads.
  void fold_repeated() {
    std::map<std::tuple<std::vector<int>, Cause, std::string, std::string>, std::size_t> known;
    std::vector<FoundOrigin> kept;
    for (FoundOrigin& each : found_.origins) {
      const Fact& fact = each.origin.facts.front();
      if (each.found_in == FoundIn::received && fact.kind == FactKind::collective_changed) {
        const auto [entry, is_new] = known.try_emplace(
            {each.origin.candidates, each.origin.cause, fact.op, fact.group}, kept.size());
        if (!is_new) {
          add_elsewhere(kept[entry->second].origin, FactKind::same_collective_elsewhere,
                        place_of(each.origin));
          kept[entry->second].microbatches.merge(each.microbatches);
          continue;
        }
      }
      kept.push_back(std::move(each));
    }
    found_.origins = std::move(kept);
  }

  /// A rank puts the bad result of a reduction into the next one.
  void follow_bad_reductions() {
    for (const FoundOrigin& each : found_.origins) {
      if (each.found_in != FoundIn::received || each.origin.phase != Phase::grad_reduced) continue;
      const std::vector<int>& receivers = each.origin.facts.front().ranks;
      found_.badly_reduced.insert(receivers.begin(), receivers.end());
    }
    const auto is_spoiled = [&](std::size_t event) {
      return found_.badly_reduced.contains(crossings_.events()[event].rank->rank());
    };
    std::size_t known = 0;
    while (known != found_.badly_reduced.size()) {
      known = found_.badly_reduced.size();
      for (const Meeting& meeting : crossings_.meetings()) {
        if (meeting.sent.empty() || !std::ranges::all_of(meeting.sent, is_spoiled)) continue;
        for (const std::size_t event : meeting.received) {
          const BoundaryEvent& received = crossings_.events()[event];
          if (received.sighting->phase != Phase::grad_reduced) continue;
          found_.badly_reduced.insert(received.rank->rank());
        }
      }
    }
  }

  // ---- shared ----

  static void set_place(Origin& origin, const Sighting& sighting) {
    origin.direction = direction_of(sighting.phase);
    origin.microbatch = sighting.microbatch;
    origin.chunk = sighting.chunk;
    origin.module = sighting.module;
    // A send is only where the bad value was first seen; its birth was earlier.
    if (sighting.role.kind() != RoleKind::sent) origin.op = sighting.op;
    origin.tensor = tensor_of(sighting);
  }

  void add(Origin origin, FoundIn found_in, const Sighting& sighting, int replica) {
    Draft draft;
    draft.found.origin = std::move(origin);
    draft.found.found_in = found_in;
    if (sighting.microbatch) draft.found.microbatches.insert(*sighting.microbatch);
    draft.found.position = sighting.position;
    draft.replica = replica;
    if (sighting.crossing) draft.group = sighting.crossing->group;
    drafts_.push_back(std::move(draft));
  }

  const Incident& incident_;
  const Crossings& crossings_;
  std::map<int, std::vector<int>> blind_by_replica_;
  std::set<int> masked_;
  std::vector<Draft> drafts_;
  BoundaryOrigins found_;
};

}  // namespace

BoundaryOrigins find_boundary_origins(const Incident& incident, const Crossings& crossings) {
  if (crossings.events().empty()) return {};
  return Finder(incident, crossings).run();
}

}  // namespace nanlocator::inline locate_room
