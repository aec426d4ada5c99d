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
#include "map/coordinates_json.hpp"
#include "nanlocator/error.hpp"
#include "nanlocator/files/atomic_file.hpp"
#include "nanlocator/record/sighting.hpp"
#include "record/history_json.hpp"
#include "record/line_notes.hpp"

namespace nanlocator::inline record_room {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

constexpr int kHistoryVersion = 1;

constexpr std::string_view kPrefix = "history_";
constexpr std::string_view kSuffix = ".jsonl";
/// The beginning of a history's first line: finds it without parsing the other lines.
constexpr std::string_view kHeaderBegins = R"({"record":"history",)";

/// 64 steps of 10 000 parameters take 15 MB, and a run has 16 findings; a larger file is not a
/// history.
constexpr std::uint64_t kLargestHistoryFile = std::uint64_t{1} << 30;

constexpr float kUnseen = std::numeric_limits<float>::quiet_NaN();

/// The double that prints as the float does: 0.1f as 0.1, not as 0.10000000149011612.
double as_printed(float number) {
  std::array<char, 32> text{};
  const auto printed = std::to_chars(text.data(), text.data() + text.size(), number);
  double value = 0;
  std::from_chars(text.data(), printed.ptr, value);
  return value;
}

using H = History;
constexpr auto kHistoryFields =
    std::tuple(JsonField("run", &H::run_id), JsonField("attempt", &H::attempt),
               JsonField("coordinates", &H::coordinates), JsonField("phase", &H::phase),
               JsonField("iterations", &H::iterations));

void check_length(const JsonObject& object, const char* key, std::size_t found,
                  std::size_t expected) {
  if (found == expected) return;
  throw FormatError(object.where(key) + ": " + std::to_string(found) + " entries, expected " +
                    std::to_string(expected) + ", one for each step");
}

void check_iterations(const JsonObject& object, const std::vector<std::int64_t>& iterations) {
  if (iterations.size() > kHistorySteps) {
    throw FormatError(object.where("iterations") + ": " + std::to_string(iterations.size()) +
                      " steps, expected at most " + std::to_string(kHistorySteps));
  }
  if (std::ranges::adjacent_find(iterations, std::ranges::greater_equal{}) != iterations.end()) {
    throw FormatError(object.where("iterations") + ": not in ascending order");
  }
}

History history_from_json(const JsonObject& object) {
  require_version(object, kHistoryVersion);
  History history;
  read_fields(object, history, kHistoryFields);
  (void)member_from_json<Phase>(object, "phase");
  check_iterations(object, history.iterations);
  if (history.iterations.empty()) {
    throw FormatError(object.where("iterations") + ": empty, expected at least the finding's step");
  }
  return history;
}

ParameterHistory parameter_from_json(const JsonObject& object, std::size_t steps) {
  auto parameter = fields_from_json<ParameterHistory>(object);
  check_length(object, "norm", parameter.norm.size(), steps);
  check_length(object, "absmax", parameter.absmax.size(), steps);
  check_length(object, "nonfinite", parameter.nonfinite.size(), steps);
  return parameter;
}

struct Line {
  std::size_t number = 0;
  std::string_view text;
};

/// One file: finds the requested history by its header, and reads only that one.
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
    if (!has_header) note(source_ + ": holds no readable history");
    return std::nullopt;
  }

 private:
  [[nodiscard]] std::string where(const Line& line) const {
    return source_ + ": line " + std::to_string(line.number);
  }

  std::optional<History> header(const Line& line) {
    try {
      const nlohmann::json json = parse_json(line.text, where(line));
      auto history = history_from_json(JsonObject(json, where(line)));
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
        const std::string record = object.text("record");
        if (record == "end") {
          const auto expected = object.integer("lines", 0);
          if (expected != count) {
            note(object.where() + ": the history has " + std::to_string(count) +
                 " readable lines of " + std::to_string(expected));
          }
          return;
        }
        if (record != "parameter") {
          throw FormatError(object.where("record") + ": unknown record");
        }
        auto parameter = parameter_from_json(object, history.iterations.size());
        if (!ids.insert(parameter.id).second) {
          throw FormatError(object.where("id") + ": occurs twice");
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

  void note(std::string text) { line_notes_.add(std::move(text), notes_); }

  std::string source_;
  std::vector<std::string>& notes_;
  std::vector<Line> lines_;
  LineNotes line_notes_{source_};
};

/// Sorted by name, because a directory's entries come in any order.
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

std::vector<float> floats_from_json(const JsonMember& from) {
  if (!from.value().is_array()) from.throw_unexpected("an array of numbers");
  std::vector<float> numbers;
  numbers.reserve(from.value().size());
  for (const auto& element : from.value()) {
    const double number = element.is_number() ? element.get<double>() : -1;
    const bool is_float = number >= 0 && number <= std::numeric_limits<float>::max();
    if (!is_float && !element.is_null()) {
      from.element(numbers.size())
          .throw_unexpected("null or a number that a float holds, 0 or more");
    }
    numbers.push_back(is_float ? static_cast<float>(number) : kUnseen);
  }
  return numbers;
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

Maxima maxima_before(const History& history, std::string_view name, std::int64_t iteration) {
  constexpr std::size_t kMost = 5;
  Maxima maxima;
  const auto found = std::ranges::find(history.parameters, name, &ParameterHistory::name);
  if (found == history.parameters.end()) return maxima;
  for (std::size_t step = 0; step < history.iterations.size(); ++step) {
    if (history.iterations[step] >= iteration || !std::isfinite(found->absmax[step])) continue;
    maxima.iterations.push_back(history.iterations[step]);
    maxima.absmax.push_back(found->absmax[step]);
  }
  const auto cut =
      static_cast<std::ptrdiff_t>(maxima.absmax.size() - std::min(maxima.absmax.size(), kMost));
  maxima.iterations.erase(maxima.iterations.begin(), maxima.iterations.begin() + cut);
  maxima.absmax.erase(maxima.absmax.begin(), maxima.absmax.begin() + cut);
  return maxima;
}

/// A list of the steps that were seen contains no null.
static void check_seen(const JsonObject& object, const std::vector<float>& numbers) {
  if (std::ranges::all_of(numbers, [](float number) { return std::isfinite(number); })) return;
  throw FormatError(object.where() + ": found null; a summary lists only steps that were seen");
}

void read_fields(const JsonObject& object, Maxima& maxima) {
  read_fields(object, maxima, json_fields(&maxima));
  check_iterations(object, maxima.iterations);
  check_length(object, "absmax", maxima.absmax.size(), maxima.iterations.size());
  check_seen(object, maxima.absmax);
}

void read_fields(const JsonObject& object, HistorySummary& summary) {
  read_fields(object, summary, json_fields(&summary));
  check_iterations(object, summary.iterations);
  check_length(object, "absmax", summary.absmax.size(), summary.iterations.size());
  check_length(object, "norm", summary.norm.size(), summary.iterations.size());
  check_seen(object, summary.absmax);
  check_seen(object, summary.norm);
}

std::string to_jsonl(const History& history) {
  ordered_json header = {{"record", "history"}, {"version", kHistoryVersion}};
  write_fields(header, history, kHistoryFields);
  std::string text = one_line(header) + "\n";
  for (const auto& parameter : history.parameters) {
    ordered_json line = {{"record", "parameter"}};
    write_fields(line, parameter, json_fields(&parameter));
    text += one_line(line) + "\n";
  }
  return text + one_line({{"record", "end"}, {"lines", history.parameters.size()}}) + "\n";
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
        notes.push_back(path.string() + ": skipped, because rank " +
                        std::to_string(history->coordinates.rank) + " has another file");
      } else if (!histories.empty() && is_of_other_run(*history, histories.front())) {
        notes.push_back(path.string() + ": skipped, because it is of another run than " +
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

}  // namespace nanlocator::inline record_room
