// The one answer of all ranks (verdict.json, version 1; docs/formats.md).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "nanlocator/map/rank_coordinates.hpp"
#include "nanlocator/record/sighting.hpp"

namespace nanlocator {

enum class VerdictStatus {
  clean,    // nothing bad
  benign,   // explained and harmless: a loss scaler's routine overflow
  located,  // every origin below is supported by complete evidence
  partial,  // ranks are silent or ledgers cut off: origins hold for what was seen
};
enum class Confidence { low, medium, high };
enum class Direction { forward, backward, none };
enum class Cause {
  bad_weight,
  bad_buffer,
  bad_input,
  empty_loss_mask,
  operator_overflow,
  operator_undefined,
  operator_bug,
  memory_corruption,
  not_reproduced,
  collective_result,
  collective_sum,
  pipeline_transfer,
  recompute_mismatch,
  optimizer_update,
  optimizer_state,
  divergence,
  user_hook,
  loss_scale,
  unknown,
};
[[nodiscard]] std::string_view name_of(VerdictStatus status) noexcept;
[[nodiscard]] std::string_view name_of(Confidence confidence) noexcept;
[[nodiscard]] std::string_view name_of(Direction direction) noexcept;
[[nodiscard]] std::string_view name_of(Cause cause) noexcept;

struct OriginTensor {
  std::string role;
  std::vector<std::int64_t> shape;
  std::string dtype;
  std::int64_t nan = 0;
  std::int64_t pos_inf = 0;
  std::int64_t neg_inf = 0;
  std::optional<std::int64_t> first_bad;      // flat, row-major
  std::vector<std::int64_t> first_bad_index;  // the same, per dimension
  std::optional<double> absmax_finite;
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
  std::string parameter;
  std::optional<OriginTensor> tensor;
  Cause cause = Cause::unknown;
  Confidence confidence = Confidence::low;
  std::vector<std::string> evidence;  // sentences
  std::string refutation;             // one sentence: what would refute the cause
  std::string action;                 // one sentence
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

/// The repeat of the step, over all ranks.
struct RerunOutcome {
  bool done = false;
  std::optional<bool> reproduced;  // empty: not done, or the ranks' repeats came to no end
  std::vector<std::string> not_restored;
};

struct Verdict {
  std::string run_id;
  std::int64_t iteration = 0;
  VerdictStatus status = VerdictStatus::clean;
  std::vector<Origin> origins;
  Spread spread;
  std::vector<std::string> clean;  // parameters that bracket the fault, in backward order
  RerunOutcome rerun;
  std::vector<int> silent_ranks;  // no ledger arrived
  std::vector<std::string> notes;
};

[[nodiscard]] std::string to_json(const Verdict& verdict);
/// Throws FormatError; `source` is what the message calls the text.
[[nodiscard]] Verdict verdict_from_json(std::string_view text, const std::string& source);

}  // namespace nanlocator
