// What the block orders, and the state from which it follows: the action, the line of five, the
// check of a machine. checkpoint_orders.hpp has the checkpoint, silent_orders.hpp ranks that did
// not answer.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "nanlocator/verdict/verdict.hpp"

namespace nanlocator::inline report_room {

/// Label and text; further lines of one label have "".
using Rows = std::vector<std::pair<std::string, std::string>>;
/// Adds nothing without a text.
void add_row(Rows& rows, const char* label, std::string text);

/// "step 1284".
[[nodiscard]] std::string step_text(std::int64_t step);
/// The origin from which the decision follows; null without one.
[[nodiscard]] const Origin* deciding_origin(const Verdict& verdict);

/// The ranks whose machine is suspected or, without such, not ruled out; few enough to look at.
[[nodiscard]] std::vector<int> ranks_to_look_at(const Verdict& verdict);

/// Weights may have grown for many steps before an operator overflowed: finite is not good.
[[nodiscard]] bool may_be_of_large_weights(const Verdict& verdict);
[[nodiscard]] bool may_be_of_large_weights(const Origin& origin);
/// Of the module's; nullopt if they are not known.
[[nodiscard]] std::optional<double> largest_weight_of(const Origin& origin);

/// The operators of the origin are fused into a kernel that torch.compile has made.
[[nodiscard]] bool is_of_compiled_code(const Origin& origin);
/// Shows the errors of a host's GPUs, or of one: " -i 3".
[[nodiscard]] std::string error_counters(const std::string& gpu = "");

// The first line and the line of five (narrative.hpp).
[[nodiscard]] std::string severity_of(const Verdict& verdict);
[[nodiscard]] std::string action_text_of(const Verdict& verdict);
[[nodiscard]] std::string restart_word_of(const Verdict& verdict);
[[nodiscard]] std::string hosts_text_of(const Verdict& verdict);

/// Stopped or running, the weights, whether it fails again.
[[nodiscard]] std::string state_of(const Verdict& verdict);
/// How to end a job that trains on bad weights; "" for any other.
[[nodiscard]] std::string kill_of(const Verdict& verdict);
/// How to run the step traced, for a decision that asks for it.
void add_trace(const Verdict& verdict, Rows& rows);
/// What tells a machine from code, and what its outcomes mean.
/// A look at the devices' counters decides on which hosts it is restarted.
[[nodiscard]] bool is_to_look_first(const Verdict& verdict);
/// How many steps may be left out until somebody is paged.
void add_limit(const Verdict& verdict, Rows& rows);
/// A job that has trained on bad weights is to stop the next time.
void add_policy(const Verdict& verdict, Rows& rows);
/// How the batch is left out.
void add_skip(const Verdict& verdict, Rows& rows);
void add_check(const Verdict& verdict, Rows& rows);

}  // namespace nanlocator::inline report_room
