// The always-on `grads` level of one rank: scan, agree, and on a finding one verdict for all ranks.
//
// Every step: begin_step, any number of scans, start_agreement at one fixed point that every rank
// reaches on every path, finish_agreement where the host waits anyway. If that is true, every rank
// calls conclude (or, for a loss scaler's routine overflow, dismiss). Healthy steps write nothing.
// Another order of calls is a UsageError. Thread: the training thread. Streams: the current ones.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "nanlocator/agree/communicator.hpp"
#include "nanlocator/error.hpp"
#include "nanlocator/gradients/gradient_scanner.hpp"
#include "nanlocator/locate/verdict.hpp"
#include "nanlocator/map/parameter_map.hpp"
#include "nanlocator/record/bundle.hpp"
#include "nanlocator/step/locator_options.hpp"

namespace nanlocator::inline replay_room {
class StorageCollector;
}  // namespace nanlocator::inline replay_room

namespace nanlocator::inline step_room {

/// Why a rank concludes alone.
enum class Failure {
  own,       // of this rank: an exception in training's code, Megatron's own check
  of_peers,  // a collective or a transfer has failed: a peer may be gone
};

/// Thrown (raised in Python) under Policy::stop. what() is the verdict as text.
class NonFiniteGradientError : public Error {
 public:
  /// `run_dir`: where the verdict's bundles are, for what().
  explicit NonFiniteGradientError(Verdict verdict, const std::filesystem::path& run_dir = {});
  [[nodiscard]] const Verdict& verdict() const noexcept { return verdict_; }

 private:
  Verdict verdict_;
};

class RerunGuard;

class GradientLocator {
 public:
  /// Agrees with all ranks on version and options, creates output_dir/a{attempt}, writes this
  /// rank's map and manifest (and run.json on rank 0), and has the communicator watch for ranks
  /// that fall silent: a thread of its own then writes what is said at `conclude_alone`.
  /// `communicator` null: a single process.
  /// Throws AgreementError on every rank alike where ranks differ, IoError where files cannot be
  /// written.
  GradientLocator(ParameterMap map, LocatorOptions options,
                  std::shared_ptr<Communicator> communicator);
  ~GradientLocator();
  GradientLocator(const GradientLocator&) = delete;
  GradientLocator& operator=(const GradientLocator&) = delete;

  [[nodiscard]] const ParameterMap& map() const noexcept;
  [[nodiscard]] const LocatorOptions& options() const noexcept;
  [[nodiscard]] const std::filesystem::path& run_dir() const noexcept;  // output_dir/a{attempt}
  [[nodiscard]] const std::string& run_id() const noexcept;
  [[nodiscard]] std::int64_t iteration() const noexcept;  // of the step that began last
  [[nodiscard]] const std::vector<Verdict>& verdicts() const noexcept;  // of all concluded findings
  [[nodiscard]] std::int64_t incidents() const noexcept;  // findings, also those past max_incidents
  [[nodiscard]] std::int64_t dismissed() const noexcept;

  /// Replaces the map (parameter groups added later) and writes its files again; what was scanned
  /// in this step is forgotten. Throws UsageError between start_agreement and its conclusion,
  /// IoError.
  void set_map(ParameterMap map);

  /// For the other ranks, should this one fall silent: where it was. begin_step, start_agreement,
  /// finish_agreement and conclude say so themselves; this is for what they cannot know (`rerun`).
  void now_in(Activity activity);

  void begin_step(std::int64_t iteration);
  void scan(Phase phase, std::uint64_t group, std::string_view role,
            std::span<const GradientView> views);
  /// The step's losses; see GradientScanner.
  void scan_losses(std::span<const LossView> losses);
  /// Backward has finished the gradient of parameter `id` (call in execution order, any steps; any
  /// thread: autograd runs hooks on its own). The order counts where one step has finished them
  /// all.
  void gradient_is_ready(std::int64_t id);
  /// The framework's own global norm: Inf or NaN counts as bad even where every gradient is finite.
  /// Set before start_agreement it is agreed on; set later it counts on this rank, so it must be
  /// the same number on all ranks: where it is not, conclude costs its deadline and the verdict is
  /// partial.
  void set_gradient_norm(double norm);
  /// What this step's gradients were multiplied by (fp16's loss scale); any time before the next
  /// begin_step or conclude. The history is divided by it; not called: its numbers are as scanned.
  /// `falls_on_overflow`: the scaler lowers it after an overflow, which is then nobody's fault
  /// (cause loss_scale). Throws UsageError unless it is positive.
  void set_loss_scale(double loss_scale, bool falls_on_overflow);
  /// Whether the framework will leave this step's update out by itself.
  void set_framework_skips_update(bool is_skipped);
  /// A sentence for this step's ledger.
  void add_note(std::string note);
  /// A sentence for the ledgers of this step and of all later ones.
  void add_standing_note(std::string note);
  /// What the run turns out not to see, phrases: added to `not_covered` of run.json, on rank 0. A
  /// disk that cannot be written is said on stderr.
  void add_not_covered(const std::vector<std::string>& phrases);
  /// What was seen being born in this step, for its ledger; replaces what was there. In a re-run it
  /// also replaces what stands for this rank until it concludes (`keep_first_pass`).
  void set_births(std::vector<Birth> births);
  /// What crossed between the ranks in this step (bad ones and how many were scanned), and the
  /// microbatches that this rank drew, for its ledger; replaces what was there. The ledger puts
  /// these sightings before those of gradients.
  void set_crossings(std::vector<Sighting> sightings, std::vector<CrossingCoverage> coverage);
  void set_microbatches(std::vector<Microbatch> microbatches);
  /// How the re-run of this step went.
  void set_rerun(Rerun rerun);
  /// Asks the other ranks, for the re-run's last pass; of several that ask, one is heard. Every
  /// rank reads the question (`peer_question`) after an agreement that follows.
  void ask_peers(const PeerQuestion& question);
  [[nodiscard]] std::optional<PeerQuestion> peer_question();
  /// This rank's answers to it, for its ledger.
  void set_answers(std::vector<WeightValue> weights, std::vector<CollectiveResult> results);
  /// Ids of the parameters whose weights were bad before this step, in the order of the scans;
  /// waits for the devices.
  [[nodiscard]] std::vector<std::int64_t> bad_weights();
  /// What the optimizer keeps of these.
  void set_optimizer_states(std::vector<OptimizerState> states);
  /// Every rank's weights were scanned after this step's update, and none is bad.
  void weights_are_finite();
  /// Where this bundle will be, relative to run_dir(); "" where the budget drops it (a note says
  /// so). It is written when the verdict of this step is out (`conclude`, `conclude_alone`), and
  /// dropped where there is none. `storages` holds the bytes behind `contents`, which must stay as
  /// they are until then. Throws UsageError for contents that do not belong to the bundle.
  std::string keep_bundle(const Bundle& bundle, BundleContents contents,
                          std::shared_ptr<StorageCollector> storages);

