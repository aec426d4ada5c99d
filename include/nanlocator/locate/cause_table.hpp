// One row per cause: who can act, what would refute it, what it leaves open, and which action fits
// which facts. Titles and sentences are in `report`.
#pragma once

#include <vector>

#include "nanlocator/locate/verdict.hpp"

namespace nanlocator::inline locate_room {

struct ActionRule {
  Action action;
  bool (*fits)(const Origin& origin);
};

struct CauseRow {
  Cause cause;
  Owner owner;
  Refutation refutation;
  Confidence confidence;            // in the cause, where no fact says otherwise
  bool may_be_machine;              // then the action ends with the check of the machines
  std::vector<Suspect> suspects;    // what stays open
  std::vector<ActionRule> actions;  // the first that fits
};

[[nodiscard]] const CauseRow& row_of(Cause cause);

/// Sets what follows from an origin's cause, detail and facts: owner, action, refutation,
/// confidence in the cause, alternatives. The last pass over an origin.
void complete(Origin& origin);

}  // namespace nanlocator::inline locate_room
