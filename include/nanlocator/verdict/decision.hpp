// What to do about a verdict: one decision for the whole job, by rules that a table in
// docs/decisions.md lists. Pure: reads no file and no clock.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "nanlocator/files/names.hpp"
#include "nanlocator/verdict/cause.hpp"
#include "nanlocator/verdict/fact.hpp"

namespace nanlocator::inline verdict_room {

struct Origin;
struct Verdict;

/// In the order in which the proposal for one of several origins takes precedence, the last first.
enum class DecisionKind : std::uint8_t {
  none_needed,       // the job goes on, and its weights are good
  restart_as_is,     // once: if the same comes again, the next decision differs
  exclude,           // restart without `ranks`' devices
  skip_batch,        // restart, leaving out the batch of this step
  older_checkpoint,  // restart from a checkpoint of step `newest_step` or earlier
  do_not_restart,    // the same data and code fail again
};
[[nodiscard]] constexpr auto names_of(DecisionKind) {
  return std::to_array<std::string_view>({"NONE_NEEDED", "RESTART_AS_IS", "EXCLUDE", "SKIP_BATCH",
                                          "OLDER_CHECKPOINT", "DO_NOT_RESTART"});
}

/// What an earlier attempt of this run adds.
enum class Recurrence : std::uint8_t {
  none,
  same_device,  // the machine was suspected before
  same_place,   // the same fault at the same place, on other devices or with the same data
};
[[nodiscard]] constexpr auto names_of(Recurrence) {
  return std::to_array<std::string_view>({"none", "same_device", "same_place"});
}

struct JobDecision {
  DecisionKind kind = DecisionKind::none_needed;
  /// The index of the origin that it follows from; empty without one.
  std::optional<int> origin;
  /// The restart must trace the operators of this step: what made the value is not known.
  bool is_traced = false;
  std::vector<int> ranks;  // whose devices are suspected; global, ascending
  /// The rank whose own end decides, rather than what the others saw: one of Launch::endings.
  std::optional<int> ended_rank;
  /// The newest step whose checkpoint may be loaded: those after it hold the fault. Empty: any.
  std::optional<std::int64_t> newest_step;
  /// Whether that checkpoint is finite is not known.
  bool is_to_check = false;
  Owner page = Owner::nobody;    // who is woken
  Owner ticket = Owner::nobody;  // who reads it in the morning
  Recurrence recurrence = Recurrence::none;
  std::vector<FactKind> rests_on;  // evidence of the origin that decided
  friend bool operator==(const JobDecision&, const JobDecision&) = default;
};

/// How the job goes on after the finding.
enum class Course : std::uint8_t { unknown, goes_on, goes_on_damaged, stops };
[[nodiscard]] Course course_of(const Verdict& verdict);

/// True if the operation may give the same again with the same data, weights and random numbers,
/// by the origin's evidence alone.
[[nodiscard]] bool is_deterministic(const Origin& origin);

/// True if it would be another one had a rank that did not answer ended by itself: only a further
/// attempt is to tell more.
[[nodiscard]] bool is_open_to_endings(const JobDecision& decision) noexcept;

/// The step whose verdict decides, if this one only sees what that step left behind.
[[nodiscard]] std::optional<std::int64_t> deciding_step(const Verdict& verdict);
/// Takes the decision of that step's verdict.
void follow(const Verdict& deciding, Verdict& verdict);

/// `earlier`: the last verdict of each earlier attempt of this run, in any order.
[[nodiscard]] JobDecision decide(const Verdict& verdict, std::span<const Verdict> earlier = {});

}  // namespace nanlocator::inline verdict_room
