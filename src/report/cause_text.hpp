// The words of the cause table: titles, owners, open suspects, refutations, actions.
#pragma once

#include <string>
#include <vector>

#include "nanlocator/verdict/verdict.hpp"

namespace nanlocator::inline report_room {

/// "torch.log", a custom function's name, "module encoder.norm" or "this operation".
[[nodiscard]] std::string operation_of(const Origin& origin);
/// The call at the first bad element: "sqrt(-0.131)", "0 / 0"; "" if the values are not known.
[[nodiscard]] std::string first_bad_call_of(const Origin& origin);
/// True for a cast or a copy into another dtype, which compute nothing.
[[nodiscard]] bool is_conversion(const Origin& origin);
/// The source of the operands whose values at the first bad element are known, in their order.
/// Empty if they are not the arguments of the call in the origin's line, or too long.
[[nodiscard]] std::vector<std::string> argument_names_of(const Origin& origin);
/// The origin's alternatives: "a link, the memory of rank 3 and a race".
[[nodiscard]] std::string suspects_text(const Origin& origin);
/// The next steps, in order, without the check of the machines.
[[nodiscard]] std::vector<std::string> steps_text(const Origin& origin);
/// "sample 77 of Feats": those that a DataLoader gave out with NaN or Inf; "" if none is known.
[[nodiscard]] std::string bad_samples_of(const Origin& origin);
/// The run that finds the update which made a weight bad.
[[nodiscard]] std::string with_checked_updates(const std::string& checkpoint);

}  // namespace nanlocator::inline report_room
