// What a trace of a repeated pass would tell of the faults in it.
#pragma once

#include <vector>

#include "locate/crossing_simulator/fault.hpp"
#include "nanlocator/record/birth.hpp"

namespace nanlocator::pipeline {

/// What the fault's operator made on this rank, in each microbatch. Empty on ranks that only got
/// it from others, and of faults that no operator sees.
[[nodiscard]] std::vector<Birth> births_of(const Layout& layout, const Fault& fault, int rank);

/// What a rank writes that got its first bad tensor from another one.
[[nodiscard]] Birth receipt();

}  // namespace nanlocator::pipeline
