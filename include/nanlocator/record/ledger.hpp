// What one rank saw in one step, in execution order; and its file ledger_*.jsonl.
//
// A ledger is written only when something bad was seen on some rank. Line 1 is the header, then one
// line per record, and a last line {"record": "end"} that tells a complete ledger from a truncated
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

/// That a phase was scanned, and which parameters it covered: without it "clean" and "never
/// scanned" would be the same.
struct Coverage {
  Phase phase = Phase::grad_local;
  std::vector<std::int64_t> parameters;  // ids scanned, ascending
  /// Of params_before alone: the largest finite magnitude of each, at most a float's, 0 without
  /// one. Where one rank's copy of a weight is bad, it says what the others hold.
  std::vector<float> absmax{};
  friend bool operator==(const Coverage&, const Coverage&) = default;
};

/// How many crossings of one kind this rank scanned: tells "sent finite" from "not seen".
struct CrossingCoverage {
  std::string group;
  RankList members;         // global ranks
  std::optional<int> peer;  // of sends and receives
  TensorRole role;          // sent or received; a collective counts once, as sent
  std::int64_t first = 0;   // the first in the pass; those before it nobody scanned
  std::int64_t count = 0;   // sequences first to count - 1 were scanned, but for
  /// these, written as ranks are: bytes of a quantised tensor, a subclass that hides its memory, a
  /// stream that was being captured. They are neither finite nor bad.
  RankList not_scanned;
  /// One of these gave each member something else: no all-gather, all-reduce or broadcast.
  bool is_unseen_by_member = false;
  /// The members also exchange activations by a way that is not watched (userbuffers of
  /// TransformerEngine, DeepEP, symmetric memory).
  bool has_unwatched = false;
  /// Weights that were gathered here were scanned where they arrived.
  bool watches_weights = false;
  /// All that crossed here was scanned, as far as `count` says.
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

/// What `locate` needs to know of a parameter beyond its id.
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
  friend bool operator==(const ParameterRecord&, const ParameterRecord&) = default;
};

/// How the re-run of the bad step went, as far as this rank saw it.
struct Rerun {
  /// Bad again on any rank; empty where the re-run did not complete.
  std::optional<bool> reproduced;
  /// Of a second re-run without the trace, where the first was clean: bad again on any rank.
  std::optional<bool> control_reproduced;
  std::int64_t gradients = 0;  // of this rank that both passes made
  std::int64_t changed = 0;    // of these, with other bits in the second pass
  /// Ids of parameters of this rank whose local gradients (before the data-parallel collective)
  /// were bad in the re-run.
  std::vector<std::int64_t> bad_parameters;
  /// State that the first pass moved and that could not be restored.
  std::vector<std::string> not_restored;
  std::vector<VariantOutcome> variants;    // in the order in which they ran
  std::vector<UnorderedAccess> unordered;  // of the traced pass
  /// What was seen to use memory of the step while operators of the traced pass ran, in order or
  /// not. Of transfers: the memory of gradients that were bad in the first pass.
  std::vector<Concurrent> concurrent;
  friend bool operator==(const Rerun&, const Rerun&) = default;
};

/// What the optimizer keeps of a parameter whose weight was bad before the step: tells whether its
/// update made the weight bad.
struct OptimizerState {
  std::int64_t parameter = 0;  // id
  std::string name;            // "exp_avg"; "main_param": its own copy of the weight
  TensorStats stats;           // `first_bad` counts in the whole parameter
  friend bool operator==(const OptimizerState&, const OptimizerState&) = default;
};

/// What this rank's copy of a weight holds at the element that is bad on another rank.
struct WeightValue {
  std::string parameter;
  std::int64_t element = 0;  // flat, row-major
  double value = 0;
  friend bool operator==(const WeightValue&, const WeightValue&) = default;
};

