// Where bad values of a step come from, by one algorithm over events: docs/adr/0009-events.md.
//
// An event is a value that was seen bad, or that nobody saw. Edges say which event may have made
// which other bad; they are computed, never stored. A bad event that no bad event may have made is
// a source. Its candidates are its own ranks and those of the unknown events that may have made it.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "incident/findings.hpp"
#include "nanlocator/verdict/verdict.hpp"

namespace nanlocator::inline locate_room::events {

/// What was seen of a source.
enum class Site : std::uint8_t {
  weight,    // before the pass
  computed,  // a rank's input to a collective or message, or its loss
  received,  // the result of a collective or message
  flow,      // activations' gradients, in a stretch of parameters' gradients
  gradient,  // of one parameter
  late,      // after backward; or a loss that left all gradients finite
};

/// The parts of a step, in order.
enum class Part : std::uint8_t { forward, backward, late };
[[nodiscard]] constexpr Part part_of(Phase phase) {
  if (phase <= Phase::loss) return Part::forward;
  return phase <= Phase::grad_local ? Part::backward : Part::late;
}

/// A bad event without a bad one before it.
struct Source {
  Origin origin;
  Site site = Site::late;
  /// In earlier parts, everything that it depends on was finite. Empty: everything was, up to this
  /// event.
  std::optional<Part> since = Part::forward;
  bool is_open = false;  // an unknown event may have made it: others of its replica may be the same
  int replica = -1;      // Incident::replica_of, for values that crossed
  std::string group{};   // of its crossing
  std::set<int> microbatches{};
  std::optional<std::int64_t> position{};  // see Sighting
  std::string first_bad_gradient{};  // in backward order, for a source in backward that crossed
};

/// The sources found so far, at most as many of a phase as a verdict lists.
class Sources {
 public:
  static constexpr std::size_t kMostPerPhase = 64;

  void add(Source source);
  /// True if the phase has as many as a verdict lists; then also counts one more.
  [[nodiscard]] bool is_full(Phase phase);
  void add_fact(Fact fact) { facts_.push_back(std::move(fact)); }

  [[nodiscard]] std::vector<Source>& all() noexcept { return all_; }
  /// About the whole verdict.
  [[nodiscard]] const Facts& facts() const noexcept { return facts_; }
  [[nodiscard]] const std::map<Phase, std::size_t>& counts() const noexcept { return counts_; }

 private:
  std::vector<Source> all_;
  Facts facts_;
  std::map<Phase, std::size_t> counts_;
};

/// What the crossings' sources mean for the gradients on a rank.
struct Crossed {
  std::set<int> replicas;       // those with a source among their crossings or losses
  std::set<int> badly_reduced;  // ranks that a reduction among the sources spoiled
};

/// Each adds the sources among the events of its sites (one file per kind of edge).
void add_weights(const Findings& seen, Sources& sources);
[[nodiscard]] Crossed add_crossings(const Findings& seen, Sources& sources);
void add_gradients(const Findings& seen, const Crossed& crossed, Sources& sources);
void add_reductions(const Findings& seen, const Crossed& crossed, Sources& sources);
void add_updates(const Findings& seen, Sources& sources);

/// The sources among gradients that are bad in `phase`, after their reduction, of which some rank
/// did not report the phase before: the same edges, over what all replicas share.
void add_shared_gradients(const Findings& seen, const Crossed& crossed,
                          const std::set<ParameterKey>& keys, Phase phase, Sources& sources);

/// An event of the re-run: a birth, on all ranks and in all microbatches in which it happened.
struct Born {
  Origin origin;
  bool is_receipt = false;   // it came out of a collective
  bool is_opaque = false;    // it was computed off the dispatcher, as far as the trace could follow
  bool is_in_hook = false;   // see Birth
  bool is_first = false;     // of the first pass, whose operators were traced
  std::set<int> replicas{};  // of its ranks, and of those that received it
  std::set<int> microbatches{};
  std::map<int, std::int64_t> positions{};  // of each rank's first, where known
  std::map<int, double> addends{};  // of a reduction's result: the largest that each rank put in
};
/// In the order of the ranks' ledgers. What came out of a collective is a birth only if no other
/// birth, no crossing of its group in the first pass and no other member's receipt explains it.
[[nodiscard]] std::vector<Born> births_of(const Incident& incident, bool has_crossings);

/// Each birth takes the place of the sources that it may have made bad, unless a source made it
/// bad.
[[nodiscard]] std::vector<Origin> refine(const Incident& incident, std::vector<Source> sources,
                                         std::vector<Born> born, const RerunOutcome& rerun);

/// A verdict's origins and facts by events. docs/adr/0009-events.md.
struct EventOrigins {
  std::vector<Origin> origins;
  Facts facts;
};
[[nodiscard]] EventOrigins origins_of_events(const Findings& seen, const RerunOutcome& rerun);

}  // namespace nanlocator::inline locate_room::events
