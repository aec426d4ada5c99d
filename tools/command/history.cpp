// `nanlocator history`: the gradients of a run before its finding.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <iostream>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "command.hpp"
#include "console.hpp"
#include "files/printable.hpp"
#include "files/text.hpp"
#include "map/coordinates_json.hpp"
#include "nanlocator/error.hpp"
#include "nanlocator/map/map_query.hpp"
#include "nanlocator/record/history.hpp"
#include "nanlocator/report/read_run.hpp"
#include "plot.hpp"
#include "record/history_json.hpp"

namespace nanlocator::command {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kHistoryOutputVersion = 1;

struct HistoryOptions {
  std::string directory;
  std::string pattern;  // empty: all
  std::optional<int> rank;
  std::optional<std::int64_t> step;
  std::string metric;  // "absmax", "norm"
  std::size_t top = 0;
};

/// A parameter of one rank.
struct Curve {
  const History* history = nullptr;
  const ParameterHistory* parameter = nullptr;
  const std::vector<float>* values = nullptr;
  std::optional<double> growth;  // the last known value over the first, both above zero
};

std::optional<double> growth_of(const std::vector<float>& values) {
  const auto is_seen = [](float value) { return value > 0; };  // false for NaN
  const auto first = std::ranges::find_if(values, is_seen);
  if (first == values.end()) return std::nullopt;
  const auto last = std::find_if(values.rbegin(), values.rend(), is_seen);
  return static_cast<double>(*last) / *first;
}

/// Steepest first.
std::vector<Curve> find_curves(const std::vector<History>& histories,
                               const HistoryOptions& options) {
  std::vector<Curve> curves;
  for (const auto& history : histories) {
    for (const auto& parameter : history.parameters) {
      if (!options.pattern.empty() && !name_matches(parameter.name, options.pattern)) continue;
      const auto& values = options.metric == "norm" ? parameter.norm : parameter.absmax;
      curves.push_back({&history, &parameter, &values, growth_of(values)});
    }
  }
  std::ranges::stable_sort(curves, std::ranges::greater{}, [](const Curve& curve) {
    return curve.growth.value_or(-std::numeric_limits<double>::infinity());
  });
  return curves;
}

// --- text ---------------------------------------------------------------------------------------

std::string title_of(const Curve& curve, const HistoryOptions& options) {
  std::string title = printable(curve.parameter->name) + "  " +
                      printable(curve.history->coordinates.describe()) + "  " + options.metric;
  if (curve.growth) title += ", last over first " + number_text(*curve.growth, 3);
  return title;
}

/// "x" below the columns whose steps had NaN or Inf; empty if none had.
std::string marks_of_bad_steps(const std::vector<std::int64_t>& nonfinite, std::size_t columns) {
  std::string marks;
  const std::size_t drawn = std::min(columns, nonfinite.size());
  for (std::size_t column = 0; column < drawn; ++column) {
    const auto [begin, end] = shown_in_column(column, columns, nonfinite.size());
    const bool is_bad = std::any_of(nonfinite.begin() + static_cast<std::ptrdiff_t>(begin),
                                    nonfinite.begin() + static_cast<std::ptrdiff_t>(end),
                                    [](std::int64_t count) { return count > 0; });
    marks += is_bad ? 'x' : ' ';
  }
  marks.erase(marks.find_last_not_of(' ') + 1);
  return marks;
}

std::string padded_left(const std::string& text, std::size_t width) {
  return std::string(width - std::min(width, text.size()), ' ') + text;
}

void print_curve(const Curve& curve, const HistoryOptions& options) {
  constexpr std::size_t kLabel = 10;  // "  1.23e+18"
  const bool is_terminal = terminal_width().has_value();
  const std::size_t width = terminal_width().value_or(kLogWidth);
  const std::size_t columns = width > kLabel + 10 ? width - kLabel - 2 : 8;
  const std::size_t rows = is_terminal ? 4 : 6;
  const auto lines = plot_curve(*curve.values, columns, rows,
                                is_terminal ? PlotGlyphs::braille : PlotGlyphs::ascii);
  std::cout << bold(title_of(curve, options)) << '\n';

  std::vector<float> seen;
  std::ranges::copy_if(*curve.values, std::back_inserter(seen),
                       [](float value) { return !std::isnan(value); });
  const auto [low, high] = seen.empty() ? std::pair(0.0F, 0.0F) : [&] {
    const auto ends = std::ranges::minmax(seen);
    return std::pair(ends.min, ends.max);
  }();
  for (std::size_t row = 0; row < rows; ++row) {
    std::string label;
    if (row == 0) label = number_text(high, 3);
    if (row + 1 == rows) label = number_text(low, 3);
    std::cout << padded_left(label, kLabel) << " |" << lines[row] << '\n';
  }
  const auto& iterations = curve.history->iterations;
  std::string axis = "step " + std::to_string(iterations.front());
  if (iterations.size() > 1) axis += " to " + std::to_string(iterations.back());
  const std::string marks = marks_of_bad_steps(curve.parameter->nonfinite, columns);
  if (!marks.empty()) std::cout << padded_left("NaN or Inf", kLabel) << "  " << marks << '\n';
  std::cout << std::string(kLabel + 2, ' ') << axis << '\n';
}

/// The message if there is nothing to show.
std::string explain_nothing(const std::vector<History>& histories, const HistoryOptions& options) {
  const std::string directory = printable(options.directory);
  if (!histories.empty()) {
    return "no parameter whose name matches " + printable(options.pattern) + " on any of " +
           std::to_string(histories.size()) + (histories.size() == 1 ? " rank" : " ranks") +
           "; nanlocator map find " + directory + " PATTERN lists names";
  }
  std::string text = "no history";
  if (options.step) text += " of step " + std::to_string(*options.step);
  if (options.rank) text += " of rank " + std::to_string(*options.rank);
  text += " in " + directory +
          ": history_*.jsonl files are written beside the ledgers when there is a finding";
  if (options.step || options.rank) text += "; or drop --step and --rank";
  return text;
}

// --- JSON ---------------------------------------------------------------------------------------

Json curve_to_json(const Curve& curve) {
  return {{"coordinates", fields_to_json(curve.history->coordinates)},
          {"phase", curve.history->phase},
          {"id", curve.parameter->id},
          {"name", curve.parameter->name},
          {"growth", curve.growth ? Json(*curve.growth) : Json(nullptr)},
          {"iterations", curve.history->iterations},
          {"values", floats_to_json(*curve.values)},
          {"nonfinite", curve.parameter->nonfinite}};
}

int history(const Arguments& given) {
  const HistoryOptions options = {.directory = given.text("DIR"),
                                  .pattern = given.text("--param"),
                                  .rank = given.integer("--rank"),
                                  .step = given.integer("--step"),
                                  .metric = given.text("--metric"),
                                  .top = static_cast<std::size_t>(*given.integer("--top"))};
  std::vector<std::string> notes;
  const auto histories = read_histories(find_attempt(options.directory), options.step.value_or(-1),
                                        notes, options.rank);
  const auto curves = find_curves(histories, options);
  const std::size_t shown = std::min(options.top, curves.size());
  const int code = curves.empty() ? kFindings : kClean;
  if (given.has("--json")) {
    Json matches = Json::array();
    for (std::size_t i = 0; i < shown; ++i) matches.push_back(curve_to_json(curves[i]));
    print_json({{"version", kHistoryOutputVersion},
                {"directory", options.directory},
                {"pattern", options.pattern},
                {"metric", options.metric},
                {"matched", curves.size()},
                {"matches", std::move(matches)},
                {"notes", notes}});
    return code;
  }
  print_notes(notes);
  if (curves.empty()) std::cout << explain_nothing(histories, options) << '\n';
  for (std::size_t i = 0; i < shown; ++i) {
    if (i > 0) std::cout << '\n';
    print_curve(curves[i], options);
  }
  const auto has_grown = [](const Curve& curve) { return curve.growth.value_or(1) >= 2; };
  if (!curves.empty() && std::ranges::none_of(curves, has_grown)) {
    std::cout << "\nnone of them doubled: what was bad came within a step\n";
  }
  if (shown < curves.size()) {
    std::cout << '\n'
              << shown << " of " << curves.size() << ", the fastest growing; --top "
              << curves.size() << " shows all\n";
  }
  return code;
}

constexpr Option kHistoryOptions[] = {
    {.name = "DIR",
     .default_value = "nanlocator_run",
     .help = "Folder of a run (nanlocator_run), of one attempt, or with history files"},
    kJsonOption,
    {.name = "--param",
     .value = "NAME",
     .help = "A part of a name, or a pattern with * and ? (default: all)"},
    {.name = "--rank", .value = "N", .type = Type::integer, .help = "Only this global rank"},
    {.name = "--step",
     .value = "N",
     .type = Type::integer,
     .high = kLargestStep,
     .help = "The finding of this step (default: the latest)"},
    {.name = "--metric",
     .default_value = "absmax",
     .choices = "absmax|norm",
     .help = "The largest absolute value of a gradient, or its norm"},
    {.name = "--top",
     .value = "N",
     .type = Type::integer,
     .default_value = "10",
     .help = "Show the N that grew most"},
};

}  // namespace

Command history_command() {
  return {.name = "history",
          .summary = "How the gradients grew over the steps before a finding",
          .options = kHistoryOptions,
          .details =
              "Values are those of the finite elements of the rank's own gradient, on a "
              "logarithmic axis; a step that was not seen is a gap.",
          .exit_codes = "0 shown, 1 nothing to show, 2 wrong use or unreadable input",
          .examples =
              "nanlocator history nanlocator_run/a0\n"
              "nanlocator history nanlocator_run/a0 --param 'layers.3.*' --rank 5 --metric norm\n"
              "nanlocator history nanlocator_run/a0 --param output_layer --step 1284 --json",
          .run = history};
}

}  // namespace nanlocator::command
