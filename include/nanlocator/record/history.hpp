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

/// The number of steps that a rank remembers; a file may hold no more per finding.
inline constexpr std::size_t kHistorySteps = 64;

/// The history of one parameter: one entry for each of History::iterations, from finite elements
/// only. NaN if the step was not seen or no element was finite. Numbers beyond a float's range
/// become its largest.
struct ParameterHistory {
  std::int64_t id = 0;
  std::string name;
  std::vector<float> norm;              // root of the sum of squares of the gradient on this rank
  std::vector<float> absmax;            // largest magnitude
  std::vector<std::int64_t> nonfinite;  // number of NaN and Inf; 0 if the step was not seen
};

struct History {
  std::string run_id;
  int attempt = 0;
  RankCoordinates coordinates;
  std::string phase;  // the phase of the gradients: "grad_local", "grad_norm", ...
  std::vector<std::int64_t> iterations;  // ascending; the last is the finding's
  std::vector<ParameterHistory> parameters;
};

/// All parameters of a rank combined, for its ledger: distinguishes a climb from a jump. Omits
/// steps that were not seen, so every entry is finite.
struct HistorySummary {
  std::vector<std::int64_t> iterations;  // ascending
  std::vector<float> absmax;             // the largest of any parameter
  std::vector<float> norm;               // of all parameters
  std::string
      parameter;  // the parameter with the largest absmax at the last step without NaN and Inf
  friend bool operator==(const HistorySummary&, const HistorySummary&) = default;
};
[[nodiscard]] HistorySummary summary_of(const History& history);

/// The largest finite magnitudes of one tensor in the steps that were seen.
struct Maxima {
  std::vector<std::int64_t> iterations;  // ascending
  std::vector<float> absmax;             // one per iteration
  friend bool operator==(const Maxima&, const Maxima&) = default;
};
/// The maxima of the parameter `name` in the last five steps before `iteration`.
[[nodiscard]] Maxima maxima_before(const History& history, std::string_view name,
                                   std::int64_t iteration);

/// The history as JSON lines, each ending in '\n': a header, one line per parameter, an end.
[[nodiscard]] std::string to_jsonl(const History& history);

/// Appends to `directory`/history_<coordinates>.jsonl in one write, then fsync. Throws IoError; the
/// file's earlier content stays readable.
void append_history(const std::filesystem::path& directory, const History& history);

/// The histories of step `iteration` in the files of `directory`, by rank; if `iteration` is
/// negative, each rank's latest. `rank`: only that rank. If a step was written twice, the later one
/// counts. Lines and files that cannot be read are skipped and noted; a truncated history keeps the
/// parameters before the cut. Throws IoError if the directory cannot be read.
[[nodiscard]] std::vector<History> read_histories(const std::filesystem::path& directory,
                                                  std::int64_t iteration,
                                                  std::vector<std::string>& notes,
                                                  std::optional<int> rank = std::nullopt);

}  // namespace nanlocator::inline record_room
