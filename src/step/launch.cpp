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
#include <vector>

#include "nanlocator/step/checkpoint_files.hpp"
#include "nanlocator/verdict/decision.hpp"
#include "report/checkpoint_orders.hpp"
#include "report/orders.hpp"
#include "step/rank_logs.hpp"
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

/// The number after the last "step" or "iter" of the name, or Transformers' checkpoint-900: others
/// number checkpoints by epochs.
std::optional<std::int64_t> step_of(std::string name) {
  std::ranges::transform(name, name.begin(),
                         [](unsigned char each) { return static_cast<char>(std::tolower(each)); });
  constexpr std::string_view kOfTransformers = "checkpoint-";
  if (name.starts_with(kOfTransformers)) {
    const std::string_view rest = std::string_view(name).substr(kOfTransformers.size());
    if (rest.find_first_not_of("0123456789") == std::string_view::npos) return number_at(rest);
  }
  for (const std::string_view word : {"step", "iter"}) {
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

/// A checkpoint that the process has saved, in a folder whose names have numbers of steps.
struct SavedCheckpoint {
  fs::path folder;
  std::int64_t step = 0;                  // by its name
  std::optional<std::int64_t> updates{};  // see note_saved_checkpoint
  std::optional<std::int64_t> offset{};   // what names count beyond updates, where that is known
};

std::mutex files_mutex;
std::string loaded_path;
SavedCheckpoint last_saved;
std::string saved_without_step;  // the latest path

/// Of a file, or of a file in the folder that is the checkpoint: checkpoint-900/model.pt.
std::optional<SavedCheckpoint> checkpoint_of(const fs::path& path) {
  if (const auto step = step_of(path.filename().string())) {
    return SavedCheckpoint{.folder = path.parent_path(), .step = *step};
  }
  const fs::path folder = path.parent_path();
  const std::string name = folder.filename().string();
  const bool ends_with_number =
      !name.empty() && std::isdigit(static_cast<unsigned char>(name.back())) != 0;
  const auto step = ends_with_number ? step_of(name) : std::nullopt;
  if (!step) return std::nullopt;
  return SavedCheckpoint{.folder = folder.parent_path(), .step = *step};
}

/// Names may count microbatches or epochs: the offset is known once two of them agree on it, or if
/// there is none, or if it is that of names that count from 0.
std::optional<std::int64_t> offset_of(const SavedCheckpoint& saved, const SavedCheckpoint& before) {
  if (!saved.updates) return std::nullopt;
  const std::int64_t offset = saved.step - *saved.updates;
  const bool is_further = before.updates && before.folder == saved.folder;
  if (is_further && before.step == saved.step) return before.offset;  // another file of it
  const bool is_agreed =
      is_further ? offset == before.step - *before.updates : offset == 0 || offset == -1;
  return is_agreed ? std::optional(offset) : std::nullopt;
}

fs::path folder_of_loaded() {
  const std::lock_guard lock(files_mutex);
  const auto loaded = checkpoint_of(loaded_path);
  return loaded ? loaded->folder : fs::path();
}

SavedCheckpoint latest_saved() {
  const std::lock_guard lock(files_mutex);
  return last_saved;
}

std::string latest_saved_without_step() {
  const std::lock_guard lock(files_mutex);
  return saved_without_step;
}

std::string path_of_loaded() {
  const std::lock_guard lock(files_mutex);
  return loaded_path;
}

/// The first name below `folder` of what was loaded; "" if that lies elsewhere.
std::string loaded_from(const fs::path& folder) {
  const std::lock_guard lock(files_mutex);
  const fs::path below = fs::path(loaded_path).lexically_relative(folder);
  return below.empty() || *below.begin() == ".." || *below.begin() == "." ? ""
                                                                          : below.begin()->string();
}

void note_loaded_elsewhere(Launch& launch) {
  std::string path = path_of_loaded();
  const bool is_listed =
      std::ranges::count(launch.checkpoints, launch.loaded, &CheckpointFile::name) > 0;
  if (!is_listed && !path.empty()) launch.loaded_elsewhere = {.name = std::move(path)};
}

}  // namespace

void note_loaded_checkpoint(std::string path) {
  const std::lock_guard lock(files_mutex);
  loaded_path = std::move(path);
}

void forget_saved_checkpoints() {
  const std::lock_guard lock(files_mutex);
  last_saved = {};
  saved_without_step.clear();
}

void note_saved_checkpoint(std::string path, std::optional<std::int64_t> updates) {
  auto saved = checkpoint_of(path);
  const std::lock_guard lock(files_mutex);
  if (!saved) {
    saved_without_step = std::move(path);
    return;
  }
  saved->updates = updates;
  saved->offset = offset_of(*saved, last_saved);
  last_saved = *std::move(saved);
}

std::vector<CheckpointFile> checkpoints_in(const fs::path& folder) {
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
  std::ranges::sort(found, [](const CheckpointFile& a, const CheckpointFile& b) {
    return a.step != b.step ? a.step > b.step : a.name < b.name;
  });
  if (found.size() > kMostCheckpoints) found.resize(kMostCheckpoints);
  return found;
}

std::optional<std::int64_t> steps_before(const std::vector<CheckpointFile>& found,
                                         const std::string& loaded, std::int64_t first,
                                         std::int64_t iteration) {
  const auto loaded_step = step_of(loaded);
  const std::int64_t before = loaded_step && *loaded_step >= first ? *loaded_step - (first - 1) : 0;
  const bool is_beyond = !found.empty() && found.front().step - before > iteration;
  return is_beyond ? std::nullopt : std::optional(before);
}

bool read_checkpoints(Verdict& verdict, const LocatorOptions& options,
                      std::chrono::milliseconds limit) {
  const JobDecision& decision = verdict.decision;
  if (!options.read_checkpoint || !verdict.launch) return false;
  Launch& launch = *verdict.launch;
  const Origin* const origin = deciding_origin(verdict);
  const bool is_of_growth = origin != nullptr && may_be_of_large_weights(*origin);
  const bool is_fault_in_none =
      !is_of_growth && verdict.job.are_weights_finite == true && !decision.is_to_check &&
      decision.newest_step.value_or(verdict.iteration) >= verdict.iteration - 1;
  if (course_of(verdict) != Course::stops || decision.kind == DecisionKind::none_needed ||
      is_fault_in_none) {
    return false;
  }
  const std::int64_t newest =
      decision.newest_step.value_or(verdict.iteration) + launch.steps_before.value_or(0);
  std::vector<CheckpointFile*> in_question;
  for (CheckpointFile& each : launch.checkpoints) {
    if (!launch.steps_before) break;  // which of them count is not known
    const bool is_loaded = decision.is_to_check && each.name == launch.loaded;
    if (is_loaded) in_question.insert(in_question.begin(), &each);
    if (!is_loaded && each.step <= newest) in_question.push_back(&each);
  }
  const auto end = std::chrono::steady_clock::now() + limit;
  if (decision.is_to_check && launch.loaded_elsewhere) {
    options.read_checkpoint(launch.loaded_elsewhere->name, limit, *launch.loaded_elsewhere);
  }
  bool has_read = launch.loaded_elsewhere && launch.loaded_elsewhere->is_finite;
  for (CheckpointFile* const each : in_question) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        end - std::chrono::steady_clock::now());
    if (left.count() <= 0) break;
    options.read_checkpoint(fs::path(launch.checkpoint_dir) / each->name, left, *each);
    has_read = true;
    if (is_of_growth ? checkpoint_before_growth(verdict) != nullptr
                     : each->is_finite == true && each->step <= newest) {
      break;
    }
  }
  return has_read;
}

