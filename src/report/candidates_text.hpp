// The ranks that an origin may have been born on, in words.
#pragma once

#include <string>

#include "nanlocator/locate/verdict.hpp"

namespace nanlocator {

/// Of an origin with several candidates, "ranks 0-3" where each of them has it, else "one of 4
/// ranks: 0-3". `list`: the candidates as they are to be shown.
[[nodiscard]] std::string candidates_text(const Origin& origin, const std::string& list);

}  // namespace nanlocator
