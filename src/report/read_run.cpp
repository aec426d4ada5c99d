#include "nanlocator/report/read_run.hpp"
#include "nanlocator/report/verdict_json.hpp"

#include <algorithm>
#include <charconv>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <system_error>
#include <tuple>
#include <utility>

#include "files/json_fields.hpp"
#include "nanlocator/error.hpp"
#include "nanlocator/files/atomic_file.hpp"
#include "nanlocator/locate/locate.hpp"
#include "nanlocator/record/bundle.hpp"
#include "report/ledger_files.hpp"
#include "report/merge_ledgers.hpp"
#include "report/tensor_windows.hpp"

namespace nanlocator::inline report_room {
namespace {

namespace fs = std::filesystem;

constexpr const char* kRunFile = "run.json";
constexpr const char* kVerdictFile = "verdict.json";
constexpr const char* kVerdictsFolder = "verdicts";
constexpr int kRunVersion = 1;

/// JSON of a run or a verdict; a verdict on 16,384 ranks takes about 2 MB.
constexpr std::uint64_t kLargestJsonFile = std::uint64_t{256} << 20;

/// Limits for a readable page.
constexpr std::size_t kMostOriginsWithWindows = 16;
constexpr std::size_t kMostNotes = 64;

bool is_there(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

// ---- the folder ----

/// The number in "a12", "step12.json"; empty for other names.
std::optional<std::int64_t> number_in(std::string_view name, std::string_view prefix,
                                      std::string_view suffix) {
  if (!name.starts_with(prefix) || !name.ends_with(suffix) ||
      name.size() <= prefix.size() + suffix.size()) {
    return std::nullopt;
  }
  name.remove_prefix(prefix.size());
  name.remove_suffix(suffix.size());
  std::int64_t number = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), number);
  if (error != std::errc() || end != name.data() + name.size() || number < 0) return std::nullopt;
  return number;
}

/// The entries of a folder that are named prefix, number, suffix; by number.
std::map<std::int64_t, fs::path> numbered_entries(const fs::path& folder, std::string_view prefix,
                                                  std::string_view suffix) {
  std::map<std::int64_t, fs::path> entries;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (const auto number = number_in(name, prefix, suffix)) entries[*number] = entry->path();
  }
  return entries;
}

bool has_findings(const fs::path& folder) {
  if (is_there(folder / kVerdictFile) || is_there(folder / kVerdictsFolder)) return true;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    if (is_ledger_file(entry->path())) return true;
  }
  return false;
}

[[noreturn]] void throw_no_run(const fs::path& directory) {
  throw FormatError(directory.string() +
                    " is not the folder of a run: expected run.json, verdict.json or files such as "
                    "ledger_tp0pp0dp0.jsonl in it or in its folders a0, a1, ...; name the "
                    "output_dir of the run, or a folder into which its ledgers were copied");
}

bool is_run(const fs::path& folder) {
  std::error_code error;
  if (has_findings(folder) || is_there(folder / kRunFile)) return true;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (name.starts_with("param_"))
      return true;  // a rank's parameter map: installed, without findings
  }
  return false;
}

// ---- tensors around the first bad element ----

/// A ledger is untrusted: its bundles must lie below the run's folder, or they are not opened.
fs::path bundle_folder(const fs::path& attempt, const fs::path& named) {
  const bool leads_outside =
      named.is_absolute() || std::ranges::find(named, fs::path("..")) != named.end();
  if (leads_outside) {
    throw FormatError("the bundle " + named.string() +
                      " is not below the run's folder; it is not opened");
  }
  return attempt / named;
}

std::vector<OriginWindows> read_windows(const std::vector<Origin>& origins, const fs::path& attempt,
                                        std::vector<std::string>& notes) {
  std::vector<OriginWindows> all;
  for (std::size_t i = 0; i < origins.size() && all.size() < kMostOriginsWithWindows; ++i) {
    if (origins[i].bundle.empty()) continue;
    try {
      const OpenBundle bundle(bundle_folder(attempt, origins[i].bundle), FileAccess::copy);
      auto windows = windows_of(bundle);
      if (!windows.empty()) all.push_back({i, std::move(windows)});
    } catch (const Error& error) {
      notes.push_back(error.what());
    }
  }
  return all;
}

