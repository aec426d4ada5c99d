// The faults of a simulated step: kind, place and extent.
#pragma once

#include <cstdint>
#include <string>

#include "incident/simulated_job.hpp"
#include "nanlocator/record/birth.hpp"

namespace nanlocator::pipeline {

using simulator::Layout;

enum class Plant {
  operator_forward,   // between the GEMMs of a block, on one tp rank
  operator_backward,  // the same in backward
  transfer_forward,   // received by the stage from the one before
  transfer_backward,  // received by the stage from the one after
  sum_forward,        // one tp rank's result of the block's reduction
  sum_backward,
  sum_everywhere,      // every tp rank's result, in forward
  empty_loss,          // 0/0
  gradient,            // one element of a gradient, after backward
  weight,              // before the step
  reduced,             // one rank's result of the data-parallel reduction
  reduced_everywhere,  // every member's result
  norm_gradient,       // one element as the optimizer reads it
  update,              // one element of an updated parameter
  norm_value,          // the sum of squares of finite gradients, of which the largest is here
};

constexpr int kEveryMicrobatch = -1;

/// The birth that a trace of the fault's operator would record.
struct TracedBirth {
  BirthKind kind = BirthKind::nan;
  ReplayConclusion replay = ReplayConclusion::deterministic_undefined;
  bool is_of_recomputation = false;   // a forward that backward recomputes
  bool is_of_auxiliary_loss = false;  // a forward that only gradients depend on
};

struct Fault {
  Plant plant = Plant::operator_forward;
  int tp = 0, dp = 0;
  int stage = 0;
  int layer = 0;  // in the stage
  bool is_mlp = false;
  int microbatch = 0;
  bool is_repeated = false;          // in the re-run of the step, too
  int token = 0;                     // index among the tokens present
  bool is_overflow = false;          // for a sum: Inf, beside numbers close to the dtype's largest
  bool is_on_every_replica = false;  // for a weight: from a checkpoint or an all-gather
  bool is_climb = false;  // for the norm: the largest gradient climbed over the steps before
  TracedBirth birth;

  [[nodiscard]] bool is_in(int of_microbatch) const {
    return microbatch == kEveryMicrobatch || microbatch == of_microbatch;
  }
  [[nodiscard]] bool is_of_dp(int rank) const { return dp == rank || is_on_every_replica; }
  /// True for this rank's part of the model, on any dp rank.
  [[nodiscard]] bool is_of_part(const RankCoordinates& at) const {
    return tp == at.tp.rank && stage % at.pp.size == at.pp.rank;
  }
  [[nodiscard]] bool is_on(const RankCoordinates& at) const {
    return is_of_part(at) && is_of_dp(at.dp.rank);
  }
  /// True if the fault strikes during forward or backward.
  [[nodiscard]] bool is_in_pass() const {
    return plant < Plant::gradient || plant == Plant::weight;
  }
};

[[nodiscard]] int rank_of(const Layout& layout, const Fault& fault);
/// The module that sends the bad value.
[[nodiscard]] std::string module_of(const Layout& layout, const Fault& fault);
/// A sharded weight in the middle of a stage: clean parameters after it show that the activations'
/// gradients were clean.
[[nodiscard]] std::string gradient_of(const Layout& layout, const Fault& fault);
[[nodiscard]] std::string weight_of(const Layout& layout, const Fault& fault);
/// The spoiled element; with a distributed optimizer, one that this rank owns.
[[nodiscard]] std::int64_t element_of(const Layout& layout, const Fault& fault);

}  // namespace nanlocator::pipeline
