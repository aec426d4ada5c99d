// Finds where in backward a fault started, for one data-parallel replica and one gradient phase.
//
// A NaN in the gradient of an activation makes the gradient of every parameter bad that backward
// visits after it: on this rank, through the pipeline's sends on the stages below, and through the
// tensor-parallel all-reduces on the other tensor-parallel ranks. So a bad stretch that reaches the
// end of backward has one start, while a bad parameter with clean ones after it has not spread.
// docs/causes.md has the consequences and their limits.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "locate/evidence.hpp"

namespace nanlocator::inline locate_room {

/// A parameter in backward order.
struct Step {
  const ParameterRecord* parameter = nullptr;
  Status status = Status::unknown;
  const Sighting* sighting = nullptr;  // null unless bad
  bool is_in_flow = false;             // set by find_flow: explained by the flow's start
};

/// One tensor-parallel rank's part of a stage. `ranks` has several if data-parallel ranks were
/// merged, because only their common state was seen.
struct Cell {
  int tp = 0;
  std::vector<int> ranks;     // ascending
  bool has_evidence = false;  // some rank scanned the phase
  std::vector<Step> steps;    // in backward order
};

/// One (chunk, pp) part of the model; `index` = chunk * pipeline size + pp descends in backward.
struct Stage {
  std::int64_t index = 0;
  int pp = 0;
  std::vector<Cell> cells;                              // ascending tp
  std::unordered_set<std::string_view> bad_duplicates;  // tp-duplicates that are bad in a cell
  bool has_unseen_cell = false;  // a tensor-parallel rank of the stage did not answer
};

/// A bad parameter that is in no rank's backward order.
struct Unplaced {
  const BadParameter* bad = nullptr;
  std::vector<int> ranks;
};

/// The pipeline of one (dp, cp) rank, or of all of them merged.
struct Lane {
  int dp = 0;
  int cp = 0;
  std::vector<Stage> stages;  // in backward order
  std::vector<Unplaced> unplaced;
  bool is_order_observed = true;
  bool has_all_stages = true;  // false: all ranks of a stage are unknown
};

/// The position of a bad parameter in a lane.
struct StepPlace {
  std::size_t stage = 0;
  std::size_t cell = 0;
  std::size_t step = 0;
  friend auto operator<=>(const StepPlace&, const StepPlace&) = default;
};

/// A bad stretch that reaches the end of backward.
struct Flow {
  StepPlace start;
  std::size_t bad_steps = 0;
  /// Everything on the start's own ranks was bad: the loss or its gradient may have been bad
  /// already.
  bool may_come_from_forward = false;
  /// The start is the first parameter that backward visits on its stage: the bad value may have
  /// arrived from the stage above.
  bool is_at_stage_boundary = false;
  /// A parameter that is sharded over the tensor-parallel ranks is bad on only one of them.
  bool is_one_tp_rank = false;
  /// False if the other tensor-parallel ranks stayed clean to the end.
  bool reached_other_tp_ranks = false;
  std::vector<int> candidates;        // ascending
  std::vector<int> candidate_stages;  // pp ranks, ascending
};

/// True if `step` is a clean gradient that a flow would have made bad. A parameter that a batch may
/// leave untouched is no witness, nor is a tensor-parallel duplicate that is bad or unknown on
/// another rank of the stage: with sequence parallelism a rank sees only its own tokens.
[[nodiscard]] bool is_clean_witness(const Stage& stage, const Step& step);

/// The lane's flow, or empty. Sets `is_in_flow` on the steps that the flow explains.
[[nodiscard]] std::optional<Flow> find_flow(Lane& lane);

/// "decoder.layers.3" of "decoder.layers.3.mlp.linear_fc1.weight": the name up to its first number.
/// Empty without a number, that is, outside the layers.
[[nodiscard]] std::string_view layer_of(std::string_view parameter);

}  // namespace nanlocator::inline locate_room
