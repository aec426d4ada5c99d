// A replay's report as text and as JSON.
#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "files/json_fields.hpp"
#include "files/printable.hpp"
#include "files/text.hpp"
#include "nanlocator/record/sighting.hpp"
#include "nanlocator/replay/replay.hpp"

namespace nanlocator::inline replay_room {
namespace {

using Json = nlohmann::ordered_json;

Json output_to_json(const ReplayedOutput& output) {
  Json json;
  json["name"] = output.name;
  json["dtype"] = output.dtype;
  json["shape"] = output.shape;
  json["numel"] = output.stats.numel;
  json["nan"] = output.stats.nan;
  json["pos_inf"] = output.stats.pos_inf;
  json["neg_inf"] = output.stats.neg_inf;
  json["first_bad"] = output.stats.first_bad < 0
                          ? Json(nullptr)
                          : Json(unravel_index(output.stats.first_bad, output.shape));
  json["absmax_finite"] = number_to_json(output.stats.absmax);
  json["equals_recorded"] = value_to_json(output.equals_recorded);
  return json;
}

Json outputs_to_json(const std::vector<ReplayedOutput>& outputs) {
  Json json = Json::array();
  for (const auto& output : outputs) json.push_back(output_to_json(output));
  return json;
}

using Row = std::array<std::string, 8>;

Row row_of(const std::string& run, const ReplayedOutput& output) {
  const auto& stats = output.stats;
  return {run,
          output.name,
          output.dtype,
          std::to_string(stats.nan),
          std::to_string(stats.pos_inf + stats.neg_inf),
          stats.first_bad < 0 ? "-" : describe_shape(unravel_index(stats.first_bad, output.shape)),
          number_text(stats.absmax),
          !output.equals_recorded   ? "-"
          : *output.equals_recorded ? "yes"
                                    : "no"};
}

std::string run_name(const ReplayRun& run) {
  std::string name(name_of(run.variant));
  if (run.variant == ReplayVariant::recorded)
    name.append(1, ' ').append(std::to_string(run.repeat + 1));
  return name;
}

std::string table(const std::vector<Row>& rows) {
  std::array<int, 8> widths{};
  for (const auto& row : rows) {
    for (std::size_t c = 0; c < row.size(); ++c) {
      widths[c] = std::max(widths[c], columns_of(printable(row[c])));
    }
  }
  std::string text;
  for (const auto& row : rows) {
    std::string line;
    for (std::size_t c = 0; c < row.size(); ++c) {
      const auto cell = printable(row[c]);
      const std::string padding(static_cast<std::size_t>(widths[c] - columns_of(cell)), ' ');
      const bool is_number = c == 3 || c == 4 || c == 6;
      line += "  " + (is_number ? padding + cell : cell + padding);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + '\n';
  }
  return text;
}

/// Words wrapped to `width` columns, lines after the first indented.
std::string wrapped(const std::string& sentence, int width, const std::string& indent) {
  std::string text;
  std::string line = indent + "- ";
  bool is_line_empty = true;
  std::size_t begin = 0;
  const auto words = printable(sentence);
  while (begin <= words.size()) {
    const auto end = std::min(words.find(' ', begin), words.size());
    const auto word = words.substr(begin, end - begin);
    if (!is_line_empty && columns_of(line) + 1 + columns_of(word) > width) {
      text += line + '\n';
      line = indent + "  ";
      is_line_empty = true;
    }
    line += (is_line_empty ? "" : " ") + word;
    is_line_empty = false;
    begin = end + 1;
  }
  return text + line + '\n';
}

}  // namespace

std::string to_json(const ReplayReport& report) {
  Json json;
  json["version"] = 1;
  json["op"] = report.op;
  json["conclusion"] = name_of(report.conclusion);
  json["is_bit_exact"] = report.is_bit_exact;
  json["recorded"] = outputs_to_json(report.recorded);
  json["runs"] = Json::array();
  for (const auto& run : report.runs) {
    Json run_json;
    run_json["variant"] = name_of(run.variant);
    run_json["repeat"] = run.repeat;
    run_json["problem"] = run.problem.empty() ? Json() : Json(run.problem);
    run_json["outputs"] = outputs_to_json(run.outputs);
    json["runs"].push_back(std::move(run_json));
  }
  json["inputs_at_first_bad"] = Json::array();
  for (const auto& input : report.inputs_at_first_bad) {
    json["inputs_at_first_bad"].push_back(Json{{"name", input.name},
                                               {"dtype", input.dtype},
                                               {"index", input.index},
                                               {"value", number_to_json(input.value)}});
  }
  json["sentences"] = report.sentences;
  return one_line(json);
}

std::string format_replay(const ReplayReport& report, const ReplayTextStyle& style) {
  const auto bold = [&](const std::string& text) {
    return style.colour ? "\x1b[1m" + text + "\x1b[0m" : text;
  };
  std::vector<Row> rows = {
      {"run", "output", "dtype", "NaN", "Inf", "first bad", "largest", "same bits"}};
  for (const auto& output : report.recorded) rows.push_back(row_of("seen in training", output));
  std::vector<std::string> problems;
  for (const auto& run : report.runs) {
    for (const auto& output : run.outputs) rows.push_back(row_of(run_name(run), output));
    if (!run.problem.empty()) problems.push_back(run_name(run) + " did not run: " + run.problem);
  }
  std::string text = bold(printable(report.op)) + "\n\n" + table(rows) + '\n';
  for (const auto& input : report.inputs_at_first_bad) {
    text += "  " + printable(input.name) + describe_shape(input.index) + " = " +
            number_text(input.value, 9) + " (" + input.dtype + ")\n";
  }
  if (!report.inputs_at_first_bad.empty()) text += '\n';
  text += "conclusion: " + bold(std::string(name_of(report.conclusion))) + '\n';
  for (const auto& sentence : report.sentences) text += wrapped(sentence, style.width, "  ");
  for (const auto& problem : problems) text += wrapped(problem, style.width, "  ");
  return text;
}

}  // namespace nanlocator::inline replay_room
