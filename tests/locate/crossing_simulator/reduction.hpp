// Reductions of gradients after backward: over dp; then, with sequence parallelism, of duplicates
// over tp, and of tied embeddings over the pipeline's ends (finalize_model_grads.py).
#pragma once

#include <vector>

#include "incident/simulated_job.hpp"
#include "locate/crossing_simulator/fault.hpp"
#include "locate/crossing_simulator/observer.hpp"
#include "locate/crossing_simulator/parameters.hpp"

namespace nanlocator::pipeline {

using simulator::BadByRank;

struct BadGradients {
  BadByRank local;    // after backward
  BadByRank reduced;  // after the data-parallel sum
  BadByRank read;     // by the optimizer
};

/// Derives the rest from the locally bad gradients. Faults in the reduction and after it strike
/// here.
[[nodiscard]] BadGradients reduce(const Layout& layout, const BackwardOrders& orders,
                                  const std::vector<Fault>& faults, BadByRank local,
                                  Observer& observer);

}  // namespace nanlocator::pipeline
