// Reads a run's folder into a RunReport: merges the ledgers of all ranks offline, on any machine.
//
// The folder may be a run's (nanlocator_run: the latest attempt with findings is read), one
// attempt's (a0), or any folder of copied ledgers, even if ledgers are missing, end in mid-line,
// fill several files per rank or come from several runs. Unreadable or foreign files are left out
// and named in the notes; no file content stops the reading. Only the ledgers of the requested step
// are parsed. Cost: every ledger file is read twice, by up to 8 threads; memory holds the step's
// ledgers.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "nanlocator/report/run_report.hpp"

namespace nanlocator::inline report_room {

enum class RunDetail {
  verdict,     // run.json, ledgers and the verdict
  everything,  // also what the page shows: histories, tensors around the first bad element
};

/// The folder that read_run reads for `directory`: the latest a{attempt} with findings, or the
/// latest if none has findings; `directory` itself if it has no attempts or has findings of its
/// own. Throws IoError if `directory` is missing or unreadable.
[[nodiscard]] std::filesystem::path find_attempt(const std::filesystem::path& directory);

/// The latest a{attempt}, with or without findings, or `directory` itself if it has no attempts:
/// the folder into which a running job writes.
[[nodiscard]] std::filesystem::path latest_attempt(const std::filesystem::path& directory);

/// `iteration`: a step with findings; empty: the latest one. The verdict is computed by `locate`
/// from the ledgers in the folder. If the run recorded a verdict that rests on complete ledgers of
/// more ranks, that verdict is returned instead, with a note; another note says if the two differ.
/// Without findings (healthy steps write nothing) the report has no ledgers, a clean verdict and
/// iteration 0. Throws IoError if the folder cannot be read, FormatError if it is not a run's or if
/// none of its ledgers can be read, UsageError for a step without findings.
[[nodiscard]] RunReport read_run(const std::filesystem::path& directory,
                                 std::optional<std::int64_t> iteration = std::nullopt,
                                 RunDetail detail = RunDetail::everything);

/// Sets `run`, `histories` and `windows` of a report that has its verdict and ledgers, from
/// `attempt`, the folder of one attempt. Unreadable files become notes.
void add_details(RunReport& report, const std::filesystem::path& attempt);

struct StepVerdicts {
  std::vector<Verdict> verdicts;  // one for each step with findings, ascending
  std::vector<std::string> notes;
};

/// The verdict of every step with findings: the recorded one, else one merged from the ledgers.
/// Throws like read_run.
[[nodiscard]] StepVerdicts read_verdicts(const std::filesystem::path& directory);

/// The steps, ascending, for which the run recorded a verdict in `attempt`, the folder of one
/// attempt. Unreadable files are left out.
[[nodiscard]] std::vector<std::int64_t> recorded_steps(const std::filesystem::path& attempt);

/// The last recorded verdict of each earlier attempt of the run of `attempt` (its sibling a0, a1,
/// ...), the latest kMostEarlier. Unreadable ones are left out.
inline constexpr int kMostEarlier = 8;
[[nodiscard]] std::vector<Verdict> earlier_verdicts(const std::filesystem::path& attempt);

/// Empty if there is no readable one.
[[nodiscard]] std::optional<Verdict> read_recorded_verdict(const std::filesystem::path& attempt,
                                                           std::int64_t iteration);

}  // namespace nanlocator::inline report_room
