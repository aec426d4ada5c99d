// The folder of one attempt of a run: output_dir/a{attempt}, with run.json.
#pragma once

#include <filesystem>
#include <string>

#include "nanlocator/map/rank_coordinates.hpp"
#include "nanlocator/step/gradient_locator.hpp"

namespace nanlocator::inline step_room {

struct Run {
  std::string id;  // UTC time and six random hexadecimal digits: "20250131T093000Z-5f3a9c"
  int attempt = 0;
};

/// Creates output_dir and in it the first a{N} that does not exist (mkdir decides, so two jobs
/// never share one). Throws IoError.
[[nodiscard]] Run start_run(const std::filesystem::path& output_dir);

[[nodiscard]] std::filesystem::path run_directory(const std::filesystem::path& output_dir,
                                                  int attempt);

/// Creates the folder if it is missing, on machines that do not share rank 0's disk. Throws
/// IoError.
void ensure_directory(const std::filesystem::path& directory);

/// The current time as in files: "2025-01-31T09:30:00Z".
[[nodiscard]] std::string utc_time();

/// The content of run.json (docs/formats.md). `started`: a `utc_time`.
[[nodiscard]] std::string run_json(const Run& run, const std::string& started,
                                   const LocatorOptions& options,
                                   const RankCoordinates& coordinates);

/// The options that all ranks must agree on, as a flat JSON object.
[[nodiscard]] std::string agreed_options_json(const LocatorOptions& options,
                                              std::string_view flag_device);

}  // namespace nanlocator::inline step_room
