// The files by which a run reports its state: verdicts and status.json.
//
// Two threads write them: training with what it has concluded, and the monitor of silent ranks. One
// lock keeps them apart, and each takes up what the other has reported of the same step, so that
// the file that is there last says both. A disk that cannot be written is a note, never an
// exception.
#pragma once

#include <filesystem>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "nanlocator/agree/rank_monitor.hpp"
#include "nanlocator/locate/verdict.hpp"
#include "nanlocator/map/rank_coordinates.hpp"
#include "step/run_directory.hpp"

namespace nanlocator::inline step_room {

/// The state of a run that ranks are missing from, in status.json; others are `outcome_of`'s.
inline constexpr std::string_view kRankLost = "rank_lost";
inline constexpr std::string_view kTerminated = "terminated";  // by SIGTERM

/// Whose ledgers a verdict is made of.
enum class VerdictScope {
  all_ranks,  // of all that answered: its silent_ranks are those without a ledger
  alone,      // of this rank only: the others were not asked
};

struct UnwrittenBundle {
  std::string folder;   // as origins name it
  std::string problem;  // a sentence
};

/// Notes in `verdict`; its origins name these no more.
void leave_out(const std::vector<UnwrittenBundle>& bundles, Verdict& verdict);

class VerdictFiles {
 public:
  /// Files go to `directory` (output_dir/a{attempt}), which exists.
  VerdictFiles(Run run, std::filesystem::path directory, RankCoordinates coordinates);

  /// Where this rank stands, for what the monitor writes. What was reported of another step is
  /// over.
  void now_in(Activity activity, std::int64_t iteration);
  [[nodiscard]] Activity activity() const;

  /// Training's verdict on the current step, which gets the lost ranks by name and what could not
  /// be written as notes. `state` is for status.json ("stopped", ...). It is verdict.json,
  /// verdicts/`archive` and status.json on rank 0, or on the lowest living rank where that is lost;
  /// and verdict_rank{r}.json on the other ranks, or where it is `alone`.
  void write(Verdict& verdict, VerdictScope scope, std::string_view state,
             const std::string& archive = "");
  /// A verdict that another rank has written.
  void take_over(const Verdict& verdict, std::string_view state);

  /// Bundles that the verdict on this step names, and that could not be written since: into the
  /// files that `write` has written.
  void add_unwritten(const std::vector<UnwrittenBundle>& bundles);

  /// The monitor's: this rank's ledger and partial verdict on disk; on the lowest living rank also
  /// verdict.json, status.json and a line on stderr. `lost` replaces what was there before.
  void write_lost(const std::vector<LostRank>& lost);
  [[nodiscard]] std::vector<LostRank> lost() const;

 private:
  struct Reported {
    Verdict verdict;
    VerdictScope scope;
    std::string state;
    std::string archive;
  };
  // The lock is held in all of these.
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
  std::optional<Reported> reported_;  // of the current step
};

}  // namespace nanlocator::inline step_room
