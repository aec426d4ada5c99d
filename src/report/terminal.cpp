#include "nanlocator/report/terminal.hpp"
#include "files/text.hpp"

#include <algorithm>
#include <limits>
#include <string_view>
#include <utility>
#include <vector>

#include "files/printable.hpp"
#include "nanlocator/map/rank_coordinates.hpp"
#include "nanlocator/report/narrative.hpp"
#include "nanlocator/report/sentences.hpp"
#include "report/words.hpp"

namespace nanlocator::inline report_room {
namespace {

// verdict.json has what does not fit.
constexpr std::ptrdiff_t kMostLines = 25;
constexpr int kLabelColumns = 13;
constexpr int kNarrowest = 40;

constexpr std::string_view kReset = "\033[0m";
constexpr std::string_view kRed = "\033[1;31m";
constexpr std::string_view kYellow = "\033[1;33m";
constexpr std::string_view kGreen = "\033[1;32m";
constexpr std::string_view kCyan = "\033[36m";

/// Lines of words. All text is made printable here.
class Page {
 public:
  explicit Page(const TerminalStyle& style)
      : width_(std::max(style.width, kNarrowest)), has_colour_(style.colour) {}

  void headline(std::string_view text, std::string_view colour) { add({}, text, 0, 4, colour); }
  /// Not wrapped, so that a log shows it whole.
  void first_line(std::string_view text, std::string_view colour) {
    text_ += painted(printable(text), colour) + "\n";
  }
  void row(std::string_view label, std::string_view text, int indent) {
    add(label, text, indent, indent + kLabelColumns, kCyan);
  }
  /// Not wrapped.
  void verbatim(std::string_view text, int indent) {
    text_ += std::string(static_cast<std::size_t>(indent), ' ') + printable(text) + "\n";
  }
  void text_line(std::string_view text, int indent) { add({}, text, indent, indent + 2, {}); }
  /// A line for copying: not wrapped, whatever its length.
  void line(std::string_view label, std::string_view text, int indent) {
    const int width = std::exchange(width_, std::numeric_limits<int>::max() / 2);
    row(label, text, indent);
    width_ = width;
  }
  [[nodiscard]] std::string text() && { return std::move(text_); }

 private:
  /// `label` is padded to its column; further lines begin at column `hanging`. `colour` applies to
  /// the label, or to the text if there is no label. Words are never cut, so that names can be
  /// copied.
  void add(std::string_view label, std::string_view raw, int indent, int hanging,
           std::string_view colour) {
    std::string line(static_cast<std::size_t>(indent), ' ');
    int column = indent;
    if (!label.empty()) {
      const std::string padding(
          static_cast<std::size_t>(std::max(1, kLabelColumns - columns_of(label))), ' ');
      line += painted(label, colour) + padding;
      column = hanging;
    }
    const std::string safe = printable(raw);
    const std::string_view text_colour = label.empty() ? colour : std::string_view{};
    bool is_first = true;
    std::string words;
    for (std::string_view rest = safe; !rest.empty();) {
      const std::size_t end = std::min(rest.find(' '), rest.size());
      const std::string_view word = rest.substr(0, end);
      rest.remove_prefix(std::min(end + 1, rest.size()));
      const int columns = columns_of(word);
      if (!is_first && column + 1 + columns > width_) {
        text_ += line + painted(words, text_colour) + "\n";
        line.assign(static_cast<std::size_t>(hanging), ' ');
        column = hanging;
        words.clear();
        is_first = true;
      }
      if (!is_first) words += ' ';
      column += columns + (is_first ? 0 : 1);
      words += word;
      is_first = false;
    }
    text_ += line + painted(words, text_colour) + "\n";
  }

  [[nodiscard]] std::string painted(std::string_view text, std::string_view colour) const {
    if (!has_colour_ || colour.empty() || text.empty() || text == " ") return std::string(text);
    return std::string(colour).append(text).append(kReset);
  }