  /// The gradients of this step as they were scanned; waits for the devices.
  [[nodiscard]] std::vector<GradientScanner::Scanned> scanned_gradients();
  /// True if it is on any rank: decides how a step goes on, between finish_agreement and conclude.
  /// Every rank calls it equally often. Throws AgreementError as finish_agreement does; after
  /// keep_first_pass under a guard, and without conclude_alone: `conclude` gathers what there is.
  [[nodiscard]] bool is_true_anywhere(bool mine);
  /// Before a re-run: what this rank has seen is on disk and in the Store, so that a re-run that
  /// fails, on this rank or another, costs no evidence. Waits for the devices.
  void keep_first_pass();
  /// Watches over a pass of the re-run until it is destroyed, which must be when the pass has
  /// ended; null where there is one rank. See step/rerun_guard.hpp. `abort` (may be empty) ends the
  /// collectives in which this process waits, on a thread of its own. Where even that does not
  /// bring the training thread back, this finding is concluded without it, and the process ends.
  [[nodiscard]] std::unique_ptr<RerunGuard> guard_rerun(std::function<void()> abort);
  /// This rank's re-run has ended by an error. Informs the other ranks, and touches no device: from
  /// here on this rank's ledger is that of the first pass.
  void rerun_has_failed(const std::string& problem);
  /// Whether the re-run ended early on any rank, by an error or by its end: rank 0 decides for all.
  /// It waits as long as ranks answer and are at work: no re-run hangs (`guard_rerun`). No
  /// collective: where a rank is gone, some passes have ended by its lost connections, and others
  /// still wait.
  /// Throws AgreementError where rank 0 says nothing.
  [[nodiscard]] bool has_rerun_ended_early();

  /// Launches the flag reduction; equally often per step on every rank (once, and once more where
  /// the parameters are scanned after the step).
  void start_agreement();
  /// True if any rank has seen something bad in this step. Waits for the flag. Throws
  /// AgreementError where the reduction fails, after conclude_alone(Failure::of_peers).
  [[nodiscard]] bool finish_agreement();

  /// Ledger to disk, ledgers to rank 0 through the Store, verdict.json and status.json, verdict to
  /// every rank, text on rank 0's stderr. Every rank calls it after a true finish_agreement, or
  /// where set_gradient_norm's number is not finite. Where the run stops (`outcome_of`), it returns
  /// when every living rank has come so far: nobody's end breaks another one's connections. Returns
  /// within about three times gather_deadline whoever is dead, and within one of a rank's death
  /// where the monitor notices it; for a rank that answers and is still busy with this finding (a
  /// replay) it waits twenty; a disk that cannot be written is a note in the verdict. Bundles are
  /// written when the verdict is out: one that cannot be is said on stderr, and added to the notes
  /// of verdict.json where the run stops.
  /// Does not throw for policy: the caller raises. The reference is valid until the next finding.
  const Verdict& conclude();
  /// The same without the other ranks (an exception is on its way on this one): this rank's ledger
  /// is written and published, the verdict is `partial` (verdict_rank{r}.json). The step's findings
  /// are kept, for a `conclude` that may still come; called again in the same step it writes only
  /// what is new. A failure `of_peers` waits for up to gather_deadline until it is known which rank
  /// is lost; the verdict names it, also where this rank saw nothing bad. nullptr where there is
  /// nothing to tell: then nothing is written either.
  const Verdict* conclude_alone(std::string reason, Failure failure = Failure::own);
  /// The step ends early, wherever it is: the next begin_step may follow. A flag reduction that has
  /// been launched is waited for there, as every rank has launched it.
  void abandon_step() noexcept;
  /// Forgets this step's findings (a loss scaler's routine overflow); counted, nothing is written.
  void dismiss();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace nanlocator::inline step_room
