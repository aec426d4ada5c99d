// The one answer of all ranks, as data. `report` words it, and writes and reads verdict.json.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "nanlocator/locate/cause.hpp"
#include "nanlocator/locate/fact.hpp"
#include "nanlocator/map/rank_coordinates.hpp"
#include "nanlocator/record/birth.hpp"
#include "nanlocator/record/rerun_variant.hpp"
#include "nanlocator/record/sighting.hpp"

namespace nanlocator::inline locate_room {

enum class VerdictStatus {
  clean,    // nothing bad
  benign,   // explained and harmless: a loss scaler's routine overflow
  located,  // every origin below is supported by complete evidence
  partial,  // ranks are silent or ledgers cut off: origins hold for what was seen
};
[[nodiscard]] constexpr auto names_of(VerdictStatus) {
  return std::to_array<std::string_view>({"clean", "benign", "located", "partial"});
}

enum class Confidence { low, medium, high };
[[nodiscard]] constexpr auto names_of(Confidence) {
  return std::to_array<std::string_view>({"low", "medium", "high"});
}

enum class Direction { forward, backward, none };
[[nodiscard]] constexpr auto names_of(Direction) {
  return std::to_array<std::string_view>({"forward", "backward", "none"});
}

struct OriginTensor {
  TensorRole role;
  std::vector<std::int64_t> shape;
  std::string dtype;
  std::int64_t nan = 0;
  std::int64_t pos_inf = 0;
  std::int64_t neg_inf = 0;
  std::optional<std::int64_t> first_bad;      // flat, row-major
  std::vector<std::int64_t> first_bad_index;  // the same, per dimension
  std::optional<double> absmax_finite;
  std::optional<BadExtent> extent;  // how the bad elements lie in it
};

/// A place where something bad was born. Empty optionals: this level cannot know.
struct Origin {
  Phase phase = Phase::grad_local;
  std::optional<Direction> direction;
  std::int64_t iteration = 0;
  std::optional<int> microbatch;
  std::optional<int> chunk;
  /// The rank where the evidence points to one rank; otherwise empty, and `candidates` has several.
  std::optional<RankCoordinates> coordinates;
  /// Global ranks, ascending. One: that rank. Several: the evidence cannot separate them, or, where
  /// `is_on_every_candidate`, it was seen on each of them.
  std::vector<int> candidates;
  bool is_on_every_candidate = false;
  std::optional<int> data_parallel_replica;  // dp rank, where all candidates share it
  std::string module;
  std::string op;
  std::string forward_op;  // of a fault in backward: the operator whose derivative it is
  std::string parameter;
  /// The autograd Function in whose own code it was born, or the custom operator ("mylib::scale").
  std::string custom_function;
  /// The user's line that called the guilty operator in forward, of a fault in backward too; empty:
  /// not recorded.
  std::optional<CodeLine> code;
  std::optional<OriginTensor> tensor;
  Cause cause = Cause::unknown;
  Detail detail = Detail::none;
  Owner owner = Owner::unknown;
  Confidence place_confidence = Confidence::low;  // in phase, ranks, module, operator, parameter
  Confidence cause_confidence = Confidence::low;
  std::vector<Suspect> alternatives;  // what the evidence leaves open
  Facts facts;                        // the first one is what was seen
  Refutation refutation = Refutation::earlier_phase;
  Action action = Action::none;
  std::string bundle;
  /// Clean neighbours of `parameter` on that rank in backward order ("" at either end).
  std::string clean_before;
  std::string clean_after;
};

struct Spread {
  std::vector<int> ranks;               // that saw something bad
  std::vector<std::string> parameters;  // bad anywhere, in backward order
  std::optional<Phase> first_seen;
};

/// The re-run of the step, over all ranks.
struct RerunOutcome {
  bool done = false;
  std::optional<bool> reproduced;  // empty: not done, or the re-run of some rank did not complete
  std::vector<std::string> not_restored;
  std::vector<VariantOutcome> variants;  // what re-runs changed on purpose, and how they came out
};

/// Whether the job can be restarted from its latest checkpoint; of several origins the last in this
/// order.
enum class Restart : std::uint8_t {
  latest,       // yes: nothing bad was applied, and it happened once
  unknown,      // nothing bad was applied; whether it comes again is not known
  repeats,      // nothing bad was applied, but the same data and weights give it again
  before_step,  // only one that was saved before step `restart_before`
  check_first,  // one in which what is bad here was found finite
};
[[nodiscard]] constexpr auto names_of(Restart) {
  return std::to_array<std::string_view>(
      {"latest", "unknown", "repeats", "before_step", "check_first"});
}

/// What has become of the job, as far as the ledgers tell.
struct JobState {
  std::string on_bad;  // the policy: "stop", "skip", "recover", "report"; "" where not known
  /// The optimizer had updated the weights in this step when the finding was made.
  std::optional<bool> are_weights_updated;
  /// The framework leaves the update of a step with bad gradients out by itself, as loss scalers
  /// do.
  bool framework_skips_update = false;
  /// Every weight of every rank, before the step.
  std::optional<bool> are_weights_finite;
  Restart restart = Restart::unknown;
  std::optional<std::int64_t> restart_before;  // step
};

/// How the job lies on its machines, for a command that checks them.
struct JobLayout {
  RankCoordinates first_rank;  // of the lowest rank that answered: sizes of the axes, host
  int ranks_per_host = 1;
  /// Of the ranks that origins and their facts name, ascending; the first kMostMentioned.
  std::vector<RankCoordinates> mentioned;
};

struct Verdict {
  std::string run_id;
  std::int64_t iteration = 0;
  VerdictStatus status = VerdictStatus::clean;
  std::vector<Origin> origins;
  Spread spread;
  std::vector<std::string> clean;  // parameters that bracket the fault, in backward order
  RerunOutcome rerun;
  JobState job;
  std::optional<JobLayout> layout;
  std::vector<int> silent_ranks;   // no ledger arrived
  std::vector<std::string> notes;  // what ranks and tools wrote
  Facts facts;                     // of the verdict as a whole
};

}  // namespace nanlocator::inline locate_room