  int width_;
  bool has_colour_;
  std::string text_;
};

/// Rows for copying.
bool is_command(std::string_view label) {
  constexpr std::array<std::string_view, 6> kCommands = {"plan",    "kill",  "aside",
                                                         "exclude", "drain", "replay"};
  return std::ranges::find(kCommands, label) != kCommands.end();
}

std::string tensor_text(const OriginTensor& tensor) {
  std::string text;
  if (tensor.shape.empty() && tensor.first_bad) {
    text = "scalar; ";
  } else if (tensor.first_bad) {
    text = "first bad element " + describe_shape(tensor.first_bad_index) + " of " +
           describe_shape(tensor.shape) + "; ";
  }
  text += bad_text({tensor.nan, tensor.pos_inf, tensor.neg_inf, 0});
  const std::string extent = extent_text(tensor);
  return extent.empty() ? text : text + ": " + extent;
}

/// The plain title, with the name in verdict.json if that says something else.
std::string cause_text(const Origin& origin) {
  std::string text = title_of(origin);
  if (origin.cause != Cause::unknown) text += " (" + std::string(name_of(origin.cause)) + ")";
  return text;
}

std::string_view colour_of(std::string_view severity) {
  if (severity == "INFO") return kGreen;
  return severity == "WARNING" ? kYellow : kRed;
}

/// How much of a verdict is shown; reduced until it fits the lines.
struct Amounts {
  std::size_t origins;
  std::size_t evidence;  // per origin
  std::size_t notes;
  std::size_t steps;      // per origin
  std::size_t named = 0;  // further origins, shown with headline and cause only
};

void add_steps(Page& page, const std::vector<Step>& steps, std::size_t most, int indent) {
  for (std::size_t i = 0; i < std::min(most, steps.size()); ++i) {
    const std::string number = steps.size() == 1 ? "" : std::to_string(i + 1) + ". ";
    const std::string text = number + steps[i].text + (steps[i].command.empty() ? "" : ":");
    page.row(i == 0 ? "action" : " ", text, indent);
    if (!steps[i].command.empty()) page.line(" ", steps[i].command, indent);
  }
}

void add_origin(Page& page, const Verdict& verdict, const Origin& origin, const Amounts& most,
                int indent, const std::string& run_dir) {
  page.row("cause", cause_text(origin), indent);
  if (const std::string code = code_of(origin); !code.empty()) page.row("code", code, indent);
  std::string operation = origin.op;
  if (!origin.forward_op.empty() && origin.forward_op != origin.op) {
    const bool is_operator = origin.forward_op.find("::") != std::string::npos;
    operation +=
        (is_operator ? " (derivative of " : " (in the backward of ") + origin.forward_op + ")";
  }
  if (!origin.module.empty()) {
    operation += (operation.empty() ? "" : "   ") + ("module " + origin.module);
  }
  if (origin.microbatch) {
    operation +=
        (operation.empty() ? "" : "   ") + ("microbatch " + std::to_string(*origin.microbatch));
  }
  if (!operation.empty()) page.row(origin.op.empty() ? "place" : "operator", operation, indent);
  // A gradient is listed with its parameter; an operator's output is a separate tensor.
  const bool is_computed = !operation.empty() && origin.tensor;
  if (is_computed)
    page.row("tensor", origin.tensor->role.text() + "   " + tensor_text(*origin.tensor), indent);
  std::string parameter = origin.parameter;
  if (origin.tensor && !is_computed) {
    parameter += (parameter.empty() ? "" : "   ") + tensor_text(*origin.tensor);
  }
  // An operator's bad output is not a fault of the parameter whose gradient it reached first.
  const bool is_consequence =
      is_computed && !parameter.empty() && origin.direction == Direction::backward;
  if (is_consequence) parameter += " (the first gradient that it reached)";
  if (!parameter.empty()) page.row("parameter", parameter, indent);
  page.row("owner", owner_of(origin), indent);
  if (const std::string link = link_of(verdict, origin); !link.empty()) {
    page.row("link", link, indent);
  }
  add_steps(page, steps_of(verdict, origin), most.steps, indent);
  if (!origin.bundle.empty()) page.line("replay", replay_command(run_dir, origin.bundle), indent);
  page.row("certainty", certainty_of(origin), indent);
  const std::vector<std::string> evidence = evidence_of(verdict, origin);
  for (std::size_t i = 0; i < std::min(most.evidence, evidence.size()); ++i) {
    page.row(i == 0 ? "evidence" : " ", evidence[i], indent);
  }
}

std::vector<Amounts> amounts_to_try(bool has_one_origin) {
  constexpr std::size_t kAll = 9;
  if (has_one_origin) {
    return {{1, 8, 3, kAll}, {1, 7, 3, kAll}, {1, 6, 3, kAll}, {1, 5, 3, kAll},
            {1, 4, 2, kAll}, {1, 3, 2, kAll}, {1, 2, 1, kAll}, {1, 1, 1, kAll}};
  }
  return {{4, 2, 3, kAll}, {4, 1, 3, kAll}, {4, 1, 1, 1},    {3, 1, 1, 1, 1}, {2, 1, 1, 1, 2},
          {2, 0, 1, 1, 2}, {1, 1, 1, 1, 3}, {1, 1, 1, 1, 1}, {1, 1, 1, 1}};
}

std::string format(const Verdict& verdict, const TerminalStyle& style, const Amounts& most) {
  Page page(style);
  const bool is_quiet =
      verdict.status == VerdictStatus::clean || verdict.status == VerdictStatus::benign;
  page.headline(headline_of(verdict), is_quiet ? kGreen : verdict.origins.empty() ? kYellow : kRed);
  if (const std::string job = job_of(verdict); !job.empty()) page.row("job", job, 2);
  if (const std::string restart = restart_of(verdict); !restart.empty()) {
    page.row("restart", restart, 2);
  }
  if (const std::string common = common_cause_of(verdict); !common.empty()) {
    page.row("common", common, 2);
  }
  if (verdict.origins.size() == 1) {
    add_origin(page, verdict, verdict.origins.front(), most, 2, style.run_dir);
  } else {
    const std::size_t shown = std::min(most.origins, verdict.origins.size());
    for (std::size_t i = 0; i < shown; ++i) {
      page.headline(std::to_string(i + 1) + ". " + headline_of(verdict, verdict.origins[i]), kRed);
      add_origin(page, verdict, verdict.origins[i], most, 3, style.run_dir);
    }
    const std::size_t named = std::min(shown + most.named, verdict.origins.size());
    for (std::size_t i = shown; i < named; ++i) {
      page.headline(std::to_string(i + 1) + ". " + headline_of(verdict, verdict.origins[i]), kRed);
      page.row("cause", cause_text(verdict.origins[i]), 3);
      if (!verdict.origins[i].parameter.empty()) {
        page.row("parameter", verdict.origins[i].parameter, 3);
      }
    }
    if (named < verdict.origins.size()) {
      page.row("more",
               count_text(verdict.origins.size() - named, "further origin") + " in verdict.json",
               2);
    }
  }
  if (const std::string ranks = mentioned_ranks_of(verdict, most.evidence); !ranks.empty()) {
    page.row("ranks", ranks, 2);
  }
  if (const std::string spread = spread_of(verdict); !spread.empty()) page.row("spread", spread, 2);
  if (!verdict.silent_ranks.empty()) {
    page.row("silent",
             "no answer from " + count_text(verdict.silent_ranks.size(), "rank") + ": " +
                 short_list(verdict.silent_ranks) + "; what they saw is not in this verdict",
             2);
  }
  const std::vector<std::string> notes = notes_of(verdict);
  for (std::size_t i = 0; i < std::min(most.notes, notes.size()); ++i) {
    page.row("note", notes[i], 2);
  }
  if (notes.size() > most.notes) {
    page.row("note", count_text(notes.size() - most.notes, "further note") + " in verdict.json", 2);
  }
  return std::move(page).text();
}

}  // namespace

std::string format_verdict(const Verdict& verdict, const TerminalStyle& style) {
  const Narrative told = narrative_of(verdict, style.run_dir);
  Page page(style);
  page.first_line(
      "nanlocator " + told.severity + "[" + told.code + "] " + told.event + ": " + told.action,
      colour_of(told.severity));
  if (told.severity == "INFO") {
    for (const auto& [label, text] : told.rows) page.row(label + ":", text, 2);
    return std::move(page).text();
  }
  page.verbatim("restart " + told.restart + " | hosts " + told.hosts + " | load " + told.load +
                    " | page " + told.page + " | ticket " + told.ticket,
                2);
  for (const auto& [label, text] : told.rows) {
    const std::string shown = label.empty() ? " " : label + ":";
    is_command(label) ? page.line(shown, text, 2) : page.row(shown, text, 2);
  }
  if (told.place.empty() && told.details.empty()) return std::move(page).text();
  page.text_line("--- " + (told.audience.empty() ? "evidence" : told.audience), 2);
  if (!told.place.empty()) page.text_line(told.place, 2);
  if (!told.source.empty()) page.verbatim(told.source, 2);
  if (!told.marker.empty()) page.verbatim(told.marker, 2);
  for (const auto& [label, text] : told.details) {
    const std::string shown = label.empty() ? " " : label + ":";
    is_command(label) ? page.line(shown, text, 2) : page.row(shown, text, 2);
  }
  return std::move(page).text();
}

std::string format_evidence(const Verdict& verdict, const TerminalStyle& style) {
  std::string text;
  for (const Amounts& most : amounts_to_try(verdict.origins.size() == 1)) {
    text = format(verdict, style, most);
    if (std::ranges::count(text, '\n') <= kMostLines) break;
  }
  return text;
}

}  // namespace nanlocator::inline report_room
