// `nanlocator report`: the verdict on a bad step, offline or for a running job.
#include <algorithm>
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
// --- the command line ---------------------------------------------------------------------------

/// "1,4-7" as ranks; empty if it is not such a list.
std::optional<std::set<int>> ranks_from(std::string_view text) {
  constexpr int kMostRanks = 1 << 20;
  std::set<int> ranks;
  for (bool is_last = false; !is_last;) {
    const std::size_t comma = text.find(',');
    is_last = comma == std::string_view::npos;
    const std::string_view item = text.substr(0, comma);
    if (!is_last) text.remove_prefix(comma + 1);
    const std::size_t dash = item.find('-');
    const auto first = integer_from(item.substr(0, dash));
    const auto last = dash == std::string_view::npos ? first : integer_from(item.substr(dash + 1));
    if (!first || !last || *first < 0 || *last < *first || *last >= kMostRanks) return std::nullopt;
    for (auto rank = *first; rank <= *last; ++rank) ranks.insert(static_cast<int>(rank));
  }
  return ranks;
}

std::set<int> ranks_of(const Arguments& given) {
  std::set<int> ranks;
  for (const auto& text : given.texts("--rank")) ranks.merge(*ranks_from(text));
  return ranks;
}

/// An optional value follows "=": the word after `--html` is the folder.
std::string directory_of(const Arguments& given) {
  std::string directory = given.text("DIR");
  if (given.has("--html") && !fs::is_directory(directory)) {
    throw UsageError("there is no folder " + directory +
                     "; to name the page's file, write --html=" + directory);
  }
  return directory;
}

// --- output -------------------------------------------------------------------------------------

int code_of(const Verdict& verdict) {
  const bool is_quiet =
      verdict.status == VerdictStatus::clean || verdict.status == VerdictStatus::benign;
  return is_quiet ? kClean : kFindings;
}

bool has_findings(const RunReport& report) {
  return !report.ledgers.empty() || report.verdict.iteration > 0;
}

void print_verdict(const RunReport& report, bool has_evidence) {
  print_notes(report.notes);
  if (!has_findings(report)) {
    std::cout << printable(report.run_dir) << ": no findings. Healthy steps write nothing.\n";
    return;
  }
  const auto width = terminal_width().value_or(kLogWidth);
  const TerminalStyle style{
      .width = static_cast<int>(width), .colour = has_colour(), .run_dir = report.run_dir};
  std::cout << format_verdict(report.verdict, style);
  if (has_evidence) std::cout << '\n' << format_evidence(report.verdict, style);
}

void print_verdict_as_json(RunReport report) {
  std::ranges::move(report.notes, std::back_inserter(report.verdict.notes));
  std::cout << to_json(report.verdict);
}

/// `file`: "-" for stdout, "" for report.html beside the verdict.
int write_page(const RunReport& report, const std::string& file) {
  const std::string page = format_html(report);
  print_notes(report.notes);
  if (file == "-") {
    std::cout << page;
  } else {
    const fs::path path = file.empty() ? fs::path(report.run_dir) / "report.html" : fs::path(file);
    try {
      write_file_atomically(path, page);
    } catch (const IoError& error) {
      throw IoError(std::string(error.what()) + "; name a file elsewhere: --html=FILE");
    }
    std::cout << printable(path.string()) << '\n';
  }
  return code_of(report.verdict);
}

// --- --rank -------------------------------------------------------------------------------------

std::string number_or_empty(const std::optional<int>& number) {
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
          number_or_empty(sighting.microbatch),
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

/// The ledgers of these ranks; null for a rank without one.
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

/// A job that was started again and is well has written nothing that a report reads.
void note_later_attempt(const std::string& directory, RunReport& report) {
  const fs::path latest = latest_attempt(directory);
  const fs::path attempt = report.run_dir;
  if (!has_findings(report) || latest == attempt) return;
  if (latest.parent_path() == attempt.parent_path()) {
    report.notes.push_back(latest.filename().string() + " was started after this attempt, " +
                           attempt.filename().string() + ", and has no finding so far");
  }
}

// --- selection ---------------------------------------------------------------------------------

void check_together(const Arguments& given) {
  std::vector<std::string> chosen;
  const auto choose = [&](const char* option) {
    if (given.has(option)) chosen.emplace_back(option);
  };
  for (const char* each : {"--watch", "--list", "--html", "--rank", "--verbose"}) choose(each);
  if (given.has("--watch") || given.has("--html")) choose("--json");
  if (given.has("--watch") || given.has("--list")) choose("--step");
  if (chosen.size() > 1) throw UsageError(chosen[0] + " and " + chosen[1] + " do not go together");
}

int report(const Arguments& given) {
  check_together(given);
  const std::string directory = directory_of(given);
  const bool is_json = given.has("--json");
  if (given.has("--watch")) {
    return watch(directory,
                 std::chrono::milliseconds(std::lround(*given.number("--watch") * 1000)));
  }
  if (given.has("--list")) return list_steps(directory, is_json);
  const bool is_html = given.has("--html");
  RunReport read = read_run(directory, given.integer("--step"),
                            is_html ? RunDetail::everything : RunDetail::verdict);
  note_later_attempt(directory, read);
  if (is_html) return write_page(read, given.text("--html"));
  if (given.has("--rank")) return report_ranks(read, ranks_of(given), is_json);
  const int code = code_of(read.verdict);
  if (is_json) {
    print_verdict_as_json(std::move(read));
  } else {
    print_verdict(read, given.has("--verbose"));
  }
  return code;
}

constexpr Option kReportOptions[] = {
    {.name = "DIR",
     .default_value = "nanlocator_run",
     .help = "A run's folder, one of its attempts (a0), or one with ledgers copied together"},
    kJsonOption,
    {.name = "--verbose", .help = "Also list the evidence of every origin"},
    {.name = "--step",
     .value = "N",
     .type = Type::integer,
     .high = kLargestStep,
     .help = "This step instead of the latest with findings"},
    {.name = "--list", .help = "List the steps with findings"},
    {.name = "--rank",
     .value = "N",
     .most = kMany,
     .accepts = [](std::string_view text) { return ranks_from(text).has_value(); },
     .expected = "global ranks such as 3, 4-7 or 1,2",
     .help = "Show what these global ranks saw: 3, 4-7, 1,2"},
    {.name = "--html",
     .value = "FILE",
     .has_optional_value = true,
     .help = "Write the page: report.html beside the verdict, FILE, or - for stdout"},
    {.name = "--watch",
     .value = "SECONDS",
     .type = Type::number,
     .default_value = "2",
     .has_optional_value = true,
     .low = 0.01,
     .high = 86400,
     .expected = "seconds between two readings, from 0.01 to 86400",
     .help = "Follow a running job until it stops; reads its files every SECONDS"},
};

}  // namespace

Command report_command() {
  return {.name = "report",
          .summary = "Report where the NaN of a run was born, from the ledgers of its ranks",
          .options = kReportOptions,
          .details =
              "Merges all ledgers found and says which are missing or cut off: copy them "
              "together from the machines' disks into one folder.",
          .exit_codes = "0 clean, 1 findings, 2 wrong use or unreadable input",
          .examples =
              "nanlocator report nanlocator_run\n"
              "nanlocator report nanlocator_run --verbose\n"
              "nanlocator report nanlocator_run --html\n"
              "nanlocator report nanlocator_run --html=page.html\n"
              "nanlocator report nanlocator_run/a0 --step 1284 --rank 5 6\n"
              "nanlocator report collected_ledgers --json\n"
              "nanlocator report --watch nanlocator_run",
          .run = report};
}

}  // namespace nanlocator::command
