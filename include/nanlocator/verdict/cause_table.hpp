// One row per cause: owner, refutation, open suspects, and which action fits which facts. `report`
// has the titles and sentences.
#pragma once

#include <vector>

#include "nanlocator/verdict/verdict.hpp"

namespace nanlocator::inline verdict_room {

struct ActionRule {
  Action action;
  bool (*fits)(const Origin& origin);
};

struct CauseRow {
  Cause cause;
  Owner owner;
  Refutation refutation;
  Confidence confidence;            // in the cause, unless a fact changes it
  bool may_be_machine;              // if so, the action ends with a check of the machines
  std::vector<Suspect> suspects;    // left open by the cause
  std::vector<ActionRule> actions;  // the first that fits is chosen
};

[[nodiscard]] const CauseRow& row_of(Cause cause);

/// True for a bad weight that an operator in place of the program's own changed last: it may have
/// been bad before.
[[nodiscard]] bool was_changed_in_place(const Origin& origin);

/// Sets what follows from an origin's cause, detail and facts: owner, action, refutation,
/// confidence in the cause, alternatives. Runs last on an origin.
void complete(Origin& origin);

}  // namespace nanlocator::inline verdict_room
