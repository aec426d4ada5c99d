// One execution of an operator call: fresh copies of what it writes, its generators' states, its
// settings; everything of this thread as before afterwards.
#pragma once

#include <ATen/core/ivalue.h>

#include <optional>
#include <vector>

#include "nanlocator/replay/capture.hpp"
#include "nanlocator/replay/operator_call.hpp"

namespace nanlocator::inline replay_room {

/// The call with floating-point and complex tensors, dtype arguments and out= tensors of `dtype`'s
/// kind (kFloat, kDouble; complex: twice that), without autocast. Tensors keep their strides where
/// they overlap nowhere; what shared memory does so no longer.
[[nodiscard]] OperatorCall with_precision(const OperatorCall& call, at::ScalarType dtype);

/// The call with its arguments on the devices where they were recorded. Throws what Torch throws
/// where there is no memory.
[[nodiscard]] OperatorCall on_recorded_devices(const OperatorCall& call);

/// The call with everything in host memory.
[[nodiscard]] OperatorCall on_host(const OperatorCall& call);

/// Executes `call` on this thread and returns what OperatorCall::outputs holds. Seen by no
/// observer. Throws what the operator throws. `problems` receives settings that could not be
/// restored.
[[nodiscard]] std::vector<c10::IValue> execute(const OperatorCall& call,
                                               std::vector<std::string>& problems);

}  // namespace nanlocator::inline replay_room
