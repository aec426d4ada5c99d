// The same attention in precisions that GPU kernels of attention do not have.
#pragma once

#include <optional>

#include "nanlocator/replay/operator_call.hpp"

namespace nanlocator::inline replay_room {

/// PyTorch's flash, memory-efficient and cuDNN kernels of attention take 16 and at most 32 bits:
/// the call of `aten::_scaled_dot_product_attention_math` on the same tensors, whose first output
/// holds the same elements as theirs (batch, heads, sequence, head dimension). Empty for other
/// operators, and where that has not what the call asks for: dropout, packed sequences, windows,
/// ALiBi.
[[nodiscard]] std::optional<OperatorCall> attention_by_formula(const OperatorCall& call);

}  // namespace nanlocator::inline replay_room
