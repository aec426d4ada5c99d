// `nanlocator report`: the verdict on a bad step, offline or of a running job.
#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <iostream>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "command.hpp"
#include "console.hpp"
#include "files/printable.hpp"
#include "files/text.hpp"
#include "nanlocator/error.hpp"
#include "nanlocator/files/atomic_file.hpp"
#include "nanlocator/map/map_query.hpp"
#include "nanlocator/report/html.hpp"
#include "nanlocator/report/read_run.hpp"
#include "nanlocator/report/sentences.hpp"
#include "nanlocator/report/terminal.hpp"
#include "nanlocator/report/verdict_json.hpp"
#include "report/words.hpp"
#include "watch.hpp"

namespace nanlocator::command {
namespace {

using Json = nlohmann::ordered_json;
namespace fs = std::filesystem;

constexpr int kReportOutputVersion = 1;
constexpr const char* kDefaultDirectory = "nanlocator_run";
constexpr double kUsualInterval = 2;  // seconds between two looks

struct ReportOptions {
  std::string directory;
  std::vector<std::string> html;   // given: FILE, or nothing
  std::vector<std::string> ranks;  // "3", "4-7", "1,2"
  std::vector<std::string> watch;  // given: SECONDS, or nothing
  std::optional<std::int64_t> step;
  bool json = false;
  bool list = false;
  // They may be given without a value, which leaves nothing in the lists above.
  const CLI::Option* html_option = nullptr;
  const CLI::Option* watch_option = nullptr;

