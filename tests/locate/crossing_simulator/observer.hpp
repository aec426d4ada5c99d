// Records what the simulated ranks' observers see: collectives and messages with their sequence
// numbers, the number of each kind that a rank scanned, and the bad ones.
//
// Collectives after backward reduce gradients further and are recorded for every replica. Earlier
// ones are recorded only for simulated replicas; the first replica's counts also apply to those
// that are not simulated.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "locate/crossing_simulator/place.hpp"
#include "locate/crossing_simulator/tokens.hpp"
#include "nanlocator/record/ledger.hpp"

namespace nanlocator::pipeline {

/// One direction between two ranks of a pipeline.
struct Link {
  std::vector<int> pipeline;
  int from = 0, to = 0;
};

class Observer {
 public:
  explicit Observer(const Layout& layout) : layout_(layout) {}

  /// By member: its input and its result. A group of one is not recorded.
  void collective(const Place& place, const std::string& group, const std::vector<int>& members,
                  const std::string& op, const std::vector<Tokens>& sent,
                  const std::vector<Received>& received);
  /// Returns the message's sequence number.
  std::int64_t send(const Place& place, const Link& link, Tokens tokens);
  void receive(const Place& place, const Link& link, std::int64_t sequence, Tokens tokens);
  /// A NaN loss; empty: of a microbatch without valid labels.
  void loss(const Place& place, int rank, bool is_empty);

  /// The number of crossings that the rank has issued.
  [[nodiscard]] std::int64_t position_of(int rank) const;

  /// In a ledger's order.
  [[nodiscard]] std::vector<Sighting> sightings_on(int rank) const;
  [[nodiscard]] std::vector<CrossingCoverage> crossings_on(int rank) const;
  [[nodiscard]] bool has_bad_loss() const { return !losses_.empty(); }
  /// True if something bad was sent to or received from another rank, or reached a loss, in forward
  /// or backward.
  [[nodiscard]] bool has_crossed(int rank) const;

 private:
  /// Crossings with a common numbering.
  struct Kind {
    std::string group;
    std::vector<int> members;
    std::optional<int> peer;
    std::string role;
    friend auto operator<=>(const Kind&, const Kind&) = default;
  };
  using Counts = std::map<Kind, std::int64_t>;

  [[nodiscard]] static Kind moved(Kind kind, int offset);
  /// The difference between a rank's number and that of its counterpart in the first replica.
  [[nodiscard]] int offset_of(int rank) const;
  /// Counts of the first replica's rank, which apply to every replica because all run alike.
  [[nodiscard]] const Counts& counts_of_pass(int rank) const;

  /// Counts one more of the kind, and returns its sequence number.
  std::int64_t count(const Place& place, int rank, const Kind& kind);
  /// The rank's call that issues a crossing has returned.
  void issue(const Place& place, int rank);
  Sighting* write(const Place& place, int rank, const std::string& op, std::string_view role,
                  const Crossing& crossing, Tokens bad);

  Layout layout_;
  std::map<int, Counts> counts_, late_counts_;  // by rank; during passes, and after them
  std::map<int, std::int64_t> issued_, late_issued_;
  std::map<int, std::vector<Sighting>> bad_crossings_, losses_;
};

[[nodiscard]] Sighting sighting_of(Phase phase, int microbatch, int chunk, int nan);
/// Turns NaN into Inf, beside numbers close to the dtype's largest.
void turn_into_overflow(Sighting& sighting);

}  // namespace nanlocator::pipeline
