// The parameters of each pipeline rank of a Megatron-Core GPT model.
#pragma once

#include <vector>

#include "incident/simulated_job.hpp"
#include "nanlocator/record/ledger.hpp"

namespace nanlocator::pipeline {

using simulator::Layout;

/// By pipeline rank, in the order in which backward finishes their gradients.
using BackwardOrders = std::vector<std::vector<ParameterRecord>>;
[[nodiscard]] BackwardOrders backward_orders(const Layout& layout);

/// The part of each parameter that a dp rank's distributed optimizer owns.
[[nodiscard]] ElementRange shard_of(const Layout& layout, int dp);

}  // namespace nanlocator::pipeline
