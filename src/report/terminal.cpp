#include "nanlocator/report/terminal.hpp"

#include <algorithm>
#include <string_view>
#include <vector>

#include "files/printable.hpp"
#include "nanlocator/map/rank_coordinates.hpp"
#include "report/candidates_text.hpp"

namespace nanlocator {
namespace {

// What does not fit is in verdict.json.
constexpr std::ptrdiff_t kMostLines = 25;
constexpr std::size_t kMostRankColumns = 100;
constexpr std::size_t kMostCleanNames = 4;
constexpr int kLabelColumns = 11;
constexpr int kNarrowest = 40;

constexpr std::string_view kReset = "\033[0m";
constexpr std::string_view kRed = "\033[1;31m";
constexpr std::string_view kYellow = "\033[1;33m";
constexpr std::string_view kGreen = "\033[1;32m";
constexpr std::string_view kCyan = "\033[36m";

/// Lines of words. Everything that is handed in is made printable here, so nothing gets past it.
class Page {
 public:
  explicit Page(const TerminalStyle& style)
      : width_(std::max(style.width, kNarrowest)), has_colour_(style.colour) {}

  void headline(std::string_view text, std::string_view colour) { add({}, text, 0, 4, colour); }
  void row(std::string_view label, std::string_view text, int indent) {
    add(label, text, indent, indent + kLabelColumns, kCyan);
  }
  [[nodiscard]] std::string text() && { return std::move(text_); }

