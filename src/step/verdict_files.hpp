// The files that report a run's state: verdicts and status.json.
//
// Two threads write them: the training thread, and the monitor of silent ranks. One lock separates
// them, and each includes the other's report on the same step, so that the last file has both. A
// write error is a note, never an exception.
#pragma once

#include <filesystem>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "nanlocator/agree/rank_monitor.hpp"
#include "nanlocator/map/rank_coordinates.hpp"
#include "nanlocator/verdict/verdict.hpp"
#include "step/run_directory.hpp"

namespace nanlocator::inline step_room {

/// The state in status.json of a run with lost ranks; `outcome_of` has the others.
inline constexpr std::string_view kRankLost = "rank_lost";
inline constexpr std::string_view kTerminated = "terminated";  // by SIGTERM

/// The ledgers that a verdict is based on.
enum class VerdictScope {
  all_ranks,  // all that answered: silent_ranks are those without a ledger
  alone,      // this rank only: the others were not asked
};

struct UnwrittenBundle {
  std::string folder;   // as in origins
  std::string problem;  // a sentence
};

/// Turns them into notes of `verdict` and removes them from its origins.
void leave_out(const std::vector<UnwrittenBundle>& bundles, Verdict& verdict);

class VerdictFiles {
 public:
  /// `directory` (output_dir/a{attempt}) must exist.
  VerdictFiles(Run run, std::filesystem::path directory, RankCoordinates coordinates);

  /// This rank's activity, for the monitor's files. Drops the report of another step.
  void now_in(Activity activity, std::int64_t iteration);
  [[nodiscard]] Activity activity() const;

  /// Writes training's verdict on the current step and adds notes to it: the lost ranks, and write
  /// errors. `state` is for status.json ("stopped", ...). Rank 0, or the lowest living rank if it
  /// is lost, writes verdict.json, verdicts/`archive` and status.json. The other ranks write
  /// verdict_rank{r}.json, as does any rank for a verdict `alone`.
  void write(Verdict& verdict, VerdictScope scope, std::string_view state,
             const std::string& archive = "");
  /// Takes over another rank's verdict.
  void take_over(const Verdict& verdict, std::string_view state);

  /// Adds bundles that the verdict on this step names and that could not be written since to the
  /// files that `write` has written.
  void add_unwritten(const std::vector<UnwrittenBundle>& bundles);

  /// For the monitor: writes this rank's ledger and partial verdict; on the lowest living rank also
  /// verdict.json, status.json and a line on stderr. `lost` replaces the earlier list.
  void write_lost(const std::vector<LostRank>& lost);
  [[nodiscard]] std::vector<LostRank> lost() const;

 private:
  struct Reported {
    Verdict verdict;
    VerdictScope scope;
    std::string state;
    std::string archive;
  };
  // Call all of these with the lock held.
  void write_files(Reported& reported) const;
  [[nodiscard]] bool is_first_living_rank() const;
  [[nodiscard]] bool is_less_than_on_disk(VerdictScope scope) const;
  void name_lost_ranks(Verdict& verdict, VerdictScope scope) const;
  void write_verdict(Verdict& verdict, const std::filesystem::path& name) const;
  void write_status(const Verdict& verdict, std::string_view state,
                    const std::string& summary) const;
  [[nodiscard]] std::string summary_of(const Verdict& verdict) const;
  void write_ledger() const;
  [[nodiscard]] std::string own_verdict_name() const;
  [[nodiscard]] std::string own_place() const;

  const Run run_;
  const std::filesystem::path directory_;
  const RankCoordinates coordinates_;
  mutable std::mutex mutex_;
  Activity activity_ = Activity::training;
  std::int64_t iteration_ = 0;
  std::vector<LostRank> lost_;
  std::optional<Reported> reported_;  // on the current step
};

}  // namespace nanlocator::inline step_room
