// Attention in precisions that GPU attention kernels lack.
#pragma once

#include <optional>

#include "nanlocator/replay/operator_call.hpp"

namespace nanlocator::inline replay_room {

/// PyTorch's flash, memory-efficient and cuDNN attention kernels support 16 and at most 32 bits.
/// This is the call of `aten::_scaled_dot_product_attention_math` on the same tensors, whose first
/// output has the same elements (batch, heads, sequence, head dimension). Empty for other
/// operators, and if the call needs what it lacks: dropout, packed sequences, windows, ALiBi.
[[nodiscard]] std::optional<OperatorCall> attention_by_formula(const OperatorCall& call);

}  // namespace nanlocator::inline replay_room
