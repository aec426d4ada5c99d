// The births that a trace of a re-run would record for the faults in it.
#pragma once

#include <vector>

#include "locate/crossing_simulator/fault.hpp"
#include "locate/crossing_simulator/strikes.hpp"
#include "nanlocator/record/birth.hpp"

namespace nanlocator::pipeline {

/// The births from the fault's operator on this rank, one per microbatch. Empty on ranks that only
/// received bad values, and for faults that no operator shows.
[[nodiscard]] std::vector<Birth> births_of(const Layout& layout, const Fault& fault,
                                           const Strikes& strikes, int rank);

/// The birth recorded by a rank that received its first bad tensor, `first`, from another one.
[[nodiscard]] Birth receipt(const Sighting& first);

}  // namespace nanlocator::pipeline
