// Origins out of the ledgers' births: what the trace or the watch saw being born, ordered by cause
// and effect, each with its cause.
//
// A birth is rank-local truth, found by rules that docs/causes.md states; here births are followed
// to their roots, the same birth on several ranks becomes one origin, and what came out of a
// collective counts only where no rank saw it go in.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "locate/evidence.hpp"
#include "nanlocator/locate/verdict.hpp"

namespace nanlocator::inline locate_room {

/// An origin that was seen being born, with what decides which others it explains.
struct BornOrigin {
  Origin origin;
  bool is_received = false;         // it came out of a collective
  bool is_opaque = false;           // computed off the dispatcher, as far as the trace could follow
  std::set<int> microbatches = {};  // in which it was born; empty: not known
  std::set<std::string> reached = {};  // parameters whose gradients it made bad
  std::vector<int> receivers = {};     // ranks that got it out of a collective
};

/// In the order of the ranks' ledgers; empty where no ledger has a birth. What came out of a
/// collective is an origin only where no rank saw anything else being born and `has_crossings` is
/// false: where crossings were scanned, they say more of a collective than its receivers do.
[[nodiscard]] std::vector<BornOrigin> origins_of_births(const Incident& incident,
                                                        bool has_crossings);

/// The re-run of the step as the ranks saw it together.
[[nodiscard]] RerunOutcome rerun_of(const Incident& incident);

/// For every origin; `outcome` is rerun_of(incident).
[[nodiscard]] Facts facts_of_rerun(const Incident& incident, const RerunOutcome& outcome);

}  // namespace nanlocator::inline locate_room
