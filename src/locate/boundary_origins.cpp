#include "locate/boundary_origins.hpp"

#include <algorithm>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

#include "locate/origin_text.hpp"

namespace nanlocator {
namespace {

/// Sentences of origins that were folded into one, beyond its own.
constexpr std::size_t kMostFolded = 4;

/// Ranks that hold the same place but for tensor parallelism, at one point of the program: without
/// sequence parallelism they compute the same from the same, so where all of them are bad at once
/// nothing tells them apart.
using Lockstep =
    std::tuple<int, int, int, Phase, int, int, std::string, std::string, std::string, std::int64_t>;

/// What makes the same fault of several microbatches one.
using Identity =
    std::tuple<std::vector<int>, FoundIn, Phase, Cause, int, std::string, std::string, std::string>;

/// "activations", or what else is handed on in the phase.
std::string cargo_of(Phase phase) {
  switch (phase) {
    case Phase::forward:
      return "activations";
    case Phase::backward:
      return "gradients";
    case Phase::grad_reduced:
      return "parameter gradients";
    default:
      return "values";
  }
}

std::string microbatch_text(const Sighting& sighting) {
  return sighting.microbatch ? " of microbatch " + std::to_string(*sighting.microbatch) : "";
}

/// "12 NaN of 8,192".
std::string share_text(const TensorStats& stats) {
  return describe_bad(stats) + " of " + counted(stats.numel);
}

/// "the all_reduce of module decoder.layers.1.mlp.linear_fc2 (tp, ranks 2-3)".
std::string collective_text(const Sighting& sighting, const Meeting& meeting) {
  std::string text = sighting.op.empty() ? "a collective" : "the " + sighting.op;
  if (!sighting.module.empty()) text += " of module " + sighting.module;
  return text + " (" + sighting.crossing->group + ", " +
         describe_rank_count({meeting.givers.begin(), meeting.givers.end()}) + ")";
}

class Finder {
 public:
  Finder(const Incident& incident, const Crossings& crossings)
      : incident_(incident), crossings_(crossings) {}

