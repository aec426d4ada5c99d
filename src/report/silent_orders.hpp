// The part of a verdict's orders that is about ranks which did not answer: what ended them, and who
// finds that out where it is not known.
#pragma once

#include <string>
#include <vector>

#include "nanlocator/verdict/verdict.hpp"
#include "report/orders.hpp"

namespace nanlocator::inline report_room {

/// Ranks that did not answer, whose end is not known and may change the orders.
[[nodiscard]] std::vector<int> unexplained_ranks(const Verdict& verdict);
/// And whose log nobody but the reader can find.
[[nodiscard]] bool has_unknown_log(const Verdict& verdict);
/// The end of a rank from which the decision follows; null if it follows from an origin.
[[nodiscard]] const RankEnding* deciding_ending(const Verdict& verdict);

/// "RANK 11 ON a18", "2 RANKS".
[[nodiscard]] std::string silent_in_headline(const Verdict& verdict, const std::vector<int>& ranks);
/// What the log of a rank that did not answer may still tell, and who reads it.
void add_silent(const Verdict& verdict, Rows& rows);

/// "rank 1 on a18 ended with: ValueError: ... (its log: ...)".
[[nodiscard]] std::string ending_text(const Verdict& verdict, const RankEnding& ending);
[[nodiscard]] std::string cause_of_ending(const RankEnding& ending);

}  // namespace nanlocator::inline report_room
