// What one rank saw in one step, in execution order; and its file ledger_*.jsonl.
//
// A ledger is written only when some rank saw a bad value. Line 1 is the header, then one line per
// record, and a last line {"record": "end"} that distinguishes a complete ledger from a truncated
// one. A file holds one ledger after another, one per incident. See docs/formats.md.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "nanlocator/map/parameter_map.hpp"
#include "nanlocator/map/rank_coordinates.hpp"
#include "nanlocator/map/rank_list.hpp"
#include "nanlocator/record/birth.hpp"
#include "nanlocator/record/history.hpp"
#include "nanlocator/record/rerun_variant.hpp"
#include "nanlocator/record/sighting.hpp"
#include "nanlocator/record/unordered_access.hpp"

namespace nanlocator::inline record_room {

/// A scanned phase and the parameters that the scan covered. Distinguishes "clean" from "never
/// scanned".
struct Coverage {
  Phase phase = Phase::grad_local;
  std::vector<std::int64_t> parameters;  // ids scanned, ascending
  /// Where has_maxima(phase): the largest finite magnitude of each parameter, at most a float's, 0
  /// without one.
  std::vector<float> absmax{};
  friend bool operator==(const Coverage&, const Coverage&) = default;
};

/// True for phases whose maxima other ranks' faults are judged by. If one copy of a weight is bad,
/// they show the values of the others; if a reduction returns Inf, whether its sum overflowed.
[[nodiscard]] constexpr bool has_maxima(Phase phase) {
  return phase == Phase::params_before || phase == Phase::grad_local;
}

/// How many crossings of one kind this rank scanned. Distinguishes "sent finite" from "not seen".
struct CrossingCoverage {
  std::string group;
  RankList members;         // global ranks
  std::optional<int> peer;  // for sends and receives
  TensorRole role;          // sent or received; a collective counts once, as sent
  std::int64_t first = 0;   // the first that was scanned in the pass
  std::int64_t count = 0;   // sequences first to count - 1 were scanned, except
  /// these, in the format of a rank list: bytes of a quantised tensor, a subclass that hides its
  /// memory, a stream in capture. They are unknown, neither finite nor bad.
  RankList not_scanned;
  /// One of these gave members different results: no all-gather, all-reduce or broadcast.
  bool is_unseen_by_member = false;
  /// The members also exchange activations in unobserved ways (TransformerEngine's userbuffers,
  /// DeepEP, symmetric memory).
  bool has_unwatched = false;
  /// Weights gathered here were scanned on arrival.
  bool watches_weights = false;
  /// Sums of gradients that were reduced here were scanned on arrival.
  bool watches_gradients = false;
  /// All crossings were scanned, as far as `count` says.
  [[nodiscard]] bool is_whole() const { return not_scanned == RankList() && !has_unwatched; }
  friend bool operator==(const CrossingCoverage&, const CrossingCoverage&) = default;
};

/// One microbatch as this rank drew it from its data iterator.
struct Microbatch {
  int number = 0;            // counted from 0
  std::optional<int> chunk;  // virtual-pipeline model chunk
  /// One line per tensor: "tokens: int64 [2, 16], 0 to 255, fingerprint 00f3...".
  std::vector<std::string> tensors;
  friend bool operator==(const Microbatch&, const Microbatch&) = default;
};

/// What `locate` needs to know about a parameter beyond its id.
struct ParameterRecord {
  std::int64_t id = 0;
  std::string name;
  std::vector<std::int64_t> shape;
  bool may_be_untouched = false;  // see ParameterInfo
  bool is_tp_duplicate = false;
  bool is_tied = false;
  int chunk = 0;  // virtual-pipeline model chunk: backward visits (chunk, pp) in descending order
  std::optional<ElementRange> shard;  // see ParameterInfo
  RankList shard_group{};             // see ParameterInfo
  std::string reduce_dtype{};         // see ParameterInfo
  friend bool operator==(const ParameterRecord&, const ParameterRecord&) = default;
};

/// The outcome of the bad step's re-run, as seen by this rank.
struct Rerun {
  /// Bad again on any rank; empty if the re-run did not complete.
  std::optional<bool> reproduced;
  /// For a second re-run without the trace, if the first was clean: bad again on any rank.
  std::optional<bool> control_reproduced;
  std::int64_t gradients = 0;  // gradients of this rank that both passes produced
  std::int64_t changed = 0;    // those whose bits differ in the second pass
  /// Ids of this rank's parameters whose local gradients (before the data-parallel collective) were
  /// bad in the re-run.
  std::vector<std::int64_t> bad_parameters;
  /// State that the first pass changed and that could not be restored.
  std::vector<std::string> not_restored;
  bool without_reduction = false;  // see StepPass::leaves_out_reduction
  /// The births are of the first pass, whose operators were traced: the re-run was finite, or did
  /// not complete.
  bool has_first_births = false;
  std::vector<VariantOutcome> variants;    // in execution order
  std::vector<UnorderedAccess> unordered;  // in the traced pass
  /// Other users of the step's memory that were seen while operators of the traced pass ran,
  /// ordered or not. For transfers: the memory of gradients that were bad in the first pass.
  std::vector<Concurrent> concurrent;
  friend bool operator==(const Rerun&, const Rerun&) = default;
};

/// The optimizer's state of a parameter whose weight was bad before the step: shows whether its
/// update made the weight bad.
struct OptimizerState {
  std::int64_t parameter = 0;  // id
  std::string name;            // "exp_avg"; "main_param": its own copy of the weight
  TensorStats stats;           // `first_bad` is an index into the whole parameter
  friend bool operator==(const OptimizerState&, const OptimizerState&) = default;
};

/// The value of this rank's copy of a weight at the element that is bad on another rank.
struct WeightValue {
  std::string parameter;
  std::int64_t element = 0;  // flat, row-major
  double value = 0;
  friend bool operator==(const WeightValue&, const WeightValue&) = default;
};

/// A finite result on this rank, in a pass of the re-run, of a collective that gives every member
/// the same (all-reduce, broadcast).
struct CollectiveResult {
  Phase phase = Phase::forward;
  std::optional<int> microbatch;
  std::string module;  // "" if unknown
  std::string op;
  Crossing crossing;
  std::uint64_t fingerprint = 0;  // of its bits
  double absmax = 0;
  double sum_of_squares = 0;
  std::int64_t zeros = 0;  // elements
  friend bool operator==(const CollectiveResult&, const CollectiveResult&) = default;
};

/// A question of the rank with a birth to the ranks that should have the same value: which results
/// of their collectives and which element of a weight they shall report.
struct PeerQuestion {
  int rank = 0;                   // global; the asking rank
  std::optional<int> microbatch;  // of the results; empty: all
  std::string parameter;          // the weight's name; "" for none
  std::int64_t element = 0;       // flat index in it
  friend bool operator==(const PeerQuestion&, const PeerQuestion&) = default;
};
[[nodiscard]] std::string to_json(const PeerQuestion& question);
/// Throws FormatError; errors call the text `source`.
[[nodiscard]] PeerQuestion peer_question_from_json(const std::string& text,
                                                   const std::string& source);

struct Ledger {
  std::string run_id;
  int attempt = 0;  // number of restarts of the job
  std::int64_t iteration = 0;
  RankCoordinates coordinates;
  std::string level = "grads";
  std::string on_bad = "stop";                   // the policy after a finding, by name
  std::vector<Sighting> sightings;               // bad tensors only, in scan order
  std::vector<Coverage> coverage;                // at most one per phase
  std::vector<CrossingCoverage> crossings;       // from level boundaries on
  std::vector<Microbatch> microbatches;          // drawn by this rank in the step
  std::vector<OptimizerState> optimizer_states;  // finite ones, too
  /// The latest step after whose update every rank's weights were scanned and finite.
  std::optional<std::int64_t> weights_finite_after;
  std::vector<Birth> births;               // in execution order; of the re-run, if one was traced
  std::optional<Rerun> rerun;              // empty: the step was not re-run
  std::string no_rerun;                    // why it was not, as a clause; "" if that is not known
  std::vector<WeightValue> weight_values;  // answers to another rank's PeerQuestion
  std::vector<CollectiveResult>
      collective_results;  // answers to a PeerQuestion, and the asking rank's own results
  /// This rank's parameters in the order in which backward finished their gradients or, if that was
  /// not observed, in reverse registration order.
  std::vector<ParameterRecord> backward_order;
  bool is_backward_order_observed = false;
  std::optional<double> gradient_norm;  // the framework's own, if it was seen
  /// The factor of the gradients, for a scaler that lowers it after an overflow.
  std::optional<double> loss_scale;
  /// The earlier step whose bad gradients were still there when this one began.
  std::optional<std::int64_t> gradients_left_by;
  /// What the program computed in this step before the model's first call was not recorded.
  bool began_unrecorded = false;
  /// The framework itself skips this step's update, whatever the policy.
  bool framework_skips_update = false;
  /// The program itself throws away what the step has computed; it is not stopped.
  bool is_discarded = false;
  /// Largest finite |gradient| of this rank before the clip, and its parameter (for a norm that
  /// overflows although every gradient is finite).
  std::optional<double> absmax;
  std::string absmax_parameter;
  std::optional<HistorySummary> history;  // of the latest steps, including this one
  std::vector<std::string> notes;         // what this rank could not do or see
  bool is_complete = true;                // false: read from a truncated file or message

  friend bool operator==(const Ledger&, const Ledger&) = default;
};

/// The ledger as JSON lines, each ending in '\n'. Non-finite numbers are written as strings.
[[nodiscard]] std::string to_jsonl(const Ledger& ledger);

/// Every ledger in `text`, in order. A ledger has `is_complete` false if its tail is truncated or a
/// line cannot be read; such a line is skipped and named in the ledger's notes. Its content is then
/// unknown, and so is whether parameters without a sighting were clean. Messages call the text
/// `source`. Throws FormatError if not even a header can be read.
[[nodiscard]] std::vector<Ledger> ledgers_from_jsonl(std::string_view text,
                                                     const std::string& source);

/// Appends one ledger to `directory`/ledger_<coordinates>.jsonl in one write, then fsync. Throws
/// IoError; the file's earlier content stays readable.
void append_ledger(const std::filesystem::path& directory, const Ledger& ledger);

}  // namespace nanlocator::inline record_room
