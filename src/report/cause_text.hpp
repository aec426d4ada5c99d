// The words of the cause table: titles, owners, what is open, what would refute, what to do.
#pragma once

#include <string>
#include <vector>

#include "nanlocator/locate/verdict.hpp"

namespace nanlocator::inline report_room {

/// "aten::log of module encoder.norm", the parameter, or "this operation".
[[nodiscard]] std::string operation_of(const Origin& origin);
/// What to do next, in this order, without the check of the machines.
[[nodiscard]] std::vector<std::string> steps_text(const Origin& origin);

}  // namespace nanlocator::inline report_room
