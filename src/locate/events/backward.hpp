// Backward order: a bad gradient of an activation makes the gradient of every parameter bad that
// backward visits later, on its rank, on the stages below and, after the next tensor-parallel sum,
// on the other tensor-parallel ranks.
//
// The activations' gradients are not scanned: they are the unknown events of these edges. A finite
// gradient of a parameter proves those finite that backward computed before it (is_witness), unless
// it is zero: relu, where and max pooling stop a NaN as they stop any other gradient.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <set>
#include <span>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "incident/incident.hpp"

namespace nanlocator::inline locate_room::events {

/// Selects the bad parameters; others count as not scanned.
using BadFilter = std::function<bool(const RankEvidence&, const BadParameter&)>;

/// A parameter in backward order.
struct Step {
  std::size_t stage = 0;  // into Lane::stages
  const ParameterRecord* parameter = nullptr;
  Status status = Status::unknown;
  const Sighting* sighting = nullptr;  // null unless bad
  bool is_zero = false;                // every element
  bool is_in_flow = false;
};

/// The ranks of a stage with one tensor-parallel rank: one, or several whose common state was seen.
struct Cell {
  std::vector<int> ranks;  // ascending
  bool has_evidence = false;
  std::size_t begin = 0, end = 0;  // its part of Chain::steps
};

/// One tensor-parallel rank through all stages.
struct Chain {
  int tp = 0;
  std::vector<Cell> cells;  // by stage
  std::vector<Step> steps;
  /// The stretch of bad steps at its end begins at `start`, or at `later_start` if finite steps of
  /// one layer are on a parallel branch (q's gradient is bad, k's is finite). Empty: there is none.
  std::optional<std::size_t> start, later_start;
  std::size_t bad_steps = 0;  // from `later_start` on
  bool has_witness = false;

  [[nodiscard]] std::span<const Step> steps_of(std::size_t stage) const {
    return std::span(steps).subspan(cells[stage].begin, cells[stage].end - cells[stage].begin);
  }
};

/// One (chunk, pp) part of the model.
struct Stage {
  std::int64_t index = 0;  // chunk * pipeline size + pp: descends in backward
  int pp = 0;
  std::unordered_set<std::string_view> bad_duplicates{};  // tp-duplicates that are bad on some rank
  bool has_unseen = false;                                // a rank of it did not answer
};

/// The pipeline of one (dp, cp) rank, or of all of them merged.
struct Lane {
  int dp = 0;
  int cp = 0;
  std::vector<Stage> stages;  // in backward order
  std::vector<Chain> chains;
  bool is_order_observed = true;
  bool has_all_stages = true;

  /// True if `step` is finite and a flow would have made it bad. Not a gradient of zeros, nor a
  /// parameter that a batch may leave untouched, nor a tensor-parallel duplicate that is bad or
  /// unknown on another rank of its stage: with sequence parallelism a rank sees only its own
  /// tokens.
  [[nodiscard]] bool is_witness(const Step& step) const;
};

/// The stretch of gradients through which a bad gradient of an activation passed to the end of
/// backward.
struct Flow {
  const Chain* chain = nullptr;
  std::size_t start = 0;  // into its steps
  std::size_t bad_steps = 0;
  bool may_come_from_forward = false;  // nothing on some chain proves its first gradient finite
  bool is_first_of_stage = false;      // nothing on its stage proves what it received finite
  bool is_on_one_rank = false;  // a sharded parameter shows that one tensor-parallel rank was ahead
  bool has_reached_others = false;  // of the tensor-parallel ranks
  std::set<int> ranks;   // on which the first bad gradient of an activation may have been
  std::set<int> stages;  // pp ranks of these
};

[[nodiscard]] Lane make_lane(const Incident& incident, std::span<const Place* const> places,
                             Phase phase, const BadFilter& keep);
/// Also marks the lane's steps that the flow explains.
[[nodiscard]] std::optional<Flow> find_flow(Lane& lane);

/// "decoder.layers.3" of "decoder.layers.3.mlp.linear_fc1.weight": the name up to its first number;
/// empty without one.
[[nodiscard]] std::string_view layer_of(std::string_view parameter);

}  // namespace nanlocator::inline locate_room::events
