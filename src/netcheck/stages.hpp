// The stages that need several ranks: barrier, collectives, timing of neighbours.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <string>
#include <vector>

#include "netcheck/collective.hpp"
#include "netcheck/rank_check.hpp"

namespace nanlocator::netcheck {

/// One group of the layout. All ranks know all groups, in the same order.
struct CheckGroup {
  std::string kind;                              // "WORLD", "tp"
  std::vector<int> ranks;                        // global
  c10::intrusive_ptr<c10d::ProcessGroup> group;  // null if this rank is not a member

  [[nodiscard]] std::string name() const;  // "tp[4,5]", "WORLD"
};

struct CollectivePlan {
  std::vector<at::ScalarType> dtypes;
  std::int64_t max_bytes = 0;
  int repetitions = 3;  // timed, after one that is not
};

enum class Neighbours : std::uint8_t { ring, every_pair };

void run_barrier(RankCheck& check, const CheckGroup& world, at::Device device);
/// Every collective on one group, dtype by dtype, from 8 B to max_bytes; wrong elements and times
/// go into the rank's result. If this rank is not a member, its steps are counted and skipped.
void run_collectives(RankCheck& check, const CheckGroup& group, const CollectivePlan& plan,
                     at::Device device);
/// Each rank's own time until it launches, and the exchange of two ranks while the others wait.
void run_timing(RankCheck& check, const CheckGroup& world, Neighbours neighbours,
                std::int64_t bytes, at::Device device);

}  // namespace nanlocator::netcheck
