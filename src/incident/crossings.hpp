// Bad values that crossed between ranks, and which of them no earlier one explains.
//
// In: the bad sightings of level `boundaries` (inputs and results of collectives and pipeline
// messages, losses) and the number of crossings that each rank scanned. Out: these events joined
// over the ranks by collective and message, each marked if an earlier one explains it.
// docs/causes.md has the rules. Cost: n log n in the ledgers' size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "incident/incident.hpp"
#include "nanlocator/record/collective_kind.hpp"

namespace nanlocator::inline incident_room {

/// One collective, or one message between two ranks. Indices are into Crossings::events().
struct Meeting {
  const Crossing* crossing = nullptr;  // that of its first event
  std::optional<CollectiveKind> kind;  // from its operator, if known
  std::vector<int> givers;             // ranks with an input: the members, or the sender; ascending
  std::optional<int> receiver;         // only for a message
  std::vector<std::size_t> sent;       // bad, by rank
  std::vector<std::size_t> received;   // bad, by rank
};

/// A bad value at a rank's boundary.
struct BoundaryEvent {
  const RankEvidence* rank = nullptr;
  const Sighting* sighting = nullptr;
  RoleKind role = RoleKind::sent;  // sent, received or loss
  std::size_t meeting = 0;         // into Crossings::meetings(); meaningless for a loss
  bool is_explained = false;
};

/// A rank's input to a meeting. `unknown`: the rank did not answer, its ledger is cut off, or it
/// did not scan the input.
enum class Given : std::uint8_t { finite, bad, unknown };

/// Something that a rank received and no rank could scan.
struct UnseenReceipt {
  std::set<int> from;  // ranks whose input may have been bad
  /// All of these ranks received the same; empty if each received something different.
  std::set<int> shared_by;
};

/// The incident must outlive it.
class Crossings {
 public:
  explicit Crossings(const Incident& incident);
  Crossings(const Crossings&) = delete;
  Crossings& operator=(const Crossings&) = delete;

  /// Ordered by rank, then by execution.
  [[nodiscard]] std::span<const BoundaryEvent> events() const noexcept { return events_; }
  [[nodiscard]] std::span<const Meeting> meetings() const noexcept { return meetings_; }
  [[nodiscard]] Given given_by(int rank, const Meeting& meeting) const;
  /// True if the members also gather from each other, which is scanned only on the sender.
  [[nodiscard]] bool may_have_gathered(const Meeting& meeting) const;
  /// What `event`'s rank may have received unscanned before it; if the order is unknown, it counts
  /// as before. Empty `from`: everything was scanned.
  [[nodiscard]] UnseenReceipt unseen_before(const BoundaryEvent& event) const;
  [[nodiscard]] bool has_unseen(int rank) const { return unseen_.contains(rank); }
  /// True if the rank scanned crossings and its ledger is complete.
  [[nodiscard]] static bool is_watching(const RankEvidence& rank) noexcept;
  /// True if something bad crossed on the rank, or its loss was bad, before its gradients were
  /// reduced.
  [[nodiscard]] bool has_bad_activations(int rank) const { return bad_ranks_.contains(rank); }

 private:
  struct MeetingKey {
    std::size_t group = 0;
    int sender = -1;  // -1: a collective
    int receiver = -1;
    std::int64_t sequence = 0;
    friend auto operator<=>(const MeetingKey&, const MeetingKey&) = default;
  };
  struct CoverageKey {
    int rank = 0;
    std::size_t group = 0;
    int peer = -1;  // -1: a collective
    friend auto operator<=>(const CoverageKey&, const CoverageKey&) = default;
  };
  using Group = std::pair<std::string, RankList>;  // name, members

  std::size_t group_of(const std::string& name, const RankList& members);
  void remember_bad_weights(const RankEvidence& rank);
  void remember_bad_gathers(const RankEvidence& rank);
  void take(const RankEvidence& rank);
  bool is_of_bad_gather(const Sighting& sighting);
  void take_crossing(const RankEvidence& rank, const Sighting& sighting, RoleKind role);
  void explain_on(std::span<BoundaryEvent> events_of_rank);
  void explain_received();
  void explain_by_gathers();

  int world_size_;
  std::map<Group, std::size_t> groups_;
  std::map<MeetingKey, std::size_t> meeting_by_key_;
  std::vector<Meeting> meetings_;
  std::vector<std::size_t> group_of_meeting_;
  std::unordered_set<std::size_t> gathering_groups_;
  struct Scanned {
    std::int64_t first = 0;
    std::int64_t count = 0;
    const RankList* unseen = nullptr;  // sequences
  };
  std::map<CoverageKey, Scanned> sent_;
  std::map<int, std::vector<const CrossingCoverage*>> unseen_;  // by rank
  std::vector<BoundaryEvent> events_;
  std::unordered_set<int> bad_ranks_;
  std::unordered_set<int> ranks_with_bad_weights_;
  std::set<std::pair<std::size_t, std::int64_t>> bad_gathers_;  // group, sequence
};

}  // namespace nanlocator::inline incident_room
