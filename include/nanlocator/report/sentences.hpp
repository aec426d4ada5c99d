// The words of a verdict. Only this room turns facts into sentences; terminal, verdict.json and the
// page use them.
//
// Nothing here decides anything: sentences follow from the verdict's data alone, and no code reads
// a sentence back. Names from the run are not escaped; the printing code makes them printable.
#pragma once

#include <string>
#include <vector>

#include "nanlocator/verdict/verdict.hpp"

namespace nanlocator::inline report_room {

/// "NaN born in backward of aten::sqrt on rank 5 (tp1 pp0 dp1, host a17)".
[[nodiscard]] std::string headline_of(const Verdict& verdict, const Origin& origin);
/// The only origin's headline, or the number of origins.
[[nodiscard]] std::string outcome_of(const Verdict& verdict);
/// outcome_of after "step 1284: ".
[[nodiscard]] std::string headline_of(const Verdict& verdict);

/// "rank 5 (tp1 pp0 dp1, host a17)", or "one of 4 ranks: 0-3 (dp1)".
[[nodiscard]] std::string who_of(const Origin& origin);

/// Plain English: "division by zero", "sent finite, received bad".
[[nodiscard]] std::string title_of(const Origin& origin);
/// "place: high; cause: open (a link, the memory of rank 7)".
[[nodiscard]] std::string certainty_of(const Origin& origin);
[[nodiscard]] std::string owner_of(const Origin& origin);
/// "model.py:412 in forward", "not recorded", or "" if no operator computed the bad value.
[[nodiscard]] std::string code_of(const Origin& origin);
/// The origin's facts in the order of the report: observation, re-run and copies, spread, support,
/// missing data.
[[nodiscard]] Facts ordered_facts(const Origin& origin);
/// One sentence per fact of ordered_facts, except for the last one if it is an action stated by a
/// verdict of version 1.
[[nodiscard]] std::vector<std::string> evidence_of(const Verdict& verdict, const Origin& origin);
[[nodiscard]] std::string refutation_of(const Origin& origin);
struct Step {
  std::string text;
  std::string command{};  // for pasting; "" without one
};
/// The next steps, in order, with a check of the machines if they may be at fault.
[[nodiscard]] std::vector<Step> steps_of(const Verdict& verdict, const Origin& origin);
/// steps_of as one sentence.
[[nodiscard]] std::string action_of(const Verdict& verdict, const Origin& origin);
/// "from rank 1 (pp0, host a17, cuda:3 ...) to rank 5 (...)": both ends of a link that may be at
/// fault; else "".
[[nodiscard]] std::string link_of(const Verdict& verdict, const Origin& origin);
/// "0 is tp0 dp0, 1 is tp1 dp0 (host b)": coordinates of the ranks that the first `evidence`
/// sentences of each origin name. Empty if the headline already gives them.
[[nodiscard]] std::string mentioned_ranks_of(const Verdict& verdict, std::size_t evidence);
/// For several origins, none of which recurred: a sentence that they may have one cause. Else "".
[[nodiscard]] std::string common_cause_of(const Verdict& verdict);
/// "nanlocator netcheck ..." as typed in a shell; "" if there are no two ranks to check.
[[nodiscard]] std::string machine_check_command(const JobLayout& layout);

/// How far the fault has spread: parameters, ranks, first sighting. "" if nothing is known.
[[nodiscard]] std::string spread_of(const Verdict& verdict);
/// "stops; nothing of step 1284 was applied". "" if the policy is unknown.
[[nodiscard]] std::string job_of(const Verdict& verdict);
/// The checkpoint from which the job can be restarted. "" if it continues and needs no restart.
[[nodiscard]] std::string restart_of(const Verdict& verdict);
/// The notes of ranks and tools, then one sentence per fact of the whole verdict.
[[nodiscard]] std::vector<std::string> notes_of(const Verdict& verdict);

}  // namespace nanlocator::inline report_room
