// The part of a verdict's orders that is about checkpoints: which to load, which never, by their
// names and by what was read in them.
#pragma once

#include <cstdint>
#include <string>

#include "nanlocator/verdict/verdict.hpp"
#include "report/orders.hpp"

namespace nanlocator::inline report_room {

/// Nothing of the fault can be in a checkpoint yet.
[[nodiscard]] bool may_load_newest(const Verdict& verdict);
/// A step of this run, as the names of its checkpoints count.
[[nodiscard]] std::int64_t named_step(const Verdict& verdict, std::int64_t step);
/// Where a step's number says nothing about the checkpoints.
[[nodiscard]] std::string counts_other_steps(const Verdict& verdict);
[[nodiscard]] const CheckpointFile* checkpoint_to_load(const Verdict& verdict);
/// Checkpoints from its update on may hold the fault.
[[nodiscard]] std::string first_bad_step(const Verdict& verdict);
/// "step_0000300.pt, which this run had loaded".
[[nodiscard]] std::string loaded_by_run(const Verdict& verdict);
/// For such an origin: the newest checkpoint that was read, is finite, and whose largest weight is
/// at most ten times that of the one before it; null if none is known.
[[nodiscard]] const CheckpointFile* checkpoint_before_growth(const Verdict& verdict);
/// The checkpoint that this run had loaded, if the bad values may have come from it and it was read
/// to the end; else null.
[[nodiscard]] const CheckpointFile* loaded_and_read(const Verdict& verdict, const Origin& origin);
/// Moves away what no resubmit may load: what was found bad, or what the running job saves.
void add_aside(const Verdict& verdict, Rows& rows);
/// "after the fix: "; "" where a checkpoint is all that is wrong.
[[nodiscard]] std::string fixed_text(const Verdict& verdict);

[[nodiscard]] std::string load_of(const Verdict& verdict);
/// "MOVE step_200.pt AWAY", of checkpoints that no resubmit may load; "" if none is known.
[[nodiscard]] std::string moved_text(const Verdict& verdict);
/// What to load, and what never.
void add_checkpoint(const Verdict& verdict, Rows& rows);

}  // namespace nanlocator::inline report_room
