#include "nanlocator/record/history.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <set>
#include <span>
#include <string_view>
#include <system_error>
#include <utility>

#include "files/appended_file.hpp"
#include "files/strict_json.hpp"
#include "map/coordinates_json.hpp"
#include "nanlocator/error.hpp"
#include "nanlocator/files/atomic_file.hpp"
#include "record/history_json.hpp"
#include "record/keys.hpp"
#include "record/record_json.hpp"
#include "record/sighting_json.hpp"

namespace nanlocator {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

constexpr std::string_view kPrefix = "history_";
constexpr std::string_view kSuffix = ".jsonl";
/// What the first line of a history begins with: so it is found without reading the others.
constexpr std::string_view kHeaderBegins = R"({"record":"history",)";

/// 64 steps of 10 000 parameters take 15 MB, and a run has 16 findings; more than this is none.
constexpr std::uint64_t kLargestHistoryFile = std::uint64_t{1} << 30;

/// Of one file: garbage must not fill the memory with remarks about its lines.
constexpr std::size_t kMostLineNotes = 20;

constexpr float kUnseen = std::numeric_limits<float>::quiet_NaN();

// ---- writing ----

/// The double that prints as the float does: 0.1f as 0.1, not as 0.10000000149011612.
double as_printed(float number) {
  std::array<char, 32> text{};
  const auto printed = std::to_chars(text.data(), text.data() + text.size(), number);
  double value = 0;
  std::from_chars(text.data(), printed.ptr, value);
  return value;
}

ordered_json header_to_json(const History& history) {
  ordered_json json;
  json[keys::kRecord] = keys::kRecordHistory;
  json[keys::kVersion] = keys::kHistoryVersion;
  json[keys::kRun] = history.run_id;
  json[keys::kAttempt] = history.attempt;
  json[keys::kCoordinates] = coordinates_to_json(history.coordinates);
  json[keys::kPhase] = history.phase;
  json[keys::kIterations] = history.iterations;
  return json;
}

ordered_json parameter_to_json(const ParameterHistory& parameter) {
  ordered_json json;
  json[keys::kRecord] = keys::kRecordParameter;
  json[keys::kId] = parameter.id;
  json[keys::kName] = parameter.name;
  json[keys::kNorm] = floats_to_json(parameter.norm);
  json[keys::kAbsmax] = floats_to_json(parameter.absmax);
  json[keys::kNonfinite] = parameter.nonfinite;
  return json;
}

// ---- reading ----

[[noreturn]] void throw_other_length(const JsonObject& object, const char* key, std::size_t found,
                                     std::size_t expected) {
  throw FormatError(object.where(key) + ": " + std::to_string(found) + " entries, expected " +
                    std::to_string(expected) + ", one for each step");
}

std::vector<std::int64_t> iterations_from_json(const JsonObject& object) {
  auto iterations = sizes_from_json(object, keys::kIterations);
  if (iterations.size() > kHistorySteps) {
    throw FormatError(object.where(keys::kIterations) + ": " + std::to_string(iterations.size()) +
                      " steps, expected at most " + std::to_string(kHistorySteps));
  }
  if (std::ranges::adjacent_find(iterations, std::ranges::greater_equal{}) != iterations.end()) {
    throw FormatError(object.where(keys::kIterations) + ": not in ascending order");
  }
  return iterations;
}

/// Null becomes NaN.
std::vector<float> floats_from_json(const JsonObject& object, const char* key, std::size_t count) {
  const auto& array = object.member(key);
  if (!array.is_array()) throw_unexpected_json(object.where(key), array, "an array of numbers");
  if (array.size() != count) throw_other_length(object, key, array.size(), count);
  std::vector<float> numbers;
  numbers.reserve(count);
  for (const auto& element : array) {
    if (element.is_null()) {
      numbers.push_back(kUnseen);
      continue;
    }
    const double number = element.is_number() ? element.get<double>() : -1;
    if (number < 0 || number > std::numeric_limits<float>::max()) {
      throw_unexpected_json(object.where(key) + "[" + std::to_string(numbers.size()) + "]", element,
                            "null or a number that a float holds, 0 or more");
    }
    numbers.push_back(static_cast<float>(number));
  }
  return numbers;
}

History header_from_json(const JsonObject& object) {
  require_version(object, keys::kHistoryVersion);
  History history;
  history.run_id = object.text(keys::kRun);
  history.attempt = object.small_integer(keys::kAttempt, 0);
  history.coordinates = coordinates_from_json(object.object(keys::kCoordinates));
  history.phase = name_of(phase_from_json(object, keys::kPhase));
  history.iterations = iterations_from_json(object);
  if (history.iterations.empty()) {
    throw FormatError(object.where(keys::kIterations) + ": empty, expected the finding's at least");
  }
  return history;
}

ParameterHistory parameter_from_json(const JsonObject& object, std::size_t steps) {
  ParameterHistory parameter;
  parameter.id = object.integer(keys::kId, 0);
  parameter.name = object.text(keys::kName);
  parameter.norm = floats_from_json(object, keys::kNorm, steps);
  parameter.absmax = floats_from_json(object, keys::kAbsmax, steps);
  parameter.nonfinite = sizes_from_json(object, keys::kNonfinite);
  if (parameter.nonfinite.size() != steps) {
    throw_other_length(object, keys::kNonfinite, parameter.nonfinite.size(), steps);
  }
  return parameter;
}

struct Line {
  std::size_t number = 0;
  std::string_view text;
};

/// One file: finds the history that is asked for by its header, and reads that one alone.
class HistoryFile {
 public:
  HistoryFile(std::string source, std::string_view text, std::vector<std::string>& notes)
      : source_(std::move(source)), notes_(notes) {
    for (std::size_t number = 1; !text.empty(); ++number) {
      const std::size_t end = std::min(text.find('\n'), text.size());
      const std::string_view line = text.substr(0, end);
      text.remove_prefix(std::min(end + 1, text.size()));
      if (line.find_first_not_of(" \t\r") != std::string_view::npos) {
        lines_.push_back({number, line});
      }
    }
  }