  BoundaryOrigins run() {
    drop_healed_replicas();
    find_births_on_ranks();
    find_faults_between_ranks();
    settle_what_silent_ranks_passed_on();
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

  /// Ranks of the replica, and ranks of unknown place, that did not say what they handed on.
  std::set<int> blind_in(int replica) const {
    std::set<int> blind(incident_.unplaced().begin(), incident_.unplaced().end());
    const auto found = blind_by_replica_.find(replica);
    if (found != blind_by_replica_.end()) blind.insert(found->second.begin(), found->second.end());
    return blind;
  }

  // ---- what was bad and did no harm ----

  /// A bad value that reached neither a loss nor a gradient was masked, and meant or harmless: it
  /// explains nothing. Said only where every rank of the replica answered.
  void drop_healed_replicas() {
    std::map<int, bool> is_harmful;
    for (const Place& place : incident_.places()) {
      const int replica = incident_.replica_of(place);
      if (is_blind(place)) {
        is_harmful[replica] = true;
        blind_by_replica_[replica].push_back(place.rank);
        continue;
      }
      if (!crossings_.has_bad_activations(place.rank)) continue;
      is_harmful[replica] |= !place.evidence->looked_at(Phase::grad_local) ||
                             !place.evidence->bad(Phase::grad_local).empty();
    }
    for (const BoundaryEvent& event : crossings_.events()) {
      if (event.role == BoundaryRole::loss) is_harmful[replica_of(event.rank->rank())] = true;
    }
    std::set<int> healed;
    for (const BoundaryEvent& event : crossings_.events()) {
      if (event.sighting->phase > Phase::backward) continue;
      const int replica = replica_of(event.rank->rank());
      if (is_harmful[replica] || !incident_.unplaced().empty()) continue;
      healed_.insert(replica);
      healed.insert(event.rank->rank());
    }
    if (healed.empty()) return;
    found_.notes.push_back("what " + describe_rank_count(healed) +
                           " handed on was not finite, but reached neither a loss nor a gradient: "
                           "it was masked, and counts as meant");
  }

  // ---- born on a rank: sent, or a loss, with nothing before it ----

  void find_births_on_ranks() {
    std::map<Lockstep, std::vector<const BoundaryEvent*>> groups;
    for (const BoundaryEvent& event : crossings_.events()) {
      const Sighting& sighting = *event.sighting;
      if (event.is_explained || event.role == BoundaryRole::received) continue;
      if (sighting.phase > Phase::backward) continue;  // the gradient rules judge those
      if (healed_.contains(replica_of(event.rank->rank()))) continue;
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
    const bool is_loss = first.role == BoundaryRole::loss;
    std::set<int> ranks;
    bool is_whole = true;
    for (const BoundaryEvent* event : events) {
      ranks.insert(event->rank->rank());
      is_whole &= event->rank->ledger().is_complete;
    }
    const int replica = replica_of(first.rank->rank());
    const bool is_empty_loss = is_loss && sighting.valid_labels == 0;
    const bool is_sure =
        is_whole && (is_empty_loss || (ranks.size() == 1 && !has_unknown_mates(first)));
    Origin origin = make_origin(incident_, sighting.phase,
                                is_empty_loss ? Cause::empty_loss_mask : Cause::unknown,
                                !is_whole ? Confidence::low
                                : is_sure ? Confidence::high
                                          : Confidence::medium,
                                {ranks.begin(), ranks.end()});
    set_place(origin, sighting);
    auto& evidence = origin.evidence;
    evidence.push_back(is_loss ? loss_text(sighting, ranks) : sent_text(first, ranks));
    evidence.push_back(
        is_loss ? "everything that crossed to and from " + describe_rank_count(ranks) +
                      " before it in this microbatch was finite: it was born there, between the "
                      "last of these crossings and the loss"
                : "everything that " + describe_rank_count(ranks) +
                      " had received before it in this microbatch was finite: it was born there, "
                      "between the last crossing and this one");
    if (ranks.size() > 1) {
      evidence.push_back(
          "these tensor-parallel ranks are bad at the same point of the program: they compute the "
          "same from the same there, or cannot be told apart");
    }
    if (!is_loss) add_mates(origin, first, ranks);
    add_weights(origin, ranks);
    if (!is_whole) {
      evidence.push_back(
          "the ledger is cut off: something bad that it received may be missing from it");
    }
    if (is_empty_loss) {
      origin.action =
          "guard the loss against a microbatch without valid labels: divide by max(count, 1)";
    } else {
      evidence.push_back("missing for the cause: the operator, which this level does not see");
      origin.action = "trace the operators of " + describe_rank_count(ranks) + " in " +
                      std::string(name_of(sighting.phase)) + microbatch_text(sighting) +
                      (sighting.module.empty() ? "" : ", before " + sighting.module + " hands on") +
                      ": repeat the step with level operators";
    }
    add(std::move(origin), is_whole ? FoundIn::sent : FoundIn::unseen, sighting, replica);
  }

  static std::string loss_text(const Sighting& sighting, const std::set<int>& ranks) {
    std::string text = "the loss" + microbatch_text(sighting) + " holds " +
                       describe_bad(sighting.stats) + " on " + describe_rank_count(ranks);
    if (sighting.valid_labels) {
      text += *sighting.valid_labels == 0
                  ? "; it counts no valid label: zero divided by zero"
                  : "; it counts " + counted(*sighting.valid_labels) + " valid labels";
    }
    return text;
  }

  std::string sent_text(const BoundaryEvent& event, const std::set<int>& ranks) const {
    const Sighting& sighting = *event.sighting;
    const Meeting& meeting = crossings_.meetings()[event.meeting];
    std::string text = describe_rank_count(ranks);
    if (meeting.receiver && ranks.size() == 1) {
      text += " sent " + share_text(sighting.stats) + " " + cargo_of(sighting.phase) +
              microbatch_text(sighting) + " to rank " + std::to_string(*meeting.receiver);
    } else if (meeting.receiver) {
      text += " each sent bad " + cargo_of(sighting.phase) + microbatch_text(sighting) +
              " on, the first " + share_text(sighting.stats);
    } else {
      text += " put " + share_text(sighting.stats) + " " + cargo_of(sighting.phase) +
              microbatch_text(sighting) + " into " + collective_text(sighting, meeting);
    }
    return text + ", in " + std::string(name_of(sighting.phase));
  }

  bool has_unknown_mates(const BoundaryEvent& event) const {
    if (event.role != BoundaryRole::sent) return false;
    const Meeting& meeting = crossings_.meetings()[event.meeting];
    return std::ranges::any_of(meeting.givers, [&](int rank) {
      return crossings_.given_by(rank, meeting) == Given::unknown;
    });
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
          break;  // an origin of its own, or explained by something earlier
      }
    }
    if (!finite.empty()) {
      origin.evidence.push_back("what " + describe_rank_count(finite) + " put into it was finite");
    }
    if (!unknown.empty()) {
      origin.evidence.push_back("what " + describe_rank_count(unknown) +
                                " put into it is not known");
    }
  }