  [[nodiscard]] bool is_html() const { return html_option->count() > 0; }
  [[nodiscard]] bool is_watch() const { return watch_option->count() > 0; }
};

// --- the command line ---------------------------------------------------------------------------

template <typename Number>
std::optional<Number> number_from(std::string_view text) {
  Number number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (text.empty() || error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

/// An option whose value may be left out takes DIR for it where DIR follows: `--watch DIR`. Gives
/// back to DIR what is no value of the option.
template <typename IsValue>
std::optional<std::string> value_of(std::vector<std::string> given, std::string& directory,
                                    const IsValue& is_value) {
  std::erase(given, std::string());
  if (given.empty()) return std::nullopt;
  if (directory.empty() && !is_value(given.back())) {
    directory = given.back();
    return std::nullopt;
  }
  return given.back();
}

/// "1,4-7" as ranks; empty where it is no such list.
std::optional<std::set<int>> ranks_from(std::string_view text) {
  constexpr int kMostRanks = 1 << 20;
  std::set<int> ranks;
  for (bool is_last = false; !is_last;) {
    const std::size_t comma = text.find(',');
    is_last = comma == std::string_view::npos;
    const std::string_view item = text.substr(0, comma);
    if (!is_last) text.remove_prefix(comma + 1);
    const std::size_t dash = item.find('-');
    const auto first = number_from<int>(item.substr(0, dash));
    const auto last =
        dash == std::string_view::npos ? first : number_from<int>(item.substr(dash + 1));
    if (!first || !last || *first < 0 || *last < *first || *last >= kMostRanks) return std::nullopt;
    for (int rank = *first; rank <= *last; ++rank) ranks.insert(rank);
  }
  return ranks;
}

std::set<int> ranks_of(std::vector<std::string> texts, std::string& directory) {
  if (directory.empty() && texts.size() > 1 && !ranks_from(texts.back())) {
    directory = texts.back();
    texts.pop_back();
  }
  std::set<int> ranks;
  for (const auto& text : texts) {
    const auto some = ranks_from(text);
    if (!some) throw UsageError("--rank " + text + ": expected global ranks such as 3, 4-7 or 1,2");
    ranks.insert(some->begin(), some->end());
  }
  return ranks;
}

std::chrono::milliseconds interval_from(const std::optional<std::string>& text) {
  const auto seconds = text ? number_from<double>(*text) : kUsualInterval;
  if (!seconds || !(*seconds >= 0.01 && *seconds <= 86400)) {
    throw UsageError("--watch " + text.value_or("") +
                     ": expected seconds between two looks, from 0.01 to 86400");
  }
  return std::chrono::milliseconds(std::lround(*seconds * 1000));
}

// --- what is printed ----------------------------------------------------------------------------

int code_of(const Verdict& verdict) {
  const bool is_quiet =
      verdict.status == VerdictStatus::clean || verdict.status == VerdictStatus::benign;
  return is_quiet ? kClean : kFindings;
}

bool has_findings(const RunReport& report) {
  return !report.ledgers.empty() || report.verdict.iteration > 0;
}

void print_verdict(const RunReport& report) {
  print_notes(report.notes);
  if (!has_findings(report)) {
    std::cout << printable(report.run_dir) << ": no findings. Healthy steps write nothing.\n";
    return;
  }
  const auto width = terminal_width().value_or(kLogWidth);
  std::cout << format_verdict(
      report.verdict,
      {.width = static_cast<int>(width), .colour = has_colour(), .run_dir = report.run_dir});
}

void print_verdict_as_json(RunReport report) {
  std::ranges::move(report.notes, std::back_inserter(report.verdict.notes));
  std::cout << to_json(report.verdict);
}

int write_page(const RunReport& report, const std::optional<std::string>& file) {
  const std::string page = format_html(report);
  print_notes(report.notes);
  if (file == "-") {
    std::cout << page;
  } else {
    const fs::path path = file ? fs::path(*file) : fs::path(report.run_dir) / "report.html";
    try {
      write_file_atomically(path, page);
    } catch (const IoError& error) {
      throw IoError(std::string(error.what()) + "; name a file elsewhere: --html FILE");
    }
    std::cout << printable(path.string()) << '\n';
  }
  return code_of(report.verdict);
}

// --- --rank -------------------------------------------------------------------------------------

std::string number_or_nothing(const std::optional<int>& number) {
  return number ? std::to_string(*number) : "";
}

/// A sighting's place: the parameter of a gradient, else the module.
std::string what_of(const Sighting& sighting) {
  return !sighting.parameter.empty() ? sighting.parameter : sighting.module;
}

std::string first_bad_of(const Sighting& sighting) {
  if (sighting.stats.first_bad < 0) return "";
  return describe_shape(unravel_index(sighting.stats.first_bad, sighting.shape));
}

std::string operation_of(const Sighting& sighting) {
  std::string text = sighting.op;
  if (sighting.crossing) {
    append_item(text, sighting.crossing->group + " #" + std::to_string(sighting.crossing->sequence),
                " ");
  }
  return text;
}

std::vector<std::string> row_of(const Sighting& sighting) {
  return {std::string(name_of(sighting.phase)),
          number_or_nothing(sighting.microbatch),
          what_of(sighting),
          operation_of(sighting),
          sighting.role.text(),
          sighting.dtype + " " + describe_shape(sighting.shape),
          std::to_string(sighting.stats.nan),
          std::to_string(sighting.stats.pos_inf + sighting.stats.neg_inf),
          first_bad_of(sighting)};
}

std::vector<Column> sighting_columns() {
  return {{"phase"},
          {"microbatch", Alignment::right},
          {"where"},
          {"operator"},
          {"role"},
          {"tensor"},
          {"NaN", Alignment::right},
          {"Inf", Alignment::right},
          {"first bad"}};
}

constexpr std::size_t kWhereColumn = 2;

void print_births(const std::vector<Birth>& births) {
  if (births.empty()) return;
  std::cout << "\nborn here, in execution order\n";
  auto columns = sighting_columns();
  columns.push_back({"kind"});
  columns.push_back({"reached"});
  Table table(std::move(columns), kWhereColumn);
  for (const Birth& birth : births) {
    auto row = row_of(birth.sighting);
    row.emplace_back(name_of(birth.kind));
    constexpr std::size_t kMostNames = 2;
    std::string reached;
    for (std::size_t i = 0; i < std::min(kMostNames, birth.reached.size()); ++i) {
      append_item(reached, reached_text(birth.reached[i]));
    }
    if (birth.reached.size() > kMostNames) {
      append_item(reached, std::to_string(birth.reached.size() - kMostNames) + " more");
    }
    row.push_back(reached);
    table.add_row(row);
  }
  table.print(std::cout);
}

void print_sightings(const std::vector<Sighting>& sightings) {
  if (sightings.empty()) return;
  std::cout << "\nseen bad, in order\n";
  Table table(sighting_columns(), kWhereColumn);
  for (const Sighting& sighting : sightings) table.add_row(row_of(sighting));
  table.print(std::cout);
}

void print_ledger(const Ledger& ledger) {
  std::cout << bold(printable(ledger.coordinates.describe())) << ": step " << ledger.iteration
            << ", run " << printable(ledger.run_id) << ", level " << printable(ledger.level)
            << (ledger.is_complete ? "" : "; cut off, what is missing is unknown") << '\n';
  if (ledger.births.empty() && ledger.sightings.empty()) std::cout << "it saw nothing bad\n";
  print_births(ledger.births);
  print_sightings(ledger.sightings);
  if (ledger.notes.empty()) return;
  std::cout << "\nnotes\n";
  for (const auto& note : ledger.notes) std::cout << "  " << printable(note) << '\n';
}

/// The ledgers of these ranks; null for one without.
std::vector<std::pair<int, const Ledger*>> ledgers_of(const RunReport& report,
                                                      const std::set<int>& ranks) {
  std::vector<std::pair<int, const Ledger*>> found;
  for (const int rank : ranks) {
    const auto ledger = std::ranges::find(report.ledgers, rank,
                                          [](const Ledger& each) { return each.coordinates.rank; });
    found.emplace_back(rank, ledger == report.ledgers.end() ? nullptr : &*ledger);
  }
  return found;
}

Json records_of(const Ledger& ledger) {
  Json records = Json::array();
  std::string_view rest;
  const std::string text = to_jsonl(ledger);
  for (rest = text; !rest.empty(); rest.remove_prefix(rest.find('\n') + 1)) {
    records.push_back(Json::parse(rest.substr(0, rest.find('\n'))));
  }
  return records;
}

int report_ranks(const RunReport& report, const std::set<int>& ranks, bool is_json) {
  const auto found = ledgers_of(report, ranks);
  const bool has_bad = std::ranges::any_of(found, [](const auto& entry) {
    return entry.second && !(entry.second->births.empty() && entry.second->sightings.empty());
  });
  if (is_json) {
    Json list = Json::array();
    for (const auto& [rank, ledger] : found) {
      list.push_back({{"rank", rank}, {"records", ledger ? records_of(*ledger) : Json()}});
    }
    print_json({{"version", kReportOutputVersion},
                {"directory", report.run_dir},
                {"iteration", report.verdict.iteration},
                {"ranks", std::move(list)},
                {"notes", report.notes}});
    return has_bad ? kFindings : kClean;
  }
  print_notes(report.notes);
  for (const auto& [rank, ledger] : found) {
    if (rank != found.front().first) std::cout << '\n';
    if (ledger != nullptr) {
      print_ledger(*ledger);
    } else {
      std::cout << bold("rank " + std::to_string(rank)) << ": no ledger of step "
                << report.verdict.iteration << " in " << printable(report.run_dir) << '\n';
    }
  }
  return has_bad ? kFindings : kClean;
}

// --- --list -------------------------------------------------------------------------------------

int list_steps(const std::string& directory, bool is_json) {
  const StepVerdicts steps = read_verdicts(directory);
  const bool has_bad = std::ranges::any_of(
      steps.verdicts, [](const Verdict& verdict) { return code_of(verdict) == kFindings; });
  if (is_json) {
    Json list = Json::array();
    for (const Verdict& verdict : steps.verdicts) {
      list.push_back({{"iteration", verdict.iteration},
                      {"run", verdict.run_id},
                      {"status", name_of(verdict.status)},
                      {"origins", verdict.origins.size()},
                      {"headline", outcome_of(verdict)}});
    }
    print_json({{"version", kReportOutputVersion},
                {"directory", directory},
                {"steps", std::move(list)},
                {"notes", steps.notes}});
    return has_bad ? kFindings : kClean;
  }
  print_notes(steps.notes);
  if (steps.verdicts.empty()) {
    std::cout << printable(directory) << ": no findings. Healthy steps write nothing.\n";
    return kClean;
  }
  Table table({{"step", Alignment::right}, {"status"}, {"headline"}}, 2);
  for (const Verdict& verdict : steps.verdicts) {
    table.add_row({std::to_string(verdict.iteration), std::string(name_of(verdict.status)),
                   outcome_of(verdict)});
  }
  table.print(std::cout);
  return has_bad ? kFindings : kClean;
}

// --- the choice ---------------------------------------------------------------------------------

void check_together(const ReportOptions& options) {
  std::vector<std::string> given;
  if (options.is_watch()) given.emplace_back("--watch");
  if (options.list) given.emplace_back("--list");
  if (options.is_html()) given.emplace_back("--html");
  if (!options.ranks.empty()) given.emplace_back("--rank");
  if (options.json && (options.is_watch() || options.is_html())) given.emplace_back("--json");
  if (options.step && (options.is_watch() || options.list)) given.emplace_back("--step");
  if (given.size() > 1) throw UsageError(given[0] + " and " + given[1] + " do not go together");
}

int report(const ReportOptions& options) {
  check_together(options);
  std::string directory = options.directory;
  const auto ranks = ranks_of(options.ranks, directory);
  const auto seconds = value_of(options.watch, directory, [](const std::string& text) {
    return number_from<double>(text).has_value();
  });
  const auto file = value_of(options.html, directory, [](const std::string& text) {
    return text == "-" || !fs::is_directory(text);
  });
  if (directory.empty()) directory = kDefaultDirectory;

  if (options.is_watch()) return watch(directory, interval_from(seconds));
  if (options.list) return list_steps(directory, options.json);
  const auto detail = options.is_html() ? RunDetail::everything : RunDetail::verdict;
  RunReport read = read_run(directory, options.step, detail);
  if (options.is_html()) return write_page(read, file);
  if (!ranks.empty()) return report_ranks(read, ranks, options.json);
  const int code = code_of(read.verdict);
  if (options.json) {
    print_verdict_as_json(std::move(read));
  } else {
    print_verdict(read);
  }
  return code;
}

}  // namespace

void add_report_command(CLI::App& app, Action& action) {
  const auto [command, options] = add_action<ReportOptions>(
      app, "report", "Report where the NaN of a run was born, from the ledgers of its ranks",
      action, report);
  command->add_option(
      "DIR", options->directory,
      "A run's folder, one of its attempts (a0), or one with ledgers copied together; default: " +
          std::string(kDefaultDirectory));
  command->add_option("--step", options->step, "This step instead of the latest with findings");
  command->add_flag("--list", options->list, "List the steps with findings");
  command->add_option("--rank", options->ranks, "What these global ranks saw: 3, 4-7, 1,2")
      ->type_name("N")
      ->expected(1, -1);
  const auto* const html = command
                               ->add_option("--html", options->html,
                                            "Write the page: report.html beside the verdict, "
                                            "FILE, or - for stdout")
                               ->type_name("[FILE]")
                               ->expected(0, 1);
  const auto* const watched =
      command
          ->add_option(
              "--watch", options->watch,
              "Follow a running job until it stops; reads its files every SECONDS (default 2)")
          ->type_name("[SECONDS]")
          ->expected(0, 1);
  options->html_option = html;
  options->watch_option = watched;
  command->footer(
      "The verdict is merged from the ledgers that are here, whatever is missing or cut off: copy "
      "them\ntogether from the machines' disks into one folder. Exit code 1: findings.\n"
      "Examples:\n"
      "  nanlocator report nanlocator_run\n"
      "  nanlocator report nanlocator_run --html\n"
      "  nanlocator report nanlocator_run/a0 --step 1284 --rank 5 6\n"
      "  nanlocator report collected_ledgers --json\n"
      "  nanlocator report --watch nanlocator_run");
}

}  // namespace nanlocator::command
