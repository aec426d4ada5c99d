// The re-runs of a bad step as a table of experiments: which further pass is due after what the
// passes so far have shown, and what its outcome means.
#pragma once

#include "nanlocator/record/ledger.hpp"
#include "step/rerun_passes.hpp"

namespace nanlocator::inline step_room {

/// What the passes so far have shown.
struct RerunEvidence {
  // The same on all ranks.
  bool is_bad_again = false;           // in memory and code as they are
  bool is_eager = false;               // compiled parts were executed eagerly
  bool is_of_compiled_code = false;    // finite if they are, bad each time they are not
  bool is_finite_if_constant = false;  // with fresh memory that holds a constant
  bool is_memory_unwritten = false;  // bad with fresh memory that holds NaN, which an operator read
  bool are_gradients_finite = false;  // of the latest pass, which was not traced

  // This rank's.
  TracedPass explaining;     // the pass that explains the step
  Rerun findings;            // for the ledger
  std::string unseen_reads;  // what the program's code may read otherwise, if they are finite
};

/// Executes the step again as often as its outcomes ask for. Every rank calls it. False, on all
/// ranks alike, if a pass ended early. After an AgreementError `evidence` holds what was found
/// until then.
bool run_experiments(RerunPasses& passes, RerunEvidence& evidence);

}  // namespace nanlocator::inline step_room
