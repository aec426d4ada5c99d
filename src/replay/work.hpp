// The work of an operator call, from the shapes of its tensors, which may be without memory: enough
// to know that a replay on the CPU would take minutes.
#pragma once

#include "nanlocator/replay/operator_call.hpp"

namespace nanlocator::inline replay_room {

struct Work {
  double flops = 0;  // of matrix products, convolutions, attention, linear algebra; otherwise 0
  double bytes = 0;  // of the arguments' and results' tensors
};

/// Within a factor of a few; an unknown operator is assumed to read its tensors once.
[[nodiscard]] Work work_of(const OperatorCall& call);

}  // namespace nanlocator::inline replay_room
