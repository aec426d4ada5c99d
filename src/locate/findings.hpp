// What the rules share: the incident laid out by parameter and by place, and the origins found so
// far. Each *_rules file reads the one and adds to the other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "locate/boundary_origins.hpp"
#include "locate/crossings.hpp"
#include "locate/evidence.hpp"
#include "locate/found_origin.hpp"

namespace nanlocator::inline locate_room {

/// What the ranks hold in common: tensor-parallel duplicates over tp, tied parameters over the
/// pipeline (their gradients are reduced there, parallel to the data-parallel reduction).
struct ParameterKey {
  std::string name;  // "" for all tied parameters: the copies have different names
  int tp = -1;       // -1: of every tensor-parallel rank
  int pp = -1;       // -1: of every stage
  friend auto operator<=>(const ParameterKey&, const ParameterKey&) = default;
};
[[nodiscard]] ParameterKey key_of(const RankEvidence& rank, const BadParameter& bad);

struct BadOnRank {
  const RankEvidence* rank = nullptr;
  const BadParameter* bad = nullptr;
};
using BadByKey = std::map<ParameterKey, std::vector<BadOnRank>>;
using Places = std::vector<const Place*>;

/// The ledgers must outlive it.
class Findings {
 public:
  /// A verdict is read by people: what one fault can fill with thousands of entries is cut here,
  /// and a note says so.
  static constexpr std::size_t kMostOriginsPerPhase = 64;
  static constexpr std::size_t kMostIsolatedPerRank = 16;

  /// Throws as Incident does.
  Findings(std::span<const Ledger> ledgers, int world_size);
  Findings(const Findings&) = delete;  // its parts point into each other
  Findings& operator=(const Findings&) = delete;

  // ---- what was seen ----

  [[nodiscard]] const Incident& incident() const noexcept { return incident_; }
  [[nodiscard]] const Crossings& crossings() const noexcept { return crossings_; }
  /// By Incident::replica_of.
  [[nodiscard]] const std::map<int, Places>& replicas() const noexcept { return replicas_; }
  /// By (tp, pp): who shares a data-parallel group.
  [[nodiscard]] const std::map<std::pair<int, int>, Places>& groups() const noexcept {
    return groups_;
  }
  [[nodiscard]] const BadByKey& bad(Phase phase) const;
  [[nodiscard]] bool is_bad_in(Phase phase, const ParameterKey& key) const;
  [[nodiscard]] bool is_any_gradient_bad() const;
  /// A rank of the replica had a bad parameter before the step: what it made of it explains every
  /// bad gradient of the replica.
  [[nodiscard]] bool has_bad_weights(int replica) const {
    return replicas_with_bad_weights_.contains(replica);
  }
  /// Every one of the ranks scanned what crossed, and in forward and backward all of it was
  /// finite: what is bad on one of them came from no other. Context-parallel attention exchanges
  /// off the collectives that are scanned.
  [[nodiscard]] bool have_only_finite_crossings(const Places& places) const;
  [[nodiscard]] std::vector<std::pair<const ParameterKey*, const std::vector<BadOnRank>*>>
  in_backward_order(const BadByKey& keys) const;
  /// Every parameter that is bad anywhere, in backward order.
  [[nodiscard]] std::vector<std::string> bad_parameters() const;

  // ---- who could say more ----

  /// The ranks that may hold what `key` means.
  [[nodiscard]] Places holders_of(const ParameterKey& key) const;
  [[nodiscard]] static bool is_blind(const Place& place, Phase phase);
  /// Ranks that may hold `key` and said nothing of it in `phase`.
  [[nodiscard]] std::set<int> blind_holders(const ParameterKey& key, Phase phase) const;
  [[nodiscard]] bool is_anyone_blind(const Places& places, Phase phase) const;
  void add_missing_evidence(Origin& origin, const Places& places, Phase phase) const;
  /// The ranks that gather a parameter of which each keeps a shard, `rank` among them; empty where
  /// it is whole.
  [[nodiscard]] std::vector<int> shard_group_of(const RankEvidence& rank,
                                                const BadParameter& bad) const;
  /// Both hold the parameter whole, or the same shard of it.
  [[nodiscard]] static bool have_same_elements(const RankEvidence& rank, const RankEvidence& other,
                                               std::string_view name);