 private:
  /// `label` is padded to its column; further lines begin at column `hanging`. `colour` is the
  /// label's, or where there is none the text's. Words are never cut: names are there to be copied.
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

/// "NaN", "Inf", or "NaN and Inf": what the tensor held.
std::string what_of(const Origin& origin) {
  if (!origin.tensor)
    return origin.phase == Phase::grad_norm ? "a bad gradient norm" : "NaN or Inf";
  const bool has_inf = origin.tensor->pos_inf + origin.tensor->neg_inf > 0;
  if (origin.tensor->nan > 0) return has_inf ? "NaN and Inf" : "NaN";
  return "Inf";
}

/// "0-3, 9", cut where it is long.
std::string short_list(const std::vector<int>& ranks) {
  std::string text = describe_ranks(ranks);
  if (text.size() <= kMostRankColumns) return text;
  return text.substr(0, text.rfind(',', kMostRankColumns)) + ", ...";
}

std::string who_of(const Origin& origin) {
  if (origin.coordinates) return origin.coordinates->describe();
  if (origin.candidates.empty()) return "an unknown rank";
  if (origin.candidates.size() == 1) return "rank " + std::to_string(origin.candidates.front());
  std::string text = candidates_text(origin, short_list(origin.candidates));
  if (origin.data_parallel_replica) {
    text += " (dp" + std::to_string(*origin.data_parallel_replica) + ")";
  }
  return text;
}

std::string sentence_of(const Origin& origin) {
  const std::string what = what_of(origin);
  const std::string who = who_of(origin);
  switch (origin.cause) {  // what was there before the step was not born in the phase that met it
    case Cause::bad_weight:
      return what + " in the parameters of " + who + " before forward";
    case Cause::bad_buffer:
      return what + " in a buffer of " + who + " before forward";
    case Cause::bad_input:
      return what + " in the data of " + who;
    case Cause::pipeline_transfer:
      return what + " in what " + who + " received in " + std::string(name_of(origin.phase));
    case Cause::memory_corruption:
      return what + " in memory of " + who + " that no operator wrote";
    default:
      break;
  }
  switch (origin.phase) {
    case Phase::params_before:
      return what + " in the parameters of " + who + " before forward";
    case Phase::forward:
      return what + " born in forward on " + who;
    case Phase::loss:
      return what + " born in the loss on " + who;
    case Phase::backward:
      return what + " born in backward on " + who;
    case Phase::grad_local:
      return what + " in the gradients of " + who + " before the data-parallel reduction";
    case Phase::grad_reduced:
      return what + " in the gradients of " + who + " after the data-parallel reduction";
    case Phase::grad_norm:
      return origin.tensor
                 ? what + " in the gradients of " + who + " where the optimizer reads them"
                 : what + "; its largest gradient is on " + who;
    case Phase::params_after:
      return what + " in the parameters of " + who + " after the optimizer step";
  }
  return what + " on " + who;
}

std::string shape_text(const std::vector<std::int64_t>& sizes) {
  std::string text = "[";
  for (const std::int64_t size : sizes) {
    text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  }
  return text + "]";
}

std::string tensor_text(const OriginTensor& tensor) {
  std::string text;
  if (tensor.first_bad) {
    text += "first bad element " + shape_text(tensor.first_bad_index) + " of " +
            shape_text(tensor.shape) + "; ";
  }
  return text + std::to_string(tensor.nan) + " NaN, " +
         std::to_string(tensor.pos_inf + tensor.neg_inf) + " Inf";
}

void add_origin(Page& page, const Origin& origin, std::size_t most_evidence, int indent,
                const std::string& run_dir) {
  std::string operation = origin.op;
  if (!origin.module.empty()) {
    operation += (operation.empty() ? "" : "   ") + ("module " + origin.module);
  }
  if (origin.microbatch) {
    operation +=
        (operation.empty() ? "" : "   ") + ("microbatch " + std::to_string(*origin.microbatch));
  }
  if (!operation.empty()) page.row(origin.op.empty() ? "place" : "operator", operation, indent);
  // A gradient is told with its parameter; what an operator made is a tensor of its own.
  const bool is_computed = !operation.empty() && origin.tensor;
  if (is_computed)
    page.row("tensor", origin.tensor->role + "   " + tensor_text(*origin.tensor), indent);
  std::string parameter = origin.parameter;
  if (origin.tensor && !is_computed) {
    parameter += (parameter.empty() ? "" : "   ") + tensor_text(*origin.tensor);
  }
  if (!parameter.empty()) page.row("parameter", parameter, indent);
  page.row("cause",
           (origin.cause == Cause::unknown ? "unknown at this level"
                                           : std::string(name_of(origin.cause))) +
               "; confidence in the place: " + std::string(name_of(origin.confidence)),
           indent);
  for (std::size_t i = 0; i < std::min(most_evidence, origin.evidence.size()); ++i) {
    page.row(i == 0 ? "evidence" : " ", origin.evidence[i], indent);
  }
  if (!origin.action.empty()) page.row("action", origin.action, indent);
  if (!origin.bundle.empty()) {
    const std::string folder = run_dir.empty() ? "" : run_dir + "/";
    page.row("replay", "nanlocator replay " + shell_word(folder + origin.bundle), indent);
  }
}

std::string spread_text(const Verdict& verdict) {
  std::string text = count_text(verdict.spread.ranks.size(), "rank") + " had it";
  if (!verdict.spread.parameters.empty()) {
    text = count_text(verdict.spread.parameters.size(), "parameter") + " on " + text;
  }
  if (verdict.spread.first_seen) {
    text += ", first in " + std::string(name_of(*verdict.spread.first_seen));
  }
  for (std::size_t i = 0; i < std::min(kMostCleanNames, verdict.clean.size()); ++i) {
    text += (i == 0 ? "; clean: " : ", ") + verdict.clean[i];
  }
  if (verdict.clean.size() > kMostCleanNames) text += ", ...";
  return text;
}

/// How much of a verdict is told; where the lines do not suffice, less.
struct Amounts {
  std::size_t origins;
  std::size_t evidence;  // of each origin
  std::size_t notes;
};

std::vector<Amounts> amounts_to_try(bool has_one_origin) {
  if (has_one_origin) return {{1, 6, 3}, {1, 5, 3}, {1, 4, 2}, {1, 3, 2}, {1, 2, 1}, {1, 1, 1}};
  return {{4, 2, 3}, {4, 1, 3}, {4, 1, 1}, {3, 1, 1}, {2, 1, 1}, {2, 0, 1}, {1, 1, 1}};
}

std::string headline_of(const Verdict& verdict) {
  const std::string step = "step " + std::to_string(verdict.iteration) + ": ";
  if (verdict.origins.size() == 1) return step + sentence_of(verdict.origins.front());
  if (!verdict.origins.empty()) return step + count_text(verdict.origins.size(), "origin");
  return step + (verdict.status == VerdictStatus::clean
                     ? "no NaN or Inf in what was seen"
                     : "no origin found; the evidence is incomplete");
}

std::string format(const Verdict& verdict, const TerminalStyle& style, const Amounts& most) {
  Page page(style);
  const bool is_quiet =
      verdict.status == VerdictStatus::clean || verdict.status == VerdictStatus::benign;
  page.headline(headline_of(verdict), is_quiet ? kGreen : verdict.origins.empty() ? kYellow : kRed);
  if (verdict.origins.size() == 1) {
    add_origin(page, verdict.origins.front(), most.evidence, 2, style.run_dir);
  } else {
    const std::size_t shown = std::min(most.origins, verdict.origins.size());
    for (std::size_t i = 0; i < shown; ++i) {
      page.headline(std::to_string(i + 1) + ". " + sentence_of(verdict.origins[i]), kRed);
      add_origin(page, verdict.origins[i], most.evidence, 3, style.run_dir);
    }
    if (shown < verdict.origins.size()) {
      page.row("more",
               count_text(verdict.origins.size() - shown, "further origin") + " in verdict.json",
               2);
    }
  }
  if (!verdict.spread.ranks.empty()) page.row("spread", spread_text(verdict), 2);
  if (!verdict.silent_ranks.empty()) {
    page.row("silent",
             "no answer from " + count_text(verdict.silent_ranks.size(), "rank") + ": " +
                 short_list(verdict.silent_ranks) + "; what they saw is not in this verdict",
             2);
  }
  for (std::size_t i = 0; i < std::min(most.notes, verdict.notes.size()); ++i) {
    page.row("note", verdict.notes[i], 2);
  }
  if (verdict.notes.size() > most.notes) {
    page.row("note",
             count_text(verdict.notes.size() - most.notes, "further note") + " in verdict.json", 2);
  }
  return std::move(page).text();
}

}  // namespace

std::string format_verdict(const Verdict& verdict, const TerminalStyle& style) {
  std::string text;
  for (const Amounts& most : amounts_to_try(verdict.origins.size() == 1)) {
    text = format(verdict, style, most);
    if (std::ranges::count(text, '\n') <= kMostLines) break;
  }
  return text;
}

}  // namespace nanlocator
