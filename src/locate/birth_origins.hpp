// Origins out of the ledgers' births: what the trace or the watch saw being born, ordered by cause
// and effect, each with its cause.
//
// A birth is rank-local truth, found by rules that docs/causes.md states; here births are followed
// to their roots, the same birth on several ranks becomes one origin, and what came out of a
// collective counts only where no rank saw it go in.
#pragma once

#include <vector>

#include "locate/evidence.hpp"
#include "nanlocator/locate/verdict.hpp"

namespace nanlocator {

/// In the order of the ranks' ledgers; empty where no ledger has a birth.
[[nodiscard]] std::vector<Origin> origins_of_births(const Incident& incident);

/// The repeat of the step as the ranks saw it together.
[[nodiscard]] RerunOutcome rerun_of(const Incident& incident);

/// Sentences about the repeat, for the evidence of every origin; `outcome` is rerun_of(incident).
[[nodiscard]] std::vector<std::string> describe_rerun(const Incident& incident,
                                                      const RerunOutcome& outcome);

}  // namespace nanlocator
