#include "report/silent_orders.hpp"

#include <algorithm>

#include "files/printable.hpp"
#include "files/text.hpp"
#include "report/places.hpp"
#include "report/words.hpp"

namespace nanlocator::inline report_room {
namespace {

/// "rank 2 on a18", "3 ranks: 5-7, on a18".
std::string silent_text(const Verdict& verdict, const std::vector<int>& ranks) {
  if (ranks.size() == 1) return ranks_place_of(verdict, ranks);
  const auto hosts = hosts_of(verdict, ranks);
  return count_text(ranks.size(), "rank") + ": " + short_list(ranks) +
         (hosts.empty() ? "" : ", on " + joined(hosts));
}

/// The file into which a rank writes its stderr; "" if it is not known.
std::string log_of(const Verdict& verdict, int rank) {
  if (!verdict.launch) return "";
  const auto own = std::ranges::find(verdict.launch->logs, rank, &RankLog::rank);
  return own != verdict.launch->logs.end() ? own->log : verdict.launch->log;
}

}  // namespace

std::vector<int> unexplained_ranks(const Verdict& verdict) {
  if (course_of(verdict) != Course::stops || !is_open_to_endings(verdict.decision)) return {};
  std::vector<int> ranks = verdict.silent_ranks;
  if (!verdict.launch) return ranks;
  for (const RankEnding& each : verdict.launch->endings) {
    if (each.kind >= EndingKind::killed) std::erase(ranks, each.rank);
  }
  return ranks;
}

bool has_unknown_log(const Verdict& verdict) {
  return !unexplained_ranks(verdict).empty() && (!verdict.launch || verdict.launch->log.empty());
}

const RankEnding* deciding_ending(const Verdict& verdict) {
  if (!verdict.decision.ended_rank || !verdict.launch) return nullptr;
  const auto& endings = verdict.launch->endings;
  const auto found = std::ranges::find(endings, *verdict.decision.ended_rank, &RankEnding::rank);
  return found == endings.end() ? nullptr : &*found;
}

std::string silent_in_headline(const Verdict& verdict, const std::vector<int>& ranks) {
  const auto hosts = hosts_of(verdict, ranks);
  return (ranks.size() == 1 ? "RANK " + std::to_string(ranks.front())
                            : std::to_string(ranks.size()) + " RANKS") +
         (hosts.size() == 1 ? " ON " + hosts.front() : "");
}

void add_silent(const Verdict& verdict, Rows& rows) {
  const std::vector<int> ranks = unexplained_ranks(verdict);
  if (ranks.empty() && !verdict.silent_ranks.empty() && !verdict.decision.ended_rank) {
    add_row(rows, "silent",
            "no answer from " + silent_text(verdict, verdict.silent_ranks) +
                "; what they saw is not in this verdict, which stands without it");
  }
  if (ranks.empty()) return;
  const auto& launch = verdict.launch;
  const bool is_slurm = launch && launch->scheduler == "slurm";
  const auto hosts = hosts_of(verdict, ranks);
  const std::string without =
      hosts.empty() ? "without that host"
                    : "without " + joined(hosts) +
                          (is_slurm ? " (sbatch --exclude=" + list_for_command(hosts) + ")" : "");
  std::string words;
  for (const RankEnding& each : launch ? launch->endings : std::vector<RankEnding>{}) {
    if (words.empty() && std::ranges::count(ranks, each.rank) > 0) words = each.text;
  }
  const std::string log = log_of(verdict, ranks.front());
  add_row(rows, "silent",
          "no answer from " + silent_text(verdict, ranks) +
              (words.empty() ? "" : ", whose last words are '" + words + "'") +
              (log.empty() ? std::string() : "; its log: " + shell_word(log)));
  const std::string traced = verdict.decision.is_traced ? ", traced" : "";
  const std::string look =
      (hosts.empty() ? "look at its host: " : "look at " + joined(hosts) + ": ") +
      error_counters() +
      "; it is down, or has uncorrectable volatile errors, or NVRM lines since the job began: "
      "restart " +
      without + traced + ", page nobody, ticket cluster on-call; else restart" + traced +
      ", on the same hosts, page nobody, ticket model author";
  if (!has_unknown_log(verdict)) {
    add_row(
        rows, "FIRST",
        "nanlocator next (its command is in 'plan') reads that log again: if it names what ended "
        "the rank, do what it prints instead of this block");
    return add_row(rows, "if nothing", look);
  }
  add_row(rows, "FIRST",
          "read that rank's last lines ('[rank" + std::to_string(ranks.front()) +
              "]: ...') in the job's log" +
              (is_slurm ? " (StdErr in: scontrol show job " + launch->job_id +
                              "; its end: sacct -j " + launch->job_id + ")"
                        : std::string()) +
              "; the first that fits:");
  add_row(
      rows, "if KILLED",
      "out of memory (CUDA's, too), OUT_OF_MEMORY, exit code -9: restart once, not traced, on the "
      "same hosts; page nobody, ticket model author; again: leave it down, page the model author");
  add_row(rows, "if NOTHING", "or an error of NCCL, CUDA or a closed connection: " + look);
  add_row(rows, "if CODE",
          "any other Python error: leave it down, page the model author, no ticket");
}

std::string ending_text(const Verdict& verdict, const RankEnding& ending) {
  const std::string log = log_of(verdict, ending.rank);
  return ranks_place_of(verdict, {ending.rank}) + " ended with: " + ending.text +
         (log.empty() ? "" : " (its log: " + shell_word(log) + ")");
}

std::string cause_of_ending(const RankEnding& ending) {
  const std::string kind = ending.kind == EndingKind::machine  ? "hardware"
                           : ending.kind == EndingKind::killed ? "memory or a kill"
                                                               : "code";
  return kind + ", likely: that ended rank " + std::to_string(ending.rank) +
         "; what made the NaN beside it is not known, as the step was not executed again";
}

}  // namespace nanlocator::inline report_room
