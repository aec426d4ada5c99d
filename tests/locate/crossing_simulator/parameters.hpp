// The parameters of each pipeline rank, as a Megatron-Core GPT model holds them.
#pragma once

#include <vector>

#include "locate/simulated_job.hpp"
#include "nanlocator/record/ledger.hpp"

namespace nanlocator::pipeline {

using simulator::Layout;

/// By pipeline rank, in the order in which backward finishes their gradients.
using BackwardOrders = std::vector<std::vector<ParameterRecord>>;
[[nodiscard]] BackwardOrders backward_orders(const Layout& layout);

/// What of each parameter a dp rank's distributed optimizer owns.
[[nodiscard]] ElementRange shard_of(const Layout& layout, int dp);

}  // namespace nanlocator::pipeline
