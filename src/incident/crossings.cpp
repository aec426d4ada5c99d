#include "incident/crossings.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <set>
#include <utility>

namespace nanlocator::inline incident_room {
namespace {

constexpr std::size_t kMostUnseenLanes = 64;

bool has_number(const RankList& list, std::int64_t number) {
  return std::ranges::any_of(list.runs(), [&](const RankRun& run) {
    return run.first <= number && number <= run.last && (number - run.first) % run.step == 0;
  });
}

/// True for any level that scans crossings, even if there were none, as on a single GPU.
bool has_boundaries(const Ledger& ledger) {
  return ledger.level == "boundaries" || !ledger.crossings.empty() ||
         std::ranges::any_of(ledger.sightings,
                             [](const Sighting& each) { return each.crossing.has_value(); });
}

/// Phases with crossings; reductions of gradients are the last.
bool is_crossing_phase(Phase phase) {
  return phase == Phase::forward || phase == Phase::loss || phase == Phase::backward ||
         phase == Phase::grad_reduced;
}

std::optional<RoleKind> role_of(const Sighting& sighting) {
  if (sighting.stats.is_finite()) return std::nullopt;
  if (sighting.crossing && is_crossing_phase(sighting.phase)) {
    const RoleKind kind = sighting.role.kind();
    if (kind == RoleKind::sent || kind == RoleKind::received) return kind;
  }
  const bool is_loss =
      !sighting.crossing && sighting.phase == Phase::loss && sighting.role.kind() == RoleKind::loss;
  return is_loss ? std::optional(RoleKind::loss) : std::nullopt;
}

/// Sequence parallelism gathers before each layer and scatters after it.
bool is_of_sequence_parallelism(std::optional<CollectiveKind> kind) {
  return kind == CollectiveKind::all_gather || kind == CollectiveKind::reduce_scatter;
}

constexpr int kAnyMicrobatch = -1;

/// The microbatches that had bad values; a sighting without a number may belong to any.
class SeenMicrobatches {
 public:
  void add(const Sighting& sighting) {
    is_any_ = true;
    if (sighting.microbatch) {
      numbers_.insert(*sighting.microbatch);
    } else {
      has_unknown_ = true;
    }
  }
  /// Adds its microbatch and all later ones.
  void add_from(const Sighting& sighting) {
    is_any_ = true;
    first_of_all_ = std::min(first_of_all_, sighting.microbatch.value_or(0));
  }
  [[nodiscard]] bool may_hold(const Sighting& sighting) const {
    if (!sighting.microbatch) return is_any_;
    return has_unknown_ || *sighting.microbatch >= first_of_all_ ||
           numbers_.contains(*sighting.microbatch);
  }