// ---- run.json ----

std::string text_of(const nlohmann::json& value) {
  return value.is_string() ? value.get<std::string>() : value.dump();
}

RunDescription description_from_json(const JsonObject& object) {
  require_version(object, kRunVersion);
  RunDescription run;
  run.run_id = object.text("run_id");
  run.attempt = object.small_integer("attempt", 0);
  run.started = object.text("started");
  run.nanlocator_version = object.text("nanlocator");
  run.torch_version = object.text("torch");
  run.integration = object.text("integration");
  run.level = object.text("level");
  run.host = object.text("host");
  run.world_size = object.small_integer("world_size", 1);
  for (const auto& [name, value] : object.member("options").items()) {
    run.options.emplace_back(name, text_of(value));
  }
  run.not_covered = member_from_json<std::vector<std::string>>(object, "not_covered");
  return run;
}

std::optional<RunDescription> read_description(const fs::path& folder,
                                               std::vector<std::string>& notes) {
  const fs::path path = folder / kRunFile;
  if (!is_there(path)) return std::nullopt;
  try {
    const auto json = parse_json(read_file(path, kLargestJsonFile), kRunFile);
    return description_from_json(JsonObject(json, kRunFile));
  } catch (const Error& error) {
    notes.push_back(error.what());
    return std::nullopt;
  }
}

// ---- recorded verdicts ----

/// The verdict files that the run recorded, by step. verdict.json takes precedence over the file of
/// the same step in verdicts/.
class RecordedVerdicts {
 public:
  RecordedVerdicts(const fs::path& folder, std::vector<std::string>& notes)
      : folder_(folder), notes_(notes) {
    files_ = numbered_entries(folder / kVerdictsFolder, "step", ".json");
    if (const fs::path latest = folder / kVerdictFile; is_there(latest)) {
      latest_ = read(latest, kVerdictFile);
      if (latest_) files_[latest_->iteration] = latest;
    }
  }

  [[nodiscard]] std::set<std::int64_t> steps() const {
    std::set<std::int64_t> steps;
    for (const auto& [step, path] : files_) steps.insert(step);
    return steps;
  }

  /// Empty if there is no readable one.
  [[nodiscard]] std::optional<Verdict> of_step(std::int64_t step) const {
    if (latest_ && latest_->iteration == step) return latest_;
    const auto found = files_.find(step);
    if (found == files_.end()) return std::nullopt;
    const std::string name = std::string(kVerdictsFolder) + "/" + found->second.filename().string();
    auto verdict = read(found->second, name);
    if (!verdict || verdict->iteration == step) return verdict;
    notes_.push_back(name + ": it is of step " + std::to_string(verdict->iteration) +
                     "; it is left out");
    return std::nullopt;
  }

  /// Of a step that no verdict of all ranks is about: from one of a rank that concluded alone.
  [[nodiscard]] std::optional<Launch> launch_of_rank(std::int64_t step,
                                                     const std::string& run_id) const {
    for (const auto& [rank, path] : numbered_entries(folder_, "verdict_rank", ".json")) {
      auto verdict = read(path, path.filename().string());
      if (verdict && verdict->iteration == step && verdict->run_id == run_id) {
        return std::move(verdict->launch);
      }
    }
    return std::nullopt;
  }

 private:
  std::optional<Verdict> read(const fs::path& path, const std::string& name) const {
    try {
      return verdict_from_json(read_file(path, kLargestJsonFile), name);
    } catch (const Error& error) {
      notes_.push_back(error.what());
      return std::nullopt;
    }
  }

  fs::path folder_;
  std::map<std::int64_t, fs::path> files_;
  std::optional<Verdict> latest_;
  std::vector<std::string>& notes_;
};

// ---- the step ----

using RunSteps = std::map<std::int64_t, std::set<int>>;  // ranks with a ledger, by step

std::map<std::string, RunSteps> steps_of_runs(const LedgerFiles& files) {
  std::map<std::string, RunSteps> runs;
  for (const auto& place : files.places) runs[place.run_id][place.iteration].insert(place.rank);
  return runs;
}

