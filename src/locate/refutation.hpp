#pragma once

#include <string>

#include "nanlocator/locate/verdict.hpp"

namespace nanlocator {

/// One sentence: the observation that would refute the origin's cause, or its place where the cause
/// is not known.
[[nodiscard]] std::string refutation_of(const Origin& origin);

}  // namespace nanlocator
