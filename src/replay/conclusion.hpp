// Concludes from the runs of a replay. docs/replay.md has the rules and their limits.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "nanlocator/replay/replay.hpp"

namespace nanlocator::inline replay_room {

/// Facts beyond the report itself.
struct ConclusionEvidence {
  std::vector<TensorStats> inputs;  // of every floating-point tensor among the arguments
  double largest_number = 0;        // among the arguments that are numbers
  bool is_custom = false;     // the operator is not PyTorch's, so its correct result is unknown
  bool has_powers = false;    // it multiplies elements of a tensor, or raises them to a power
  bool is_pointwise = false;  // each output element depends on one element of each input
};

/// Fills `conclusion`, `is_bit_exact` and the evidence from the recorded outputs and the runs.
void conclude(ReplayReport& report, const ConclusionEvidence& evidence);

/// The evidence in words.
[[nodiscard]] std::vector<std::string> sentences_of(const ReplayReport& report);

[[nodiscard]] inline bool is_bad(const ReplayedOutput& output) {
  return !output.stats.is_finite();
}
[[nodiscard]] inline bool is_bad(const std::vector<ReplayedOutput>& outputs) {
  return std::ranges::any_of(outputs, [](const auto& output) { return is_bad(output); });
}
/// The run of a variant, executed or not; null if there is none.
[[nodiscard]] inline const ReplayRun* find_run(const ReplayReport& report, ReplayVariant variant) {
  const auto found = std::ranges::find(report.runs, variant, &ReplayRun::variant);
  return found == report.runs.end() ? nullptr : &*found;
}

}  // namespace nanlocator::inline replay_room
