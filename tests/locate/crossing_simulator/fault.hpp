// What goes wrong in a simulated step: the kinds of fault, where each sits, and what it concerns.
#pragma once

#include <cstdint>
#include <string>

#include "locate/simulated_job.hpp"
#include "nanlocator/record/birth.hpp"

namespace nanlocator::pipeline {

using simulator::Layout;

enum class Plant {
  operator_forward,   // between the GEMMs of a block, on one tp rank
  operator_backward,  // the same in backward
  transfer_forward,   // what the stage receives from the one before
  transfer_backward,  // what the stage receives from the one after
  sum_forward,        // what one tp rank gets out of the block's reduction
  sum_backward,
  sum_everywhere,      // what every tp rank gets out of it, in forward
  empty_loss,          // 0/0
  gradient,            // one element of a gradient, after backward
  weight,              // before the step
  reduced,             // one rank's result of the data-parallel reduction
  reduced_everywhere,  // every member's result
  norm_gradient,       // one element where the optimizer reads it
  update,              // one element of a parameter that the optimizer has updated
  norm_value,          // the sum of squares of finite gradients, the largest of which is here
};

constexpr int kEveryMicrobatch = -1;

/// What a trace of the fault's operator would write.
struct TracedBirth {
  BirthKind kind = BirthKind::nan;
  ReplayConclusion replay = ReplayConclusion::deterministic_undefined;
  bool is_of_recomputation = false;   // a forward that runs again in backward
  bool is_of_auxiliary_loss = false;  // a forward on which gradients depend, and no output
};

struct Fault {
  Plant plant = Plant::operator_forward;
  int tp = 0, dp = 0;
  int stage = 0;
  int layer = 0;  // in the stage
  bool is_mlp = false;
  int microbatch = 0;
  bool is_repeated = false;          // in the repeat of the step, too
  int token = 0;                     // which of the tokens that are there
  bool is_overflow = false;          // of a sum: Inf, beside numbers close to the dtype's largest
  bool is_on_every_replica = false;  // of a weight: a checkpoint's, or an all-gather's
  bool is_climb = false;  // of the norm: the largest gradient climbed over the steps before
  TracedBirth birth;

  [[nodiscard]] bool is_in(int of_microbatch) const {
    return microbatch == kEveryMicrobatch || microbatch == of_microbatch;
  }
  [[nodiscard]] bool is_of_dp(int rank) const { return dp == rank || is_on_every_replica; }
  /// Of this rank's part of the model, on whichever dp rank.
  [[nodiscard]] bool is_of_part(const RankCoordinates& at) const {
    return tp == at.tp.rank && stage % at.pp.size == at.pp.rank;
  }
  [[nodiscard]] bool is_on(const RankCoordinates& at) const {
    return is_of_part(at) && is_of_dp(at.dp.rank);
  }
  /// It strikes while forward or backward runs.
  [[nodiscard]] bool is_in_pass() const {
    return plant < Plant::gradient || plant == Plant::weight;
  }
};

[[nodiscard]] int rank_of(const Layout& layout, const Fault& fault);
/// The module that hands on what the fault spoiled.
[[nodiscard]] std::string module_of(const Layout& layout, const Fault& fault);
/// A sharded weight in the middle of a stage: others after it vouch for what flowed past.
[[nodiscard]] std::string gradient_of(const Layout& layout, const Fault& fault);
[[nodiscard]] std::string weight_of(const Layout& layout, const Fault& fault);
/// The element that is spoiled; with a distributed optimizer one that this rank owns.
[[nodiscard]] std::int64_t element_of(const Layout& layout, const Fault& fault);

}  // namespace nanlocator::pipeline