  // ---- what was found ----

  [[nodiscard]] std::vector<FoundOrigin>& found() noexcept { return found_; }
  [[nodiscard]] Origin make_origin(Phase phase, Cause cause, Confidence confidence,
                                   const std::vector<int>& candidates) const;
  /// Counts the origin; keeps it where its phase has fewer than a verdict lists.
  void add_origin(Origin origin, FoundIn found_in = FoundIn::other);
  /// True, and the origin counted, where the phase has as many as a verdict lists.
  [[nodiscard]] bool is_full(Phase phase);
  [[nodiscard]] const std::map<Phase, std::size_t>& origins_per_phase() const noexcept {
    return origins_per_phase_;
  }
  /// Takes what was found where ranks exchange; before the rules of gradients, which ask for it.
  void add_boundary_origins(BoundaryOrigins boundary);
  /// A bad gradient on `rank` came with what crossed before it, or was made of it. Of a rank that
  /// did not answer it is taken for granted where its replica has an origin.
  [[nodiscard]] bool is_explained_by_crossings(int rank) const;
  /// It got something bad out of a reduction of gradients that was given finite ones.
  [[nodiscard]] bool has_bad_reduction(int rank) const { return badly_reduced_.contains(rank); }

  /// Of the verdict as a whole.
  void add_fact(Fact fact) { facts_.push_back(std::move(fact)); }
  [[nodiscard]] const Facts& facts() const noexcept { return facts_; }
  /// The rank has more isolated bad gradients than are listed.
  void note_more_isolated(int rank) { ranks_with_more_isolated_.insert(rank); }
  [[nodiscard]] const std::set<int>& ranks_with_more_isolated() const noexcept {
    return ranks_with_more_isolated_;
  }

 private:
  /// Backward order over stages: (−stage, position) of the lowest rank that holds the parameter.
  using Order = std::pair<std::int64_t, std::size_t>;

  void remember_order(const RankEvidence& rank, const BadParameter& bad);
  void remember_bad_weights(const Place& place);
  void add_found(FoundOrigin found);

  Incident incident_;
  Crossings crossings_;
  std::map<int, Places> replicas_;
  std::map<std::pair<int, int>, Places> groups_;
  std::map<Phase, BadByKey> bad_;
  std::map<std::string, Order, std::less<>> order_;
  std::vector<FoundOrigin> found_;
  std::map<Phase, std::size_t> origins_per_phase_;
  std::set<int> replicas_with_bad_weights_;
  std::set<int> replicas_with_boundary_origin_;
  std::set<int> badly_reduced_;
  std::set<int> ranks_with_more_isolated_;
  Facts facts_;
};

/// Sorted by rank, each once.
[[nodiscard]] std::vector<int> sorted(const std::set<int>& ranks);
[[nodiscard]] std::set<int> ranks_of(const std::vector<BadOnRank>& bad);
/// Those of them whose optimizer updates the bad elements; the others receive these in the
/// all-gather of parameters. Empty where parameters are not sharded.
[[nodiscard]] std::set<int> owners_of(const std::vector<BadOnRank>& bad);
/// Says that the ranks that are no owners have it from those; nothing where there are none.
void add_gathered_evidence(Origin& origin, const std::set<int>& owners, const std::set<int>& ranks);
void set_parameter(Origin& origin, const std::string& name, const Sighting& sighting);
/// Where ranks could have said more, the evidence names them.
void add_blind_evidence(Origin& origin, const std::set<int>& blind);

}  // namespace nanlocator::inline locate_room
