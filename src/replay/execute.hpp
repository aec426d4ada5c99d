// One execution of an operator call, with fresh copies of the tensors that it writes, its
// generators' states and its settings. Restores everything of this thread.
#pragma once

#include <ATen/core/ivalue.h>

#include <optional>
#include <vector>

#include "nanlocator/replay/capture.hpp"
#include "nanlocator/replay/operator_call.hpp"

namespace nanlocator::inline replay_room {

/// The call with floating-point and complex tensors, dtype arguments and out= tensors of `dtype`'s
/// kind (kFloat, kDouble; complex: twice that), without autocast. Tensors without overlap keep
/// their strides; tensors no longer share memory.
[[nodiscard]] OperatorCall with_precision(const OperatorCall& call, at::ScalarType dtype);

/// The call with its arguments on their original devices. Throws Torch's error if there is no
/// memory.
[[nodiscard]] OperatorCall on_recorded_devices(const OperatorCall& call);

/// The call with everything in host memory.
[[nodiscard]] OperatorCall on_host(const OperatorCall& call);

/// Executes `call` on this thread and returns values as in OperatorCall::outputs. Hidden from
/// observers. Throws the operator's errors. Adds settings that could not be restored to `problems`.
[[nodiscard]] std::vector<c10::IValue> execute(const OperatorCall& call,
                                               std::vector<std::string>& problems);

}  // namespace nanlocator::inline replay_room
