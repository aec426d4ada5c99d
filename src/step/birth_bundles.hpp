// Births become evidence: each origin is replayed alone and kept as a bundle.
#pragma once

#include <vector>

#include "nanlocator/step/framework.hpp"
#include "nanlocator/step/gradient_locator.hpp"

namespace nanlocator::inline step_room {

/// The births that an operator or hook made and nothing but a mask came before: for their bundles
/// the module calls around them are kept.
[[nodiscard]] std::vector<Birth> births_with_calls(const Explanation& explanation);
/// The same of those that a call of a kernel made, or left unwritten: that call is kept.
[[nodiscard]] std::vector<Birth> births_of_kernels(const Explanation& explanation);

/// The births of `explanation`, the replay's conclusion and the bundle's folder filled in for those
/// that nothing but a mask came before. `locator` writes the bundles when the verdict is out; one
/// that cannot be made is a note of it.
[[nodiscard]] std::vector<Birth> keep_births(const Explanation& explanation,
                                             GradientLocator& locator, std::int64_t iteration,
                                             Framework& framework);

}  // namespace nanlocator::inline step_room
