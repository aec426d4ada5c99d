// Finds the ranks that explain the observations. Pure functions on small sets of ranks.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace nanlocator::netcheck {

/// A rank's progress in one step: about to launch, launched and waiting, or done.
enum class State : std::uint8_t { entered, launched, finished };

/// A rank's position in the check. `sequence` counts the steps of the whole check, the same on all
/// ranks; a rank takes those of its own groups, in ascending order.
struct Place {
  std::string stage;
  std::string step;        // "all_reduce bf16 1 KiB"
  std::string group;       // "tp[4,5]"; "" if the rank works alone
  std::vector<int> ranks;  // of the group; empty if the rank works alone
  int sequence = -1;
  State state = State::entered;
  int launches = 0;  // a step may be repeated: the others can be one launch ahead
};

struct Position {
  int rank = 0;
  Place place;
  bool is_alive = true;  // false: no longer answers
};

/// A rank that delays the check, and the ranks that wait for it, directly or through others.
struct Holdup {
  std::vector<int> ranks;  // several if all of them launched the same step and none returned
  std::vector<int> waiting;
};

/// `positions` of ranks that have not finished, at most one per rank. A rank that waits for one
/// that has not arrived is not to blame; one that never launched is, and so is a dead one. If all
/// have launched a step, those that did not return from it cannot be separated.
[[nodiscard]] std::vector<Holdup> find_holdups(const std::vector<Position>& positions);

/// The ranks at which a fault may be.
using Candidates = std::set<int>;

/// The smallest groups of suspects that explain all observations. Each group is one fault, whose
/// members cannot be separated. Exact for one fault, greedy for several.
[[nodiscard]] std::vector<Candidates> explain(const std::vector<Candidates>& observations);

/// The ranks that may have made an element wrong. `senders` contributed to it, `receivers` got a
/// copy, `wrong` got a wrong one. If several receivers all got a wrong one, the senders are blamed;
/// if some got the right value, each of the others is a suspect by itself.
[[nodiscard]] std::vector<Candidates> suspects_of(const std::set<int>& senders,
                                                  const std::set<int>& receivers,
                                                  const std::set<int>& wrong);

}  // namespace nanlocator::netcheck
