// A run's folder in, RunReport out: ledgers of all ranks merged offline, on any machine.
//
// The folder may be the run's (nanlocator_run: the latest attempt with findings is read), that of
// one attempt (a0), or any with ledgers copied together, also incomplete, cut off in mid-line, of
// several files per rank or of several runs. What cannot be read or does not belong is left out and
// named in the notes; nothing in a file ends the reading. Only the ledgers of the wanted step are
// parsed. Cost: every ledger file is read twice, by up to 8 threads; memory holds the step's
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
  everything,  // and what the page shows: histories, tensors around the first bad element
};

/// The folder that read_run reads for `directory`: the latest a{attempt} with findings; where none
/// has any, the latest; `directory` itself where it has no attempts, or findings of its own. Throws
/// IoError where `directory` is not there or cannot be read.
[[nodiscard]] std::filesystem::path find_attempt(const std::filesystem::path& directory);

/// The latest a{attempt}, with findings or without; `directory` itself where it has none: what a
/// job that runs now writes into.
[[nodiscard]] std::filesystem::path latest_attempt(const std::filesystem::path& directory);

/// `iteration`: of a step with findings; empty: the latest. The verdict is `locate`'s, of the
/// ledgers that are here; where the one that the run recorded rests on more ranks' whole ledgers,
/// that one, and a note says so, as it does where both differ. Where nothing was found (healthy
/// steps write nothing): no ledgers, a clean verdict, iteration 0. Throws IoError where the folder
/// cannot be read, FormatError where it is no run's and where none of its ledgers can be read,
/// UsageError for a step without findings.
[[nodiscard]] RunReport read_run(const std::filesystem::path& directory,
                                 std::optional<std::int64_t> iteration = std::nullopt,
                                 RunDetail detail = RunDetail::everything);

/// For a verdict and ledgers at hand: what else `attempt`, the folder of one attempt, has on their
/// step. Sets `run`, `histories` and `windows`; what cannot be read is a note.
void add_details(RunReport& report, const std::filesystem::path& attempt);

struct StepVerdicts {
  std::vector<Verdict> verdicts;  // one for each step with findings, ascending
  std::vector<std::string> notes;
};

/// Of every step with findings: as the run recorded it, else merged from the ledgers. Throws as
/// read_run does.
[[nodiscard]] StepVerdicts read_verdicts(const std::filesystem::path& directory);

/// The steps on which the run itself recorded a verdict in `attempt`, the folder of one attempt,
/// ascending; what cannot be read is left out.
[[nodiscard]] std::vector<std::int64_t> recorded_steps(const std::filesystem::path& attempt);

/// Empty: there is none that can be read.
[[nodiscard]] std::optional<Verdict> read_recorded_verdict(const std::filesystem::path& attempt,
                                                           std::int64_t iteration);

}  // namespace nanlocator::inline report_room