  void add_weights(Origin& origin, const std::set<int>& ranks) const {
    const bool are_clean = std::ranges::all_of(ranks, [&](int each) {
      const RankEvidence* rank = incident_.find(each);
      return rank != nullptr && rank->looked_at(Phase::params_before) &&
             rank->bad(Phase::params_before).empty();
    });
    if (are_clean) {
      origin.evidence.push_back("the parameters of " + describe_rank_count(ranks) +
                                " were finite before the step");
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
      if (sighting.phase <= Phase::backward && healed_.contains(replica)) continue;
      if (meeting.givers.empty() || !unknown.empty()) {
        // Where gradients are reduced, the gradient rules know what silent ranks leave open.
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
    const bool is_sum = !meeting.receiver && sighting.op.find("reduce") != std::string::npos;
    const auto overflow =
        is_sum ? overflow_in_sum_hint(sighting, meeting.givers.size()) : std::nullopt;
    const std::set<int> givers(meeting.givers.begin(), meeting.givers.end());
    std::set<int> clean = givers;
    for (const int rank : receivers) clean.erase(rank);
    const bool is_own_copy = !meeting.receiver && !clean.empty();
    Origin origin = make_origin(incident_, sighting.phase,
                                meeting.receiver           ? Cause::pipeline_transfer
                                : overflow && !is_own_copy ? Cause::collective_sum
                                                           : Cause::collective_result,
                                receivers.size() == 1 ? Confidence::high : Confidence::medium,
                                {receivers.begin(), receivers.end()});
    set_place(origin, sighting);
    auto& evidence = origin.evidence;
    const std::string cargo = "finite " + cargo_of(sighting.phase) + microbatch_text(sighting);
    if (meeting.receiver) {
      evidence.push_back(describe_rank_count(givers) + " sent " + cargo + " to " +
                         describe_rank_count(receivers) + ", which received " +
                         share_text(sighting.stats));
      origin.action =
          "look at what touches the message between the two looks: a buffer that is freed or "
          "written to while " +
          describe_rank_count(givers) + " still sends it, the link, and the memory of " +
          describe_rank_count(receivers);
    } else {
      evidence.push_back(describe_rank_count(givers) + " put " + cargo + " into " +
                         collective_text(sighting, meeting) + ", and " +
                         describe_rank_count(receivers) + " got " + share_text(sighting.stats) +
                         " out of it");
      evidence.push_back(is_own_copy ? "what " + describe_rank_count(clean) +
                                           " got out of it is finite: its link, its "
                                           "memory, or the collective's last step on " +
                                           describe_rank_count(receivers)
                                     : "every member has it: the members cannot be told apart");
      origin.action = "repeat the collective on known values over " + describe_rank_count(givers) +
                      ", and check the links and the memory of " + describe_rank_count(receivers);
    }
    if (overflow) evidence.push_back(*overflow);
    add(std::move(origin), FoundIn::received, sighting, replica);
  }

  void add_from_unknown(const Meeting& meeting, const Sighting& sighting,
                        const std::set<int>& receivers, const std::set<int>& unknown, int replica) {
    std::set<int> candidates = receivers;
    candidates.insert(unknown.begin(), unknown.end());
    Origin origin = make_origin(incident_, sighting.phase, Cause::unknown, Confidence::low,
                                {candidates.begin(), candidates.end()});
    set_place(origin, sighting);
    origin.evidence.push_back(
        describe_rank_count(receivers) + " received " + share_text(sighting.stats) + " " +
        cargo_of(sighting.phase) + microbatch_text(sighting) +
        (meeting.receiver ? std::string() : " from " + collective_text(sighting, meeting)) + "; " +
        (unknown.empty() ? "who put them in is not known"
                         : "what " + describe_rank_count(unknown) + " put in is not known"));
    origin.action = "find out what happened to " +
                    describe_rank_count(unknown.empty() ? receivers : unknown) + " first";
    add(std::move(origin), FoundIn::unseen, sighting, replica);
  }

  // ---- silent ranks ----

  /// What a silent rank handed on it may have received. Where the replica has a certain origin that
  /// is not later, it was that; otherwise all of it is one origin, as nothing puts it in order.
  void settle_what_silent_ranks_passed_on() {
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
        origin.confidence = std::min(origin.confidence, Confidence::medium);
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

  /// Of each replica and microbatch, the origin of the earliest phase.
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

    /// Which of the origins may be what `draft` handed on.
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
    if (origin.evidence.size() < kMostFolded + 6) {
      origin.evidence.push_back("counted as the same: " + other.evidence.front());
    }
  }

  // ---- microbatches ----

  /// A deterministic operator is bad in each microbatch: one origin, told with the first of them.
  void fold_microbatches() {
    std::vector<Draft> folded;
    std::map<Identity, std::size_t> known;
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
      draft.found.origin.evidence.push_back(
          "the same in " + std::to_string(count) +
          " microbatches of this step; this is the first of them");
    }
  }

  // ---- both ----

  static void set_place(Origin& origin, const Sighting& sighting) {
    origin.direction = direction_of(sighting.phase);
    origin.microbatch = sighting.microbatch;
    origin.chunk = sighting.chunk;
    origin.module = sighting.module;
    // Of what was sent it is only where it was seen first: it was born before.
    if (sighting.role != kSent) origin.op = sighting.op;
    origin.tensor = tensor_of(sighting);
  }

  void add(Origin origin, FoundIn found_in, const Sighting& sighting, int replica) {
    Draft draft;
    draft.found.origin = std::move(origin);
    draft.found.found_in = found_in;
    if (sighting.microbatch) draft.found.microbatches.insert(*sighting.microbatch);
    draft.replica = replica;
    if (sighting.crossing) draft.group = sighting.crossing->group;
    drafts_.push_back(std::move(draft));
  }

  const Incident& incident_;
  const Crossings& crossings_;
  std::map<int, std::vector<int>> blind_by_replica_;
  std::set<int> healed_;
  std::vector<Draft> drafts_;
  BoundaryOrigins found_;
};

}  // namespace

BoundaryOrigins find_boundary_origins(const Incident& incident, const Crossings& crossings) {
  if (crossings.events().empty()) return {};
  return Finder(incident, crossings).run();
}

}  // namespace nanlocator
