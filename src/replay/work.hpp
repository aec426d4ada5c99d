// How much an operator call computes, from the shapes of its tensors, which may be without memory:
// enough to know that a replay on the CPU would take minutes.
#pragma once

#include "nanlocator/replay/operator_call.hpp"

namespace nanlocator::inline replay_room {

struct Work {
  double flops = 0;  // of products of matrices, convolutions, attention, linear algebra; else 0
  double bytes = 0;  // of the tensors that it is given and returns
};

/// Within a factor of a few; an operator that it does not know is taken for one that passes over
/// its tensors once.
[[nodiscard]] Work work_of(const OperatorCall& call);

}  // namespace nanlocator::inline replay_room