std::set<int> ranks_of(const RunSteps& steps) {
  std::set<int> ranks;
  for (const auto& [step, of_step] : steps) ranks.insert(of_step.begin(), of_step.end());
  return ranks;
}

std::string describe(const std::set<int>& ranks) {
  return ranks_text({ranks.begin(), ranks.end()});
}

/// The run to report: run.json's, else the one with most ranks, of two the later by name (an id
/// begins with the time).
std::string choose_run(const std::map<std::string, RunSteps>& runs, const std::string& described) {
  if (runs.empty() || runs.contains(described)) return described;
  return std::ranges::max_element(
             runs, {},
             [](const auto& run) { return std::pair(ranks_of(run.second).size(), run.first); })
      ->first;
}

std::string list_of(const std::set<std::int64_t>& steps) {
  std::string text;
  for (const std::int64_t step : steps) {
    text.append(text.empty() ? "" : ", ").append(std::to_string(step));
  }
  return text;
}

// ---- comparison of two verdicts on one step ----

auto place_of(const Origin& origin) {
  return std::tie(origin.phase, origin.candidates, origin.module, origin.op, origin.parameter,
                  origin.cause);
}

bool names_the_same_origins(const Verdict& a, const Verdict& b) {
  return std::ranges::equal(a.origins, b.origins, [](const Origin& left, const Origin& right) {
    return place_of(left) == place_of(right);
  });
}

/// Keeps each note once, because a file may have been read twice, and limits their number.
void tidy(std::vector<std::string>& notes) {
  std::set<std::string> seen;
  std::erase_if(notes, [&](const std::string& note) { return !seen.insert(note).second; });
  if (notes.size() <= kMostNotes) return;
  const std::size_t more = notes.size() - kMostNotes;
  notes.resize(kMostNotes);
  notes.push_back(std::to_string(more) + " further notes on the files are not listed");
}

/// Reads one attempt's folder.
class RunReader {
 public:
  RunReader(fs::path folder, const fs::path& as_named) : folder_(std::move(folder)) {
    report_.run_dir = as_named.string();
    report_.run = read_description(folder_, report_.notes);
    recorded_.emplace(folder_, report_.notes);
    files_ = find_ledgers(folder_);
    std::ranges::copy(files_.notes, std::back_inserter(report_.notes));
    const auto runs = steps_of_runs(files_);
    run_id_ = choose_run(runs, report_.run ? report_.run->run_id : "");
    if (const auto found = runs.find(run_id_); found != runs.end()) steps_ = found->second;
    for (const auto& [run, steps] : runs) {
      if (run == run_id_) continue;
      report_.notes.push_back("the ledgers of " + describe(ranks_of(steps)) + " of the run " + run +
                              " are skipped; reporting run " + run_id_);
    }
  }
  RunReader(const RunReader&) = delete;  // recorded_ refers to the notes of report_
  RunReader& operator=(const RunReader&) = delete;

  [[nodiscard]] std::set<std::int64_t> steps() const {
    std::set<std::int64_t> steps = recorded_->steps();
    for (const auto& [step, ranks] : steps_) steps.insert(step);
    return steps;
  }

  [[nodiscard]] std::vector<std::string> notes() && { return std::move(report_.notes); }

  /// The recorded verdict, else one located from the ledgers.
  Verdict verdict_of(std::int64_t step) {
    if (auto verdict = recorded_->of_step(step)) return *std::move(verdict);
    return merge(step).second;
  }

  RunReport read(std::optional<std::int64_t> wanted, RunDetail detail) && {
    const auto known = steps();
    if (known.empty()) {
      if (!files_.paths.empty()) throw_no_ledger();
      if (wanted) throw UsageError(folder_.string() + " has no step with findings");
      report_.verdict.run_id = report_.run ? report_.run->run_id : "";
      return std::move(report_);
    }
    const std::int64_t step = wanted.value_or(*known.rbegin());
    if (!known.contains(step)) {
      throw UsageError("step " + std::to_string(step) + " has no findings in " + folder_.string() +
                       "; those with findings: " + list_of(known));
    }
    report_step(step);
    if (!wanted) note_a_fuller_step(step);
    if (detail == RunDetail::everything) add_details(report_, folder_);
    tidy(report_.notes);
    return std::move(report_);
  }

