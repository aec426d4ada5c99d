// The incident by parameter, by place and by what crossed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "incident/crossings.hpp"
#include "incident/incident.hpp"

namespace nanlocator::inline incident_room {

/// Identifies a parameter across ranks: tensor-parallel duplicates over tp, tied parameters over
/// the pipeline (their gradients are reduced there, in parallel with the data-parallel reduction).
struct ParameterKey {
  std::string name;  // "" for all tied parameters: the copies have different names
  int tp = -1;       // -1: on every tensor-parallel rank
  int pp = -1;       // -1: on every stage
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
  /// Throws like Incident.
  Findings(std::span<const Ledger> ledgers, int world_size);
  Findings(const Findings&) = delete;  // its members point into each other
  Findings& operator=(const Findings&) = delete;

  // ---- observations ----

  [[nodiscard]] const Incident& incident() const noexcept { return incident_; }
  [[nodiscard]] const Crossings& crossings() const noexcept { return crossings_; }
  /// By Incident::replica_of.
  [[nodiscard]] const std::map<int, Places>& replicas() const noexcept { return replicas_; }
  /// By (tp, pp): the ranks of a data-parallel group.
  [[nodiscard]] const std::map<std::pair<int, int>, Places>& groups() const noexcept {
    return groups_;
  }
  [[nodiscard]] const BadByKey& bad(Phase phase) const;
  [[nodiscard]] bool is_bad_in(Phase phase, const ParameterKey& key) const;
  [[nodiscard]] bool is_any_gradient_bad() const;
  /// True if a rank of the replica had a bad parameter before the step, which explains every bad
  /// gradient of the replica.
  [[nodiscard]] bool has_bad_weights(int replica) const {
    return replicas_with_bad_weights_.contains(replica);
  }
  /// True if each of the ranks scanned its crossings, and all of them were finite in forward and
  /// backward, so that a bad value on one of these ranks came from no other. Context-parallel
  /// attention exchanges outside the scanned collectives.
  [[nodiscard]] bool have_only_finite_crossings(const Places& places) const;
  [[nodiscard]] std::vector<std::pair<const ParameterKey*, const std::vector<BadOnRank>*>>
  in_backward_order(const BadByKey& keys) const;
  /// Every parameter that is bad anywhere, in backward order.
  [[nodiscard]] std::vector<std::string> bad_parameters() const;

  // ---- ranks that could say more ----

  /// The ranks that may hold the parameter of `key`.
  [[nodiscard]] Places holders_of(const ParameterKey& key) const;
  [[nodiscard]] static bool is_blind(const Place& place, Phase phase);
  /// Ranks that may hold `key` and did not report it in `phase`.
  [[nodiscard]] std::set<int> blind_holders(const ParameterKey& key, Phase phase) const;
  [[nodiscard]] bool is_anyone_blind(const Places& places, Phase phase) const;
  /// The unplaced ranks, and those among `places` that did not report the phase.
  [[nodiscard]] std::set<int> blind_ranks(const Places& places, Phase phase) const;
  /// The ranks that gather a sharded parameter, including `rank`; empty if it is whole.
  [[nodiscard]] std::vector<int> shard_group_of(const RankEvidence& rank,
                                                const BadParameter& bad) const;
  /// True if both hold the whole parameter, or the same shard of it.
  [[nodiscard]] static bool have_same_elements(const RankEvidence& rank, const RankEvidence& other,
                                               std::string_view name);

 private:
  /// Backward order over stages: (−stage, position) of the lowest rank that holds the parameter.
  using Order = std::pair<std::int64_t, std::size_t>;

  void remember_order(const RankEvidence& rank, const BadParameter& bad);
  void remember_bad_weights(const Place& place);

  Incident incident_;
  Crossings crossings_;
  std::map<int, Places> replicas_;
  std::map<std::pair<int, int>, Places> groups_;
  std::map<Phase, BadByKey> bad_;
  std::map<std::string, Order, std::less<>> order_;
  std::set<int> replicas_with_bad_weights_;
};

/// Sorted by rank, each once.
[[nodiscard]] std::vector<int> sorted(const std::set<int>& ranks);
[[nodiscard]] std::set<int> ranks_of(const std::vector<BadOnRank>& bad);
/// The ranks among them whose optimizer updates the bad elements; the others receive these in the
/// all-gather of parameters. Empty if parameters are not sharded.
[[nodiscard]] std::set<int> owners_of(const std::vector<BadOnRank>& bad);

}  // namespace nanlocator::inline incident_room