  std::optional<History> read(std::int64_t iteration, std::optional<int> rank) {
    bool has_header = false;
    for (std::size_t at = lines_.size(); at-- > 0;) {
      if (!lines_[at].text.starts_with(kHeaderBegins)) continue;
      has_header = true;
      auto history = header(lines_[at]);
      if (!history) continue;
      if (rank && history->coordinates.rank != *rank) return std::nullopt;
      if (iteration >= 0 && history->iterations.back() != iteration) continue;
      read_parameters(at + 1, *history);
      return history;
    }
    if (!has_header) note(source_ + ": holds no history that can be read");
    return std::nullopt;
  }

 private:
  [[nodiscard]] std::string where(const Line& line) const {
    return source_ + ": line " + std::to_string(line.number);
  }

  std::optional<History> header(const Line& line) {
    try {
      const nlohmann::json json = parse_json(line.text, where(line));
      auto history = header_from_json(JsonObject(json, where(line)));
      const std::string expected =
          std::string(kPrefix) + history.coordinates.file_suffix() + std::string(kSuffix);
      if (fs::path(source_).filename() != expected) {
        throw FormatError(where(line) + ": of " + history.coordinates.describe() +
                          ", whose file is " + expected);
      }
      return history;
    } catch (const FormatError& error) {
      note(error.what() + std::string("; this history is skipped"));
      return std::nullopt;
    }
  }

  void read_parameters(std::size_t at, History& history) {
    std::set<std::int64_t> ids;
    std::int64_t count = 0;
    for (; at < lines_.size() && !lines_[at].text.starts_with(kHeaderBegins); ++at) {
      try {
        const nlohmann::json json = parse_json(lines_[at].text, where(lines_[at]));
        const JsonObject object(json, where(lines_[at]));
        const std::string record = object.text(keys::kRecord);
        if (record == keys::kRecordEnd) {
          const auto expected = object.integer(keys::kLines, 0);
          if (expected != count) {
            note(object.where() + ": the history has " + std::to_string(count) +
                 " readable lines of " + std::to_string(expected));
          }
          return;
        }
        if (record != keys::kRecordParameter) {
          throw FormatError(object.where(keys::kRecord) + ": unknown record");
        }
        auto parameter = parameter_from_json(object, history.iterations.size());
        if (!ids.insert(parameter.id).second) {
          throw FormatError(object.where(keys::kId) + ": stands twice");
        }
        history.parameters.push_back(std::move(parameter));
        ++count;
      } catch (const FormatError& error) {
        note(error.what() + std::string("; the line is skipped"));
      }
    }
    note(source_ + ": cut off: the history of step " + std::to_string(history.iterations.back()) +
         " has no last line");
  }

  void note(std::string text) {
    ++noted_;
    if (noted_ <= kMostLineNotes) notes_.push_back(std::move(text));
    if (noted_ == kMostLineNotes + 1) {
      notes_.push_back(source_ + ": further lines that cannot be read are not listed");
    }
  }