 private:
  [[noreturn]] void throw_no_ledger() const {
    std::string message = folder_.string() + ": none of its ledgers can be read";
    for (std::size_t i = 0; i < std::min<std::size_t>(3, report_.notes.size()); ++i) {
      message += "; " + report_.notes[i];
    }
    throw FormatError(message);
  }

  std::pair<MergedLedgers, Verdict> merge(std::int64_t step) {
    auto read = read_ledgers(files_, run_id_, step, report_.notes);
    MergedLedgers merged = merge_ledgers(std::move(read), files_.paths,
                                         report_.run ? report_.run->world_size : 0, report_.notes);
    Verdict verdict = locate(merged.ledgers, merged.world_size);
    return {std::move(merged), std::move(verdict)};
  }

  void report_step(std::int64_t step) {
    auto recorded = recorded_->of_step(step);
    if (recorded && !steps_.empty() && recorded->run_id != run_id_) {
      report_.notes.push_back("the recorded verdict on step " + std::to_string(step) +
                              " is of the run " + recorded->run_id + "; it is left out");
      recorded.reset();
    }
    auto [merged, verdict] = merge(step);
    report_.ledgers = std::move(merged.ledgers);
    if (!recorded && report_.ledgers.empty()) {
      throw FormatError(folder_.string() + ": no ledger of step " + std::to_string(step) +
                        " can be read");
    }
    report_.verdict = std::move(verdict);
    report_.verdict.launch =
        recorded ? recorded->launch : recorded_->launch_of_rank(step, report_.verdict.run_id);
    report_.verdict.decision = decide(report_.verdict, earlier_verdicts(folder_));
    if (const auto earlier = deciding_step(report_.verdict)) {
      if (const auto deciding = recorded_->of_step(*earlier)) follow(*deciding, report_.verdict);
    }
    if (!recorded) return;
    merged.ledgers = {};
    if (report_.ledgers.empty()) {
      report_.notes.push_back("there is no ledger of step " + std::to_string(step) +
                              " here: the verdict is the one that the run recorded");
      report_.verdict = *std::move(recorded);
      return;
    }
    compare_with(*std::move(recorded), merged.world_size);
  }

  /// Keeps the verdict that rests on more ledgers, with the other's notes if both name the same
  /// origins.
  void compare_with(Verdict recorded, int world_size) {
    const auto whole = std::ranges::count_if(report_.ledgers, &Ledger::is_complete);
    const std::size_t missing_here =
        static_cast<std::size_t>(world_size) - static_cast<std::size_t>(whole);
    const bool is_same = names_the_same_origins(recorded, report_.verdict);
    // A rank that concluded alone had asked nobody.
    const bool is_of_one_rank =
        recorded.status == VerdictStatus::partial && recorded.silent_ranks.empty();
    if (!is_of_one_rank && recorded.silent_ranks.size() < missing_here) {
      report_.notes.push_back(
          "the verdict is the one that the run recorded: it rests on the ledgers of " +
          std::to_string(static_cast<std::size_t>(world_size) - recorded.silent_ranks.size()) +
          " ranks, and " + std::to_string(whole) + " are here and whole" +
          (is_same ? "" : "; these alone name other origins"));
      report_.verdict = std::move(recorded);
      return;
    }
    if (!is_same) {
      report_.notes.push_back(
          "the verdict that the run recorded names other origins: it rests on the ledgers of " +
          std::to_string(static_cast<std::size_t>(world_size) - recorded.silent_ranks.size()) +
          " ranks, this one on those of " + std::to_string(report_.ledgers.size()));
      return;
    }
    // Only the live run knew about ranks that stopped answering and files that could not be
    // written.
    for (auto& note : recorded.notes) {
      auto& notes = report_.verdict.notes;
      if (std::ranges::find(notes, note) == notes.end()) notes.push_back(std::move(note));
    }
  }