/// What a collective that gives every member the same (all-reduce, broadcast) gave this rank in a
/// pass of the re-run; finite.
struct CollectiveResult {
  Phase phase = Phase::forward;
  std::optional<int> microbatch;
  std::string module;  // "" where unknown
  std::string op;
  Crossing crossing;
  std::uint64_t fingerprint = 0;  // of its bits
  double absmax = 0;
  double sum_of_squares = 0;
  std::int64_t zeros = 0;  // elements
  friend bool operator==(const CollectiveResult&, const CollectiveResult&) = default;
};

/// Asked by the rank on which something was born, of those that should have the same: which of
/// their collectives' results and which element of a weight they are to report.
struct PeerQuestion {
  int rank = 0;                   // global; who asks
  std::optional<int> microbatch;  // of the results; empty: of all
  std::string parameter;          // the weight's name; "" for none
  std::int64_t element = 0;       // of it, flat
  friend bool operator==(const PeerQuestion&, const PeerQuestion&) = default;
};
[[nodiscard]] std::string to_json(const PeerQuestion& question);
/// Throws FormatError, which calls the text `source`.
[[nodiscard]] PeerQuestion peer_question_from_json(const std::string& text,
                                                   const std::string& source);

struct Ledger {
  std::string run_id;
  int attempt = 0;  // restarts of the job
  std::int64_t iteration = 0;
  RankCoordinates coordinates;
  std::string level = "grads";
  std::string on_bad = "stop";      // what the run does after a finding: the policy's name
  std::vector<Sighting> sightings;  // bad tensors only, in the order in which they were scanned
  std::vector<Coverage> coverage;   // at most one per phase
  std::vector<CrossingCoverage> crossings;       // level boundaries
  std::vector<Microbatch> microbatches;          // that this rank drew in the step
  std::vector<OptimizerState> optimizer_states;  // finite ones, too
  /// The latest step after whose update every rank's weights were scanned and finite.
  std::optional<std::int64_t> weights_finite_after;
  std::vector<Birth> births;   // in execution order; of the re-run, where one was traced
  std::optional<Rerun> rerun;  // empty: the step was not re-run
  std::vector<WeightValue> weight_values;            // answers to another rank's PeerQuestion
  std::vector<CollectiveResult> collective_results;  // the same, and the asking rank's own
  /// This rank's parameters in the order in which backward finished their gradients (observed), or
  /// in reverse registration order where it was not observed.
  std::vector<ParameterRecord> backward_order;
  bool is_backward_order_observed = false;
  std::optional<double> gradient_norm;  // the framework's own, where it was seen
  /// What the gradients were multiplied by, of a scaler that lowers it after an overflow.
  std::optional<double> loss_scale;
  /// The framework leaves this step's update out by itself, whatever the policy.
  bool framework_skips_update = false;
  /// Largest finite |gradient| of this rank before the clip, and whose it is (for a norm that
  /// overflows though every gradient is finite).
  std::optional<double> absmax;
  std::string absmax_parameter;
  std::optional<HistorySummary> history;  // of the latest steps, this one included
  std::vector<std::string> notes;         // what this rank could not do or see
  bool is_complete = true;                // false: read from a file or message that was cut off

  friend bool operator==(const Ledger&, const Ledger&) = default;
};

/// The ledger as JSON lines, each ending in '\n'. Non-finite numbers are written as strings.
[[nodiscard]] std::string to_jsonl(const Ledger& ledger);

/// Every ledger in `text`, in its order. A truncated tail gives a ledger with `is_complete` false;
/// so does a line that cannot be read, which is skipped and named in that ledger's notes: what it
/// said is unknown, and so is whether the parameters without a sighting were clean. `source` is
/// what messages call the text. Throws FormatError where not even a header can be read.
[[nodiscard]] std::vector<Ledger> ledgers_from_jsonl(std::string_view text,
                                                     const std::string& source);

/// Appends one ledger to `directory`/ledger_<coordinates>.jsonl in one write, then fsync. Throws
/// IoError; what was in the file before stays readable.
void append_ledger(const std::filesystem::path& directory, const Ledger& ledger);

}  // namespace nanlocator::inline record_room