 private:
  int first_of_all_ = std::numeric_limits<int>::max();
  std::unordered_set<int> numbers_;
  bool has_unknown_ = false;
  bool is_any_ = false;
};

}  // namespace

Crossings::Crossings(const Incident& incident) : world_size_(incident.world_size()) {
  for (const RankEvidence& rank : incident.ranks()) {
    remember_bad_weights(rank);
    remember_bad_gathers(rank);
  }
  for (const RankEvidence& rank : incident.ranks()) {
    if (!has_boundaries(rank.ledger())) continue;
    const std::size_t first = events_.size();
    take(rank);
    explain_on(std::span(events_).subspan(first));
  }
  explain_received();
  explain_by_gathers();
}

bool Crossings::is_watching(const RankEvidence& rank) noexcept {
  return rank.ledger().is_complete &&
         (rank.ledger().level == "boundaries" || !rank.ledger().crossings.empty());
}

/// A bad shard is bad on every rank that gathers it.
void Crossings::remember_bad_weights(const RankEvidence& rank) {
  for (const BadParameter& bad : rank.bad(Phase::params_before)) {
    ranks_with_bad_weights_.insert(rank.rank());
    if (!bad.position) continue;
    const RankList& gathering = rank.parameter(*bad.position).shard_group;
    for (const int each : gathering.ranks_below(world_size_)) ranks_with_bad_weights_.insert(each);
  }
}

/// For weights: bad values in a shard or in its padding arrive bad and are no evidence about the
/// gather.
void Crossings::remember_bad_gathers(const RankEvidence& rank) {
  for (const Sighting& sighting : rank.ledger().sightings) {
    const auto& crossing = sighting.crossing;
    if (!crossing || !crossing->carries_weights || role_of(sighting) != RoleKind::sent) continue;
    bad_gathers_.emplace(group_of(crossing->group, crossing->members), crossing->sequence);
  }
}

std::size_t Crossings::group_of(const std::string& name, const RankList& members) {
  return groups_.try_emplace({name, members}, groups_.size()).first->second;
}

void Crossings::take(const RankEvidence& rank) {
  for (const CrossingCoverage& coverage : rank.ledger().crossings) {
    // Values missing from a cut-off ledger are unknown, not finite.
    const bool is_only_sent = coverage.peer && coverage.role.kind() == RoleKind::sent;
    if (!coverage.is_whole() && !is_only_sent) unseen_[rank.rank()].push_back(&coverage);
    if (coverage.role.kind() != RoleKind::sent || !rank.ledger().is_complete) continue;
    auto& scanned = sent_[{rank.rank(), group_of(coverage.group, coverage.members),
                           coverage.peer.value_or(-1)}];
    scanned.first = coverage.first;
    scanned.count = std::max(scanned.count, coverage.count);
    scanned.unseen = &coverage.not_scanned;
  }
  for (const Sighting& sighting : rank.ledger().sightings) {
    const auto role = role_of(sighting);
    if (!role || is_of_bad_gather(sighting)) continue;
    if (sighting.phase <= Phase::backward) bad_ranks_.insert(rank.rank());
    if (*role == RoleKind::loss) {
      events_.push_back({.rank = &rank, .sighting = &sighting, .role = *role});
    } else {
      take_crossing(rank, sighting, *role);
    }
  }
}

bool Crossings::is_of_bad_gather(const Sighting& sighting) {
  const auto& crossing = sighting.crossing;
  return crossing && crossing->carries_weights &&
         bad_gathers_.contains({group_of(crossing->group, crossing->members), crossing->sequence});
}

void Crossings::take_crossing(const RankEvidence& rank, const Sighting& sighting, RoleKind role) {
  const Crossing& crossing = *sighting.crossing;
  const std::size_t group = group_of(crossing.group, crossing.members);
  MeetingKey key{.group = group, .sequence = crossing.sequence};
  if (crossing.peer) {
    key.sender = role == RoleKind::sent ? rank.rank() : *crossing.peer;
    key.receiver = role == RoleKind::sent ? *crossing.peer : rank.rank();
  }
  const auto [entry, is_new] = meeting_by_key_.try_emplace(key, meetings_.size());
  if (is_new) {
    Meeting meeting;
    meeting.crossing = &crossing;
    meeting.kind = collective_kind_of(sighting.op);
    if (!crossing.peer) {
      meeting.givers = crossing.members.ranks_below(world_size_);
    } else {
      if (key.sender >= 0 && key.sender < world_size_) meeting.givers = {key.sender};
      meeting.receiver = key.receiver;
    }
    meetings_.push_back(std::move(meeting));
    group_of_meeting_.push_back(group);
  }
  if (is_of_sequence_parallelism(collective_kind_of(sighting.op))) gathering_groups_.insert(group);
  Meeting& meeting = meetings_[entry->second];
  (role == RoleKind::sent ? meeting.sent : meeting.received).push_back(events_.size());
  events_.push_back({.rank = &rank, .sighting = &sighting, .role = role, .meeting = entry->second});
}

bool are_weights(const BoundaryEvent& event) {
  const auto& crossing = event.sighting->crossing;
  return event.role == RoleKind::received && crossing && crossing->carries_weights;
}

/// Applies program order on one rank. Crossings are in execution order. A loss, which is scanned
/// after the pass, is placed between the forward and the backward of its microbatch. Gathered
/// weights may also be used in later microbatches.
void Crossings::explain_on(std::span<BoundaryEvent> events_of_rank) {
  if (events_of_rank.empty()) return;
  const RankEvidence& rank = *events_of_rank.front().rank;
  const bool has_bad_weights = ranks_with_bad_weights_.contains(rank.rank());
  SeenMicrobatches forward, losses, before;
  for (const BoundaryEvent& event : events_of_rank) {
    if (event.role == RoleKind::loss) {
      losses.add(*event.sighting);
    } else if (event.sighting->phase <= Phase::loss) {
      are_weights(event) ? forward.add_from(*event.sighting) : forward.add(*event.sighting);
    }
  }
  for (BoundaryEvent& event : events_of_rank) {
    const Sighting& sighting = *event.sighting;
    switch (event.role) {
      case RoleKind::loss:
        event.is_explained = has_bad_weights || forward.may_hold(sighting);
        break;
      case RoleKind::sent:
        event.is_explained = has_bad_weights || before.may_hold(sighting) ||
                             (sighting.phase >= Phase::backward && losses.may_hold(sighting));
        break;
      case RoleKind::received:
      case RoleKind::described:
        break;  // explain_received does it, by the senders
    }
    // Weights count for any microbatch, because the schedule may use them in any order.
    if (event.role != RoleKind::loss) before.add(are_weights(event) ? Sighting{} : sighting);
  }
}

void Crossings::explain_received() {
  for (const Meeting& meeting : meetings_) {
    if (meeting.sent.empty()) continue;
    for (const std::size_t event : meeting.received) events_[event].is_explained = true;
  }
}

/// A member's input to an all-gather arrives on all members, where it is not scanned: it explains
/// their inputs to the group's later collectives, and their losses.
void Crossings::explain_by_gathers() {
  std::map<std::pair<std::size_t, int>, std::int64_t> first;  // by group and microbatch
  std::set<std::pair<std::size_t, int>> told;                 // those before a loss
  std::map<int, SeenMicrobatches> before_loss;                // by rank
  for (std::size_t i = 0; i < meetings_.size(); ++i) {
    for (const std::size_t event : meetings_[i].sent) {
      const Sighting& sighting = *events_[event].sighting;
      if (meetings_[i].kind != CollectiveKind::all_gather) break;
      const auto sequence = meetings_[i].crossing->sequence;
      for (const int microbatch : {sighting.microbatch.value_or(kAnyMicrobatch), kAnyMicrobatch}) {
        const std::pair key(group_of_meeting_[i], microbatch);
        const auto entry = first.try_emplace(key, sequence).first;
        entry->second = std::min(entry->second, sequence);
        if (sighting.phase > Phase::loss || !told.insert(key).second) continue;
        for (const int rank : meetings_[i].givers) before_loss[rank].add(sighting);
      }
    }
  }
  if (first.empty()) return;
  for (BoundaryEvent& event : events_) {
    const Sighting& sighting = *event.sighting;
    if (event.role == RoleKind::loss) {
      const auto gathered = before_loss.find(event.rank->rank());
      event.is_explained |= gathered != before_loss.end() && gathered->second.may_hold(sighting);
    } else if (event.role == RoleKind::sent) {
      const auto gathered = first.find(
          {group_of_meeting_[event.meeting], sighting.microbatch.value_or(kAnyMicrobatch)});
      event.is_explained |=
          gathered != first.end() && gathered->second < sighting.crossing->sequence;
    }
  }
}

bool Crossings::may_have_gathered(const Meeting& meeting) const {
  return gathering_groups_.contains(
      group_of_meeting_[static_cast<std::size_t>(&meeting - meetings_.data())]);
}

Given Crossings::given_by(int rank, const Meeting& meeting) const {
  const auto rank_of = [&](std::size_t event) { return events_[event].rank->rank(); };
  if (std::ranges::binary_search(meeting.sent, rank, {}, rank_of)) return Given::bad;
  const std::size_t group =
      group_of_meeting_[static_cast<std::size_t>(&meeting - meetings_.data())];
  const auto scanned = sent_.find({rank, group, meeting.receiver.value_or(-1)});
  const auto sequence = meeting.crossing->sequence;
  const bool has_scanned = scanned != sent_.end() && scanned->second.first <= sequence &&
                           scanned->second.count > sequence &&
                           !has_number(*scanned->second.unseen, sequence);
  return has_scanned ? Given::finite : Given::unknown;
}

/// The order of a rank's crossings in different groups is unknown; those of the event's own group
/// are numbered.
UnseenReceipt Crossings::unseen_before(const BoundaryEvent& event) const {
  UnseenReceipt unseen;
  const auto lanes = unseen_.find(event.rank->rank());
  if (lanes == unseen_.end()) return unseen;
  const auto& crossing = event.sighting->crossing;
  bool is_shared = true;
  const bool are_too_many = lanes->second.size() > kMostUnseenLanes;  // no job has so many groups
  for (const CrossingCoverage* lane : lanes->second) {
    if (are_too_many) break;
    const bool is_same_lane = crossing && !crossing->peer && !lane->peer &&
                              lane->group == crossing->group && lane->members == crossing->members;
    if (is_same_lane && !lane->has_unwatched &&
        lane->not_scanned.runs().front().first >= crossing->sequence) {
      continue;
    }
    const auto givers =
        lane->peer ? std::vector{*lane->peer} : lane->members.ranks_below(world_size_);
    unseen.from.insert(givers.begin(), givers.end());
    is_shared = is_shared && is_same_lane && !lane->is_unseen_by_member && !lane->has_unwatched;
  }
  for (int rank = 0; are_too_many && rank < world_size_; ++rank) unseen.from.insert(rank);
  if (is_shared && !are_too_many) unseen.shared_by = unseen.from;
  unseen.from.erase(event.rank->rank());
  return unseen;
}

}  // namespace nanlocator::inline incident_room
