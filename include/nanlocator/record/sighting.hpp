// One tensor's stats at one place of one step: what every observer produces.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "nanlocator/files/names.hpp"
#include "nanlocator/map/rank_list.hpp"
#include "nanlocator/record/tensor_role.hpp"
#include "nanlocator/scan/tensor_stats.hpp"

namespace nanlocator::inline record_room {

/// Where in a training step, in execution order.
enum class Phase : std::uint8_t {
  params_before,  // parameters before forward
  forward,
  loss,
  backward,
  grad_local,    // this rank's gradients before any data-parallel collective
  grad_reduced,  // after the data-parallel collective
  grad_norm,     // the optimizer's own gradients (unscaled, copied, sharded), before the clip
  params_after,  // parameters after the optimizer step
};
[[nodiscard]] constexpr auto names_of(Phase) {
  return std::to_array<std::string_view>({"params_before", "forward", "loss", "backward",
                                          "grad_local", "grad_reduced", "grad_norm",
                                          "params_after"});
}

/// How a tensor went from rank to rank: a collective among `members`, or a send to `peer` and the
/// receive at its other end.
struct Crossing {
  std::string group;        // the framework's name of the process group: "tp", "pp", "ep"
  RankList members;         // global ranks
  std::optional<int> peer;  // global rank, of a send or receive
  /// Counts from 0 in each pass over the step, the same on all ranks that take part: the
  /// collectives of this group, or the messages from the one rank to the other in it.
  std::int64_t sequence = 0;
  /// A framework gathers parameters from their shards: these are scanned by themselves, and what
  /// pads the shards may be anything.
  bool carries_weights = false;

  friend bool operator==(const Crossing&, const Crossing&) = default;
};

/// A sighting. What the observer's level cannot know is empty, never guessed.
struct Sighting {
  std::int64_t iteration = 0;     // counted from 1, as Megatron's log prints it
  std::optional<int> microbatch;  // counted from 0
  std::optional<int> chunk;       // virtual-pipeline model chunk
  Phase phase = Phase::grad_local;
  std::string module;  // "" where unknown
  std::string op;      // operator, "aten::div"; "" where unknown
  TensorRole role;     // of one that has a crossing: sent or received
  std::optional<std::int64_t> parameter_id;
  std::string parameter;  // its name; "" for what is no parameter
  std::string dtype;  // of the tensor that was scanned, DType's spelling ("complex64" for complex)
  std::vector<std::int64_t> shape;  // of the whole parameter, where only a shard was scanned
  /// `first_bad` counts in the whole parameter (row-major), also where only a shard was scanned.
  TensorStats stats;
  std::optional<Crossing> crossing;          // of what was sent or received
  std::optional<std::int64_t> valid_labels;  // of a loss: how many labels it counts

  friend bool operator==(const Sighting&, const Sighting&) = default;
};

}  // namespace nanlocator::inline record_room
