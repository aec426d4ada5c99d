#include "step/launch.hpp"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "nanlocator/step/loaded_checkpoint.hpp"
#include "step/run_directory.hpp"

namespace nanlocator::inline step_room {
namespace {

namespace fs = std::filesystem;

std::string environment(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::optional<std::int64_t> number_at(std::string_view text) {
  std::int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && number >= 0 ? std::optional(number) : std::nullopt;
}

/// The number after the last "step", "iter" or "checkpoint" of the name.
std::optional<std::int64_t> step_of(std::string name) {
  std::ranges::transform(name, name.begin(),
                         [](unsigned char each) { return static_cast<char>(std::tolower(each)); });
  for (const std::string_view word : {"step", "iter", "checkpoint"}) {
    const std::size_t found = name.rfind(word);
    if (found == std::string::npos) continue;
    std::string_view rest = std::string_view(name).substr(found + word.size());
    while (!rest.empty() && (rest.front() == '_' || rest.front() == '-' || rest.front() == '=')) {
      rest.remove_prefix(1);
    }
    if (const auto number = number_at(rest)) return number;
  }
  return std::nullopt;
}

/// Megatron writes this file after all ranks have saved.
std::optional<std::int64_t> latest_finished(const fs::path& folder) {
  std::ifstream file(folder / "latest_checkpointed_iteration.txt");
  std::string text;
  if (!(file >> text)) return std::nullopt;
  return number_at(text);
}

std::mutex loaded_mutex;
std::string loaded_path;

/// The first name below `folder` of what was loaded; "" if that lies elsewhere.
std::string loaded_from(const fs::path& folder) {
  const std::lock_guard lock(loaded_mutex);
  const fs::path below = fs::path(loaded_path).lexically_relative(folder);
  return below.empty() || *below.begin() == ".." || *below.begin() == "." ? ""
                                                                          : below.begin()->string();
}

}  // namespace

void note_loaded_checkpoint(std::string path) {
  const std::lock_guard lock(loaded_mutex);
  loaded_path = std::move(path);
}

std::vector<CheckpointFile> checkpoints_in(const fs::path& folder, std::int64_t iteration) {
  constexpr int kMostEntries = 100'000;
  std::vector<CheckpointFile> found;
  std::error_code error;
  int entries = 0;
  for (fs::directory_iterator each(folder, error), end; !error && each != end;
       each.increment(error)) {
    if (++entries > kMostEntries) break;
    const std::string name = each->path().filename().string();
    if (const auto step = step_of(name)) found.push_back({.step = *step, .name = name});
  }
  if (const auto finished = latest_finished(folder)) {
    std::erase_if(found, [&](const CheckpointFile& file) {
      return file.name.starts_with("iter_") && file.step > *finished;
    });
  }
  if (std::ranges::any_of(found, [&](const auto& file) { return file.step > iteration; })) {
    return {};
  }
  std::ranges::sort(found, [](const CheckpointFile& a, const CheckpointFile& b) {
    return a.step != b.step ? a.step > b.step : a.name < b.name;
  });
  if (found.size() > kMostCheckpoints) found.resize(kMostCheckpoints);
  return found;
}

Launch read_launch(const fs::path& checkpoint_dir, int attempt, std::int64_t iteration) noexcept {
  Launch launch;
  try {
    launch.attempt = attempt;
    launch.found = utc_time().substr(0, 16);  // to the minute
    std::ranges::replace(launch.found, 'T', ' ');
    launch.job_id = environment("SLURM_JOB_ID");
    if (!launch.job_id.empty()) {
      launch.scheduler = "slurm";
      launch.job_name = environment("SLURM_JOB_NAME");
    } else if (const auto id = environment("TORCHELASTIC_RUN_ID"); !id.empty()) {
      launch.scheduler = "torchrun";
      if (id != "none") launch.job_id = id;  // torchrun's default
    }
    if (checkpoint_dir.empty()) return launch;
    launch.checkpoint_dir = fs::absolute(checkpoint_dir).lexically_normal().string();
    launch.checkpoints = checkpoints_in(checkpoint_dir, iteration);
    launch.loaded = loaded_from(launch.checkpoint_dir);
  } catch (const std::exception&) {  // what is missing is said to be unknown
  }
  return launch;
}

}  // namespace nanlocator::inline step_room
