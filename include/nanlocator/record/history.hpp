// The latest steps of every gradient of one rank: `history_tp{tp}pp{pp}dp{dp}.jsonl`, written at a
// finding (docs/formats.md). Healthy steps write nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "nanlocator/map/rank_coordinates.hpp"

namespace nanlocator::inline record_room {

/// A rank remembers so many steps; a file may hold no more of one finding.
inline constexpr std::size_t kHistorySteps = 64;

/// Of one parameter, one entry for each of History::iterations. Finite elements only; NaN where the
/// step was not seen or no element was finite. What no float can hold is the largest one.
struct ParameterHistory {
  std::int64_t id = 0;
  std::string name;
  std::vector<float> norm;              // root of the sum of squares of the gradient on this rank
  std::vector<float> absmax;            // largest magnitude
  std::vector<std::int64_t> nonfinite;  // how many NaN and Inf; 0 where the step was not seen
};

struct History {
  std::string run_id;
  int attempt = 0;
  RankCoordinates coordinates;
  std::string phase;                     // of the gradients: "grad_local", "grad_norm", ...
  std::vector<std::int64_t> iterations;  // ascending; the last is that of the finding
  std::vector<ParameterHistory> parameters;
};

/// The parameters of a rank taken together, for its ledger: tells a climb from a jump. Steps that
/// were not seen are left out, so every entry is finite.
struct HistorySummary {
  std::vector<std::int64_t> iterations;  // ascending
  std::vector<float> absmax;             // the largest of any parameter
  std::vector<float> norm;               // of all parameters
  std::string parameter;  // whose absmax was the largest at the last step without NaN and Inf
  friend bool operator==(const HistorySummary&, const HistorySummary&) = default;
};
[[nodiscard]] HistorySummary summary_of(const History& history);

/// The largest finite magnitudes of one tensor in steps that were seen.
struct Maxima {
  std::vector<std::int64_t> iterations;  // ascending
  std::vector<float> absmax;             // one for each
  friend bool operator==(const Maxima&, const Maxima&) = default;
};
/// Of the parameter `name`, in the latest five steps before `iteration`.
[[nodiscard]] Maxima maxima_before(const History& history, std::string_view name,
                                   std::int64_t iteration);

/// The history as JSON lines, each ending in '\n': a header, a line for each parameter, an end.
[[nodiscard]] std::string to_jsonl(const History& history);

/// Appends to `directory`/history_<coordinates>.jsonl in one write, then fsync. Throws IoError;
/// what was in the file before stays readable.
void append_history(const std::filesystem::path& directory, const History& history);

/// What the history files in `directory` hold of the step `iteration`, by rank; below 0: each
/// rank's latest. Where a step was written twice, the later counts. `rank`: of this one alone. A
/// line that cannot be read is skipped and noted, as is a file; a history that was cut off has the
/// parameters before the cut. Throws IoError where the directory cannot be read.
[[nodiscard]] std::vector<History> read_histories(const std::filesystem::path& directory,
                                                  std::int64_t iteration,
                                                  std::vector<std::string>& notes,
                                                  std::optional<int> rank = std::nullopt);

}  // namespace nanlocator::inline record_room
