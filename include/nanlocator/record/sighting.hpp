// One tensor's stats at one place of one step, produced by every observer.
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

/// Phases of a training step, in execution order.
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

/// The transfer of a tensor between ranks: a collective among `members`, or a send to `peer` and
/// the receive at its other end.
struct Crossing {
  std::string group;        // the framework's name of the process group: "tp", "pp", "ep"
  RankList members;         // global ranks
  std::optional<int> peer;  // global rank, for a send or receive
  /// Counts from 0 in each pass over the step, the same on all participating ranks: the collectives
  /// of this group, or the messages in it from one rank to the other.
  std::int64_t sequence = 0;
  /// A framework gathers parameters from their shards. These are scanned separately, and the
  /// shards' padding may contain anything.
  bool carries_weights = false;

  friend bool operator==(const Crossing&, const Crossing&) = default;
};

/// A sighting. A field that the observer's level cannot know is empty, never guessed.
struct Sighting {
  std::int64_t iteration = 0;     // counted from 1, as Megatron's log prints it
  std::optional<int> microbatch;  // counted from 0
  std::optional<int> chunk;       // virtual-pipeline model chunk
  Phase phase = Phase::grad_local;
  std::string module;  // "" if unknown
  std::string op;      // operator, "aten::div"; "" if unknown
  TensorRole role;     // with a crossing: sent or received
  std::optional<std::int64_t> parameter_id;
  std::string parameter;  // its name; "" if it is not a parameter
  std::string dtype;      // of the scanned tensor, in DType's spelling ("complex64" for complex)
  std::vector<std::int64_t> shape;  // of the whole parameter, even if only a shard was scanned
  /// `first_bad` is a row-major index into the whole parameter, even if only a shard was scanned.
  TensorStats stats;
  std::optional<Crossing> crossing;  // for tensors that were sent or received
  /// The number of crossings that this rank had issued in the pass when the value was seen
  /// (watch/position.hpp). Unknown also for values that existed before the pass, or were seen after
  /// it: their phase, or the kind of their birth, says so.
  std::optional<std::int64_t> position;
  std::optional<std::int64_t> valid_labels;  // for a loss: the number of labels in it

  friend bool operator==(const Sighting&, const Sighting&) = default;
};

}  // namespace nanlocator::inline record_room
