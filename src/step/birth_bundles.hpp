// Turns births into evidence: each origin is replayed alone and kept as a bundle.
#pragma once

#include <vector>

#include "nanlocator/step/framework.hpp"
#include "nanlocator/step/gradient_locator.hpp"

namespace nanlocator::inline step_room {

/// Births made by an operator or hook without an earlier birth (except a mask). The module calls
/// around them are kept for their bundles.
[[nodiscard]] std::vector<Birth> births_with_calls(const Explanation& explanation);
/// The same for births made by a kernel call, or left unwritten by it; that call is kept.
[[nodiscard]] std::vector<Birth> births_of_kernels(const Explanation& explanation);

/// Returns the births of `explanation`. Those without an earlier birth (except a mask) get the
/// replay's conclusion and the bundle's folder. `locator` writes the bundles after the verdict; a
/// bundle that cannot be made becomes a note.
[[nodiscard]] std::vector<Birth> keep_births(const Explanation& explanation,
                                             GradientLocator& locator, std::int64_t iteration,
                                             Framework& framework);

}  // namespace nanlocator::inline step_room