Launch read_launch(const fs::path& checkpoint_dir, int attempt, std::int64_t first,
                   std::int64_t iteration) noexcept {
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
    RankLog own = own_log();
    launch.log = std::move(own.log);
    launch.log_begin = own.log_begin;
    const SavedCheckpoint saved = latest_saved();
    launch.saved = latest_saved_without_step();
    fs::path folder = checkpoint_dir.empty() ? saved.folder : checkpoint_dir;
    // In the first step nothing is lost by loading the same again, and it may hold the fault.
    if (folder.empty() && iteration <= first) folder = folder_of_loaded();
    if (!folder.empty()) {
      launch.checkpoint_dir = fs::absolute(folder).lexically_normal().string();
      launch.checkpoints = checkpoints_in(folder);
      launch.loaded = loaded_from(launch.checkpoint_dir);
      launch.steps_before = steps_before(launch.checkpoints, launch.loaded, first, iteration);
      if (saved.updates && saved.folder == launch.checkpoint_dir) {
        const bool is_same = launch.steps_before == saved.step - *saved.updates;
        launch.steps_before = is_same ? launch.steps_before : saved.offset;
      }
    }
    note_loaded_elsewhere(launch);
  } catch (const std::exception&) {  // what is missing is said to be unknown
  }
  return launch;
}

}  // namespace nanlocator::inline step_room
