// The ledgers' content, indexed by rank, phase and parameter.
//
// In: ledgers in any order. Out: the same facts by rank. Ranks that did not answer are placed in
// the layout if their place follows from the others'. Rules about faults are elsewhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "nanlocator/record/ledger.hpp"

namespace nanlocator::inline incident_room {

/// A rank's finding on a parameter in a phase. `unknown`: not scanned, or the ledger was cut off.
enum class Status : std::uint8_t { unknown, clean, bad };

/// A bad parameter of one rank in one phase.
struct BadParameter {
  std::string name;                     // from the sighting or its id; never empty
  std::optional<std::size_t> position;  // in the rank's backward order; empty if not in it
  const Sighting* sighting = nullptr;
  bool is_owned = false;  // the bad elements are in the shard that the rank's optimizer updates
};

/// A ledger indexed by position in its backward order. The ledger must outlive it.
class RankEvidence {
 public:
  explicit RankEvidence(const Ledger& ledger);

  [[nodiscard]] const Ledger& ledger() const noexcept { return *ledger_; }
  [[nodiscard]] const RankCoordinates& coordinates() const noexcept { return ledger_->coordinates; }
  [[nodiscard]] int rank() const noexcept { return ledger_->coordinates.rank; }
  [[nodiscard]] std::size_t size() const noexcept { return ledger_->backward_order.size(); }
  [[nodiscard]] const ParameterRecord& parameter(std::size_t position) const {
    return ledger_->backward_order[position];
  }
  [[nodiscard]] std::optional<std::size_t> position_of(std::string_view name) const;
  /// True if the phase was scanned and the ledger is complete, so that parameters not reported bad
  /// were clean.
  [[nodiscard]] bool scanned(Phase phase) const noexcept;
  /// The number of parameters that the phase's scan covered.
  [[nodiscard]] std::size_t scanned_count(Phase phase) const;
  [[nodiscard]] Status status(Phase phase, std::size_t position) const;
  [[nodiscard]] Status status(Phase phase, std::string_view name) const;
  /// The largest finite magnitude of the parameter or its gradient in a phase that has_maxima;
  /// empty if not scanned.
  [[nodiscard]] std::optional<double> absmax(Phase phase, std::size_t position) const;
  [[nodiscard]] std::optional<double> absmax(Phase phase, std::string_view name) const;
  /// The largest of all of them.
  [[nodiscard]] std::optional<double> absmax(Phase phase) const;
  /// In the order of the sightings, each parameter once.
  [[nodiscard]] std::span<const BadParameter> bad(Phase phase) const;
  [[nodiscard]] const BadParameter* find_bad(Phase phase, std::size_t position) const;
  /// Bad losses of the rank's own pass, in the ledger's order.
  [[nodiscard]] std::span<const Sighting* const> bad_losses() const noexcept { return bad_losses_; }

 private:
  [[nodiscard]] std::optional<std::size_t> position_of(const Sighting& sighting) const;
  [[nodiscard]] const Coverage* coverage_of(Phase phase) const noexcept;
  void index_positions() const;

  const Ledger* ledger_;
  // Most ranks are never queried: positions are indexed at the first query.
  mutable std::unordered_map<std::string_view, std::size_t> position_by_name_;
  mutable std::unordered_map<std::int64_t, std::size_t> position_by_id_;
  mutable bool is_indexed_ = false;
  std::map<Phase, std::vector<BadParameter>> bad_;
  std::map<Phase, std::unordered_map<std::size_t, std::size_t>> bad_by_position_;
  std::vector<const Sighting*> bad_losses_;
};

/// A rank's place in the layout.
struct Place {
  int rank = 0;
  int tp = 0;
  int pp = 0;
  int dp = 0;
  int cp = 0;
  const RankEvidence* evidence = nullptr;  // null: silent
};

class Incident {
 public:
  /// Throws UsageError for two ledgers of one rank, a rank beyond `world_size` or coordinates
  /// beyond their sizes, AgreementError for ledgers of different runs, iterations or layouts.
  Incident(std::span<const Ledger> ledgers, int world_size);
  Incident(const Incident&) = delete;  // places point into it
  Incident& operator=(const Incident&) = delete;

  [[nodiscard]] std::span<const RankEvidence> ranks() const noexcept {
    return ranks_;
  }  // ascending
  /// Every rank with a known place, including silent ones; ascending.
  [[nodiscard]] std::span<const Place> places() const noexcept { return places_; }
  [[nodiscard]] const std::vector<int>& silent() const noexcept { return silent_; }
  /// Silent ranks whose place in the layout cannot be inferred: they may be anywhere.
  [[nodiscard]] const std::vector<int>& unplaced() const noexcept { return unplaced_; }
  [[nodiscard]] bool has_cut_off_ledgers() const noexcept { return has_cut_off_ledgers_; }
  /// True if every rank's backward order was observed.
  [[nodiscard]] bool is_order_observed() const noexcept { return is_order_observed_; }
  [[nodiscard]] int pipeline_size() const noexcept { return layout_.pp.size; }
  [[nodiscard]] int world_size() const noexcept { return world_size_; }
  /// Null for a rank that is unplaced or outside the world.
  [[nodiscard]] const Place* place_of(int rank) const;
  /// Equal for ranks that exchange data before the data-parallel collective.
  [[nodiscard]] int replica_of(const Place& place) const noexcept;
  [[nodiscard]] const RankEvidence* find(int rank) const;

 private:
  void place_silent_ranks(int world_size);

  int world_size_;
  std::vector<RankEvidence> ranks_;
  std::vector<Place> places_;
  std::vector<int> silent_;
  std::vector<int> unplaced_;
  RankCoordinates layout_;  // sizes of the axes
  bool has_cut_off_ledgers_ = false;
  bool is_order_observed_ = true;
};

}  // namespace nanlocator::inline incident_room
