// The verdict on one step, for all ranks, as data. `report` words it, and writes and reads
// verdict.json.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "nanlocator/map/rank_coordinates.hpp"
#include "nanlocator/record/birth.hpp"
#include "nanlocator/record/rerun_variant.hpp"
#include "nanlocator/record/sighting.hpp"
#include "nanlocator/verdict/cause.hpp"
#include "nanlocator/verdict/decision.hpp"
#include "nanlocator/verdict/fact.hpp"
#include "nanlocator/verdict/rank_ending.hpp"

namespace nanlocator::inline verdict_room {

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
  std::vector<std::int64_t> first_bad_index;  // first_bad per dimension
  std::optional<double> absmax_finite;
  std::optional<BadExtent> extent;  // distribution of the bad elements
};

/// A place where a bad value was born. Empty optionals: this level cannot know.
struct Origin {
  Phase phase = Phase::grad_local;
  std::optional<Direction> direction;
  std::int64_t iteration = 0;
  std::optional<int> microbatch;
  std::optional<int> chunk;
  /// Set if the evidence points to one rank; otherwise empty, and `candidates` has several.
  std::optional<RankCoordinates> coordinates;
  /// Global ranks, ascending. Several: the evidence cannot separate them, or, if
  /// `is_on_every_candidate`, each of them has it.
  std::vector<int> candidates;
  bool is_on_every_candidate = false;
  std::optional<int> data_parallel_replica;  // dp rank, if all candidates share it
  std::string module;
  std::string op;
  std::string forward_op;  // for a fault in backward: the operator whose derivative failed
  std::string parameter;
  /// The autograd Function whose own code produced the bad value, or the custom operator
  /// ("mylib::scale").
  std::string custom_function;
  /// The user's line that called the faulty operator in forward, also for a fault in backward;
  /// empty: not recorded.
  std::optional<CodeLine> code;
  std::optional<OriginTensor> tensor;
  Cause cause = Cause::unknown;
  Detail detail = Detail::none;
  Owner owner = Owner::unknown;
  Confidence place_confidence = Confidence::low;  // in phase, ranks, module, operator, parameter
  Confidence cause_confidence = Confidence::low;
  std::vector<Suspect> alternatives;  // suspects that the evidence leaves open
  Facts facts;                        // the first one is the observation
  Refutation refutation = Refutation::earlier_phase;
  Action action = Action::none;
  std::string bundle;
  /// The clean parameters next to `parameter` on that rank in backward order ("" at either end).
  std::string clean_before;
  std::string clean_after;
};

struct Spread {
  std::vector<int> ranks;               // ranks that saw something bad
  std::vector<std::string> parameters;  // bad anywhere, in backward order
  std::optional<Phase> first_seen;
};

/// The step's re-run, over all ranks.
struct RerunOutcome {
  bool done = false;
  std::optional<bool> reproduced;  // empty: no re-run, or some rank did not complete it
  std::vector<std::string> not_restored;
  std::string why_not;                   // the step was not re-run, as a clause; "" if unknown
  std::vector<VariantOutcome> variants;  // deliberate changes in re-runs, and their outcomes
};

/// Whether the job can be restarted from its latest checkpoint. Of several origins' answers, the
/// last one in this order counts.
enum class Restart : std::uint8_t {
  latest,       // yes: nothing bad was applied, and it happened once
  unknown,      // nothing bad was applied; whether it recurs is unknown
  repeats,      // nothing bad was applied, but the same data and weights reproduce it
  before_step,  // only from one saved before step `restart_before`
  check_first,  // only from one in which the values that are bad here are checked to be finite
};
[[nodiscard]] constexpr auto names_of(Restart) {
  return std::to_array<std::string_view>(
      {"latest", "unknown", "repeats", "before_step", "check_first"});
}

/// The job's state after the finding, as far as the ledgers show.
struct JobState {
  std::string on_bad;  // the policy: "stop", "skip", "recover", "report"; "" if unknown
  /// The optimizer had already updated the weights in this step when the finding was made.
  std::optional<bool> are_weights_updated;
  /// The framework itself skips the update of a step with bad gradients, as loss scalers do.
  bool framework_skips_update = false;
  /// Every rank traced its operators: another traced step would tell no more.
  bool was_traced = false;
  /// The program itself threw away what the step had computed, and was not stopped.
  bool is_discarded = false;
  /// Of every weight on every rank, before the step.
  std::optional<bool> are_weights_finite;
  Restart restart = Restart::unknown;
  std::optional<std::int64_t> restart_before;  // step
};

/// A checkpoint in the folder into which the job saves, as its name says.
struct CheckpointFile {
  std::int64_t step = 0;  // after the update of the step with this number in its name
  std::string name;       // inside the folder: "iter_0000900"
  std::optional<bool>
      is_finite{};      // every tensor of it; nullopt: it was not read, or not to the end
  std::string found{};  // if it is not finite: "2.weight holds NaN"
  std::optional<double> largest{};  // magnitude of a weight
  friend bool operator==(const CheckpointFile&, const CheckpointFile&) = default;
};

/// The log of a rank that did not answer.
struct RankLog {
  int rank = -1;
  std::string log;             // file into which it writes its stderr
  std::int64_t log_begin = 0;  // bytes in it from before this attempt
  friend bool operator==(const RankLog&, const RankLog&) = default;
};

/// The job as its scheduler knows it, at the time of the finding. Empty: not known.
struct Launch {
  std::string found;      // UTC, "2026-11-27 02:58"
  std::string scheduler;  // "slurm", "torchrun"
  std::string job_id;
  std::string job_name;
  int attempt = 0;  // of this run: restarts so far
  std::string checkpoint_dir;
  std::vector<CheckpointFile> checkpoints;  // the newest first, the latest kMostCheckpoints
  /// What the names of the checkpoints count beyond this run's own count: the steps of the runs
  /// before it. nullopt: one has a number beyond this run's steps, and it is not known why.
  std::optional<std::int64_t> steps_before = 0;
  std::string log;                  // file into which rank 0 writes its stderr; "" if it is none
  std::int64_t log_begin = 0;       // bytes in it from before this attempt
  std::vector<RankLog> logs;        // of ranks that did not answer, if other files
  std::vector<RankEnding> endings;  // of ranks that did not answer, where they are known
  std::string loaded;  // the name in it of what this process loaded last; "" if that is not known
  /// That, if it is in none of `checkpoints`: its path is the name, the step means nothing.
  std::optional<CheckpointFile> loaded_elsewhere;
  /// The path of the latest checkpoint that it has saved by a name without a step; "" for none.
  std::string saved;
};
inline constexpr std::size_t kMostCheckpoints = 16;

inline constexpr std::size_t kMostMentioned = 64;

/// The ranks' layout on machines, for a command that checks them.
struct JobLayout {
  RankCoordinates first_rank;  // the lowest rank that answered: sizes of the axes, host
  int ranks_per_host = 1;
  /// The ranks that origins and their facts name, ascending; the first kMostMentioned. Of silent
  /// ranks only number and host are known, if at all.
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
  JobDecision decision;
  std::optional<Launch> launch;
  std::optional<JobLayout> layout;
  std::vector<int> silent_ranks;   // no ledger arrived
  std::vector<std::string> notes;  // written by ranks and tools
  Facts facts;                     // about the whole verdict
};

/// The coordinates of a rank that the layout mentions; null for another.
[[nodiscard]] const RankCoordinates* find_mentioned(const Verdict& verdict, int rank) noexcept;

}  // namespace nanlocator::inline verdict_room