  /// The latest step may come from a rank that continued alone.
  void note_a_fuller_step(std::int64_t step) {
    const auto reported = steps_.find(step);
    if (reported == steps_.end()) return;
    for (auto earlier = steps_.rbegin(); earlier != steps_.rend(); ++earlier) {
      if (earlier->second.size() <= reported->second.size()) continue;
      report_.notes.push_back("step " + std::to_string(earlier->first) + " has the ledgers of " +
                              describe(earlier->second) + ", step " + std::to_string(step) +
                              " only of " + describe(reported->second) + "; --step " +
                              std::to_string(earlier->first) + " reports that one");
      return;
    }
  }

  fs::path folder_;
  RunReport report_;
  std::optional<RecordedVerdicts> recorded_;
  LedgerFiles files_;
  std::string run_id_;
  RunSteps steps_;  // of run_id_
};

}  // namespace

fs::path find_attempt(const fs::path& directory) {
  std::error_code error;
  if (!fs::is_directory(directory, error)) {
    throw IoError("there is no folder " + directory.string() +
                  "; name the output_dir of the run, or a folder with its ledgers");
  }
  if (fs::directory_iterator(directory, error); error) {
    throw IoError("cannot read the folder " + directory.string() + ": " + error.message());
  }
  if (has_findings(directory)) return directory;
  const auto attempts = numbered_entries(directory, "a", "");
  for (auto attempt = attempts.rbegin(); attempt != attempts.rend(); ++attempt) {
    if (has_findings(attempt->second)) return attempt->second;
  }
  return latest_attempt(directory);
}

fs::path latest_attempt(const fs::path& directory) {
  const auto attempts = numbered_entries(directory, "a", "");
  return attempts.empty() ? directory : attempts.rbegin()->second;
}

RunReport read_run(const fs::path& directory, std::optional<std::int64_t> iteration,
                   RunDetail detail) {
  const fs::path folder = find_attempt(directory);
  if (!is_run(folder)) throw_no_run(directory);
  return RunReader(folder, folder).read(iteration, detail);
}

void add_details(RunReport& report, const fs::path& attempt) {
  if (!report.run) report.run = read_description(attempt, report.notes);
  report.histories = read_histories(attempt, report.verdict.iteration, report.notes);
  report.windows = read_windows(report.verdict.origins, attempt, report.notes);
}

StepVerdicts read_verdicts(const fs::path& directory) {
  const fs::path folder = find_attempt(directory);
  if (!is_run(folder)) throw_no_run(directory);
  RunReader reader(folder, folder);
  StepVerdicts result;
  for (const std::int64_t step : reader.steps()) {
    result.verdicts.push_back(reader.verdict_of(step));
  }
  result.notes = std::move(reader).notes();
  tidy(result.notes);
  return result;
}

std::vector<std::int64_t> recorded_steps(const fs::path& attempt) {
  std::vector<std::string> ignored;
  const auto steps = RecordedVerdicts(attempt, ignored).steps();
  return {steps.begin(), steps.end()};
}

std::vector<Verdict> earlier_verdicts(const fs::path& attempt) {
  std::vector<Verdict> earlier;
  const fs::path folder = fs::absolute(attempt).lexically_normal();
  const std::string name = folder.filename().string();
  const auto attempts = numbered_entries(folder.parent_path(), "a", "");
  const auto own = std::ranges::find(
      attempts, name, [](const auto& entry) { return entry.second.filename().string(); });
  if (own == attempts.end()) return earlier;
  std::vector<std::string> ignored;
  for (auto each = std::make_reverse_iterator(own);
       each != attempts.rend() && std::ssize(earlier) < kMostEarlier; ++each) {
    const RecordedVerdicts recorded(each->second, ignored);
    const auto steps = recorded.steps();
    if (steps.empty()) continue;
    if (auto verdict = recorded.of_step(*steps.rbegin())) earlier.push_back(*std::move(verdict));
  }
  return earlier;
}

std::optional<Verdict> read_recorded_verdict(const fs::path& attempt, std::int64_t iteration) {
  std::vector<std::string> ignored;
  return RecordedVerdicts(attempt, ignored).of_step(iteration);
}

}  // namespace nanlocator::inline report_room
