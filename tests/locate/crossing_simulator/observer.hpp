// What an observer of the simulated ranks writes down: collectives and messages with their
// sequence numbers, how many of each kind a rank scanned, and what of it was bad.
//
// Collectives after backward are those that reduce gradients further, on every replica; before,
// only simulated replicas are seen, of which the first stands for all that are not.
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

  /// By member: what it put in, and what it got. A group of one is not seen.
  void collective(const Place& place, const std::string& group, const std::vector<int>& members,
                  const std::string& op, const std::vector<Tokens>& sent,
                  const std::vector<Received>& received);
  /// Returns the message's sequence number.
  std::int64_t send(const Place& place, const Link& link, Tokens tokens);
  void receive(const Place& place, const Link& link, std::int64_t sequence, Tokens tokens);
  /// A loss that is NaN; empty: of a microbatch without valid labels.
  void loss(const Place& place, int rank, bool is_empty);

  /// In the order in which a ledger has them.
  [[nodiscard]] std::vector<Sighting> sightings_on(int rank) const;
  [[nodiscard]] std::vector<CrossingCoverage> crossings_on(int rank) const;
  [[nodiscard]] bool has_bad_loss() const { return !losses_.empty(); }
  /// Something bad went to or came from another rank, or into a loss, in forward or backward.
  [[nodiscard]] bool has_crossed(int rank) const;

 private:
  /// Crossings that are numbered together.
  struct Kind {
    std::string group;
    std::vector<int> members;
    std::optional<int> peer;
    std::string role;
    friend auto operator<=>(const Kind&, const Kind&) = default;
  };
  using Counts = std::map<Kind, std::int64_t>;

  [[nodiscard]] static Kind moved(Kind kind, int offset);
  /// How far a rank's number is from that of its counterpart in the first replica.
  [[nodiscard]] int offset_of(int rank) const;
  /// Of the first replica's ranks: what every replica's pass counts, as all run alike.
  [[nodiscard]] const Counts& counts_of_pass(int rank) const;

  /// Counts one more of the kind, and returns its sequence number.
  std::int64_t count(const Place& place, int rank, const Kind& kind);
  Sighting* write(const Place& place, int rank, const std::string& op, std::string_view role,
                  const Crossing& crossing, Tokens bad);

  Layout layout_;
  std::map<int, Counts> counts_, late_counts_;  // by rank; of passes, and after them
  std::map<int, std::vector<Sighting>> bad_crossings_, losses_;
};

[[nodiscard]] Sighting sighting_of(Phase phase, int microbatch, int chunk, int nan);
/// What was NaN is Inf, beside numbers close to the dtype's largest.
void turn_into_overflow(Sighting& sighting);

}  // namespace nanlocator::pipeline
