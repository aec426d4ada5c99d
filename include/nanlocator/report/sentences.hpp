// The words of a verdict: the only place that makes sentences of facts. Terminal, verdict.json and
// the page take theirs from here.
//
// Nothing here decides anything: what is said follows from the verdict's data alone, and nothing
// reads a sentence back. Names from the run are in the sentences as they are; whoever prints them
// makes them printable.
#pragma once

#include <string>
#include <vector>

#include "nanlocator/locate/verdict.hpp"

namespace nanlocator::inline report_room {

/// "NaN born in backward of aten::sqrt on rank 5 (tp1 pp0 dp1, host a17)".
[[nodiscard]] std::string headline_of(const Verdict& verdict, const Origin& origin);
/// That of the only origin, or how many there are.
[[nodiscard]] std::string outcome_of(const Verdict& verdict);
/// The same after "step 1284: ".
[[nodiscard]] std::string headline_of(const Verdict& verdict);

/// "rank 5 (tp1 pp0 dp1, host a17)", or "one of 4 ranks: 0-3 (dp1)".
[[nodiscard]] std::string who_of(const Origin& origin);

/// Plain English: "division by zero", "sent finite, received bad".
[[nodiscard]] std::string title_of(const Origin& origin);
/// "place: high; cause: open (a link, the memory of rank 7)".
[[nodiscard]] std::string certainty_of(const Origin& origin);
[[nodiscard]] std::string owner_of(const Origin& origin);
/// "model.py:412 in forward", "not recorded", or "" of what no operator computed.
[[nodiscard]] std::string code_of(const Origin& origin);
/// The origin's facts in the order in which they are told: what was seen, how far it goes, what the
/// re-run says, what supports it, what is missing.
[[nodiscard]] Facts ordered_facts(const Origin& origin);
/// One sentence for each of ordered_facts, but for the action that version 1 states, the last one.
[[nodiscard]] std::vector<std::string> evidence_of(const Verdict& verdict, const Origin& origin);
[[nodiscard]] std::string refutation_of(const Origin& origin);
struct Step {
  std::string text;
  std::string command{};  // to be pasted; "" without one
};
/// What to do next, in this order, with the check of the machines where those may be at fault.
[[nodiscard]] std::vector<Step> steps_of(const Verdict& verdict, const Origin& origin);
/// The same as one sentence.
[[nodiscard]] std::string action_of(const Verdict& verdict, const Origin& origin);
/// "from rank 1 (pp0, host a17, cuda:3 ...) to rank 5 (...)": both ends, where a link may be at
/// fault; else "".
[[nodiscard]] std::string link_of(const Verdict& verdict, const Origin& origin);
/// "0 is tp0 dp0, 1 is tp1 dp0 (host b)": where the ranks lie that the first `evidence` sentences
/// of each origin name. Empty where the headline has said it.
[[nodiscard]] std::string mentioned_ranks_of(const Verdict& verdict, std::size_t evidence);
/// Of several origins, none of which recurred: that they may have one cause. Else "".
[[nodiscard]] std::string common_cause_of(const Verdict& verdict);
/// "nanlocator netcheck ..." as a person types it; "" where there are no two ranks to check.
[[nodiscard]] std::string machine_check_command(const JobLayout& layout);

/// What the fault has led to: parameters, ranks, where it was first seen. "" where nothing is
/// known.
[[nodiscard]] std::string spread_of(const Verdict& verdict);
/// "stops; nothing of step 1284 was applied". "" where the policy is not known.
[[nodiscard]] std::string job_of(const Verdict& verdict);
/// From which checkpoint the job can be restarted. "" where it goes on and need not be.
[[nodiscard]] std::string restart_of(const Verdict& verdict);
/// What ranks and tools wrote, then a sentence for each fact of the verdict as a whole.
[[nodiscard]] std::vector<std::string> notes_of(const Verdict& verdict);

}  // namespace nanlocator::inline report_room
