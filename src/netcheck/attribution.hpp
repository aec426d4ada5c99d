// Which ranks explain what was observed? Pure functions over small sets of ranks.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace nanlocator::netcheck {

/// How far a rank came with one step: it is about to launch, has launched and waits, or is done.
enum class State : std::uint8_t { entered, launched, finished };

/// Where a rank stands. `sequence` counts the steps of the whole check, the same on all ranks; a
/// rank takes those of its own groups, in ascending order.
struct Place {
  std::string stage;
  std::string step;        // "all_reduce bf16 1 KiB"
  std::string group;       // "tp[4,5]"; "" where the rank works alone
  std::vector<int> ranks;  // of the group; empty where the rank works alone
  int sequence = -1;
  State state = State::entered;
  int launches = 0;  // a step may be repeated: the others can be one launch further
};

struct Position {
  int rank = 0;
  Place place;
  bool is_alive = true;  // false: no longer answers
};

/// A rank that holds the check up, and the ranks that wait for it, directly or through others.
struct Holdup {
  std::vector<int> ranks;  // more than one: all of them launched the same step, and none returned
  std::vector<int> waiting;
};

/// `positions` of ranks that have not finished, at most one per rank. A rank that waits for one
/// that has not arrived is not to blame; one that never launched is, and so is one that is gone.
/// Where all have launched a step, those that did not return from it cannot be separated.
[[nodiscard]] std::vector<Holdup> find_holdups(const std::vector<Position>& positions);

/// A fault that can lie at any of these ranks.
using Candidates = std::set<int>;

/// The smallest groups of suspects that explain all observations: each group is one fault, its
/// members cannot be separated. Exact for one fault, greedy for several.
[[nodiscard]] std::vector<Candidates> explain(const std::vector<Candidates>& observations);

/// Who can have made an element wrong. `senders` contributed to it, `receivers` got a copy, `wrong`
/// saw a wrong one. Several receivers that all see it blame the senders; where some got the right
/// value, each receiver that did not stands for itself.
[[nodiscard]] std::vector<Candidates> suspects_of(const std::set<int>& senders,
                                                  const std::set<int>& receivers,
                                                  const std::set<int>& wrong);

}  // namespace nanlocator::netcheck