  std::string source_;
  std::vector<std::string>& notes_;
  std::vector<Line> lines_;
  std::size_t noted_ = 0;
};

/// In the order of their names: that of a directory's entries is not fixed.
std::vector<fs::path> history_files(const fs::path& directory) {
  std::vector<fs::path> files;
  std::error_code error;
  fs::directory_iterator entries(directory, error);
  for (; !error && entries != fs::directory_iterator(); entries.increment(error)) {
    const std::string name = entries->path().filename().string();
    if (name.starts_with(kPrefix) && name.ends_with(kSuffix)) files.push_back(entries->path());
  }
  if (error) {
    throw IoError("cannot read the directory " + directory.string() + ": " + error.message());
  }
  std::ranges::sort(files);
  return files;
}

bool is_of_other_run(const History& history, const History& first) {
  return history.run_id != first.run_id || history.attempt != first.attempt;
}

}  // namespace

ordered_json floats_to_json(std::span<const float> numbers) {
  ordered_json json = ordered_json::array();
  for (const float number : numbers) {
    json.push_back(std::isfinite(number) ? ordered_json(as_printed(number)) : ordered_json());
  }
  return json;
}

HistorySummary summary_of(const History& history) {
  HistorySummary summary;
  for (std::size_t step = 0; step < history.iterations.size(); ++step) {
    const ParameterHistory* largest = nullptr;
    double sum_of_squares = 0;
    bool is_finite = true;
    for (const auto& parameter : history.parameters) {
      is_finite = is_finite && parameter.nonfinite[step] == 0;
      const float absmax = parameter.absmax[step];
      if (!std::isfinite(absmax)) continue;
      sum_of_squares += static_cast<double>(parameter.norm[step]) * parameter.norm[step];
      if (largest == nullptr || absmax > largest->absmax[step]) largest = &parameter;
    }
    if (largest == nullptr) continue;
    const double norm = std::sqrt(sum_of_squares);
    summary.iterations.push_back(history.iterations[step]);
    summary.absmax.push_back(largest->absmax[step]);
    summary.norm.push_back(
        static_cast<float>(std::min<double>(norm, std::numeric_limits<float>::max())));
    if (is_finite || summary.parameter.empty()) summary.parameter = largest->name;
  }
  return summary;
}

ordered_json summary_to_json(const HistorySummary& summary) {
  ordered_json json;
  json[keys::kIterations] = summary.iterations;
  json[keys::kAbsmax] = floats_to_json(summary.absmax);
  json[keys::kNorm] = floats_to_json(summary.norm);
  json[keys::kParameter] = text_or_null(summary.parameter);
  return json;
}

HistorySummary summary_from_json(const JsonObject& object) {
  HistorySummary summary;
  summary.iterations = iterations_from_json(object);
  summary.absmax = floats_from_json(object, keys::kAbsmax, summary.iterations.size());
  summary.norm = floats_from_json(object, keys::kNorm, summary.iterations.size());
  for (const auto* numbers : {&summary.absmax, &summary.norm}) {
    if (!std::ranges::all_of(*numbers, [](float number) { return std::isfinite(number); })) {
      throw FormatError(object.where() +
                        ": a summary lists the steps that were seen, without null");
    }
  }
  summary.parameter = text_or_empty(object, keys::kParameter);
  return summary;
}

std::string to_jsonl(const History& history) {
  std::string text = one_line(header_to_json(history)) + "\n";
  for (const auto& parameter : history.parameters) {
    text += one_line(parameter_to_json(parameter)) + "\n";
  }
  return text +
         one_line({{keys::kRecord, keys::kRecordEnd}, {keys::kLines, history.parameters.size()}}) +
         "\n";
}

void append_history(const fs::path& directory, const History& history) {
  const std::string name =
      std::string(kPrefix) + history.coordinates.file_suffix() + std::string(kSuffix);
  AppendedFile(directory / name).append_lines(to_jsonl(history));
}

std::vector<History> read_histories(const fs::path& directory, std::int64_t iteration,
                                    std::vector<std::string>& notes, std::optional<int> rank) {
  std::vector<History> histories;
  for (const fs::path& path : history_files(directory)) {
    try {
      const std::string text = read_file(path, kLargestHistoryFile);
      auto history = HistoryFile(path.string(), text, notes).read(iteration, rank);
      if (!history) continue;
      const auto same = std::ranges::find(histories, history->coordinates.rank,
                                          [](const auto& each) { return each.coordinates.rank; });
      if (same != histories.end()) {
        notes.push_back(path.string() + ": left out, as rank " +
                        std::to_string(history->coordinates.rank) + " has another file");
      } else if (!histories.empty() && is_of_other_run(*history, histories.front())) {
        notes.push_back(path.string() + ": left out, as it is of another run than " +
                        histories.front().coordinates.describe());
      } else {
        histories.push_back(std::move(*history));
      }
    } catch (const IoError& error) {
      notes.push_back(error.what());
    }
  }
  std::ranges::sort(histories, {}, [](const History& history) { return history.coordinates.rank; });
  return histories;
}

}  // namespace nanlocator
