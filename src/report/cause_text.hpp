// The words of the cause table: titles, owners, open suspects, refutations, actions.
#pragma once

#include <string>
#include <vector>

#include "nanlocator/locate/verdict.hpp"

namespace nanlocator::inline report_room {

/// "aten::log of module encoder.norm", the parameter, or "this operation".
[[nodiscard]] std::string operation_of(const Origin& origin);
/// The next steps, in order, without the check of the machines.
[[nodiscard]] std::vector<std::string> steps_text(const Origin& origin);

}  // namespace nanlocator::inline report_room
