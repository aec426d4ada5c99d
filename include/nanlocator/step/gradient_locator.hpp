// The always-on `grads` level of one rank: scan, agree, and on a finding one verdict for all ranks.
//
// Every step: begin_step, any number of scans, start_agreement at a fixed point that every rank
// reaches on every path, finish_agreement where the host waits anyway. If that returns true, every
// rank calls conclude (or, for a loss scaler's routine overflow, dismiss). Healthy steps write
// nothing. Another order of calls is a UsageError. Thread: the training thread. Streams: the
// current ones.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "nanlocator/agree/communicator.hpp"
#include "nanlocator/error.hpp"
#include "nanlocator/gradients/gradient_scanner.hpp"
#include "nanlocator/map/parameter_map.hpp"
#include "nanlocator/record/bundle.hpp"
#include "nanlocator/step/locator_options.hpp"
#include "nanlocator/verdict/verdict.hpp"

namespace nanlocator::inline replay_room {
class StorageCollector;
}  // namespace nanlocator::inline replay_room

namespace nanlocator::inline step_room {

/// The reason for a conclusion without the other ranks.
enum class Failure {
  own,       // this rank: an exception in training's code, Megatron's own check
  of_peers,  // a collective or a transfer failed: a peer may be gone
};

/// Thrown (raised in Python) under Policy::stop. what() is the verdict as text.
class NonFiniteGradientError : public Error {
 public:
  /// `run_dir`: the folder of the verdict's bundles, for what().
  explicit NonFiniteGradientError(Verdict verdict, const std::filesystem::path& run_dir = {});
  [[nodiscard]] const Verdict& verdict() const noexcept { return verdict_; }

 private:
  Verdict verdict_;
};

class RerunGuard;

class GradientLocator {
 public:
  /// Agrees with all ranks on version and options, creates output_dir/a{attempt}, writes this
  /// rank's map and manifest (and run.json on rank 0), and starts the communicator's monitor of
  /// silent ranks, whose thread writes the files described at `conclude_alone`. `communicator`
  /// null: a single process.
  /// Throws AgreementError on every rank alike if ranks differ, IoError if files cannot be written.
  GradientLocator(ParameterMap map, LocatorOptions options,
                  std::shared_ptr<Communicator> communicator);
  ~GradientLocator();
  GradientLocator(const GradientLocator&) = delete;
  GradientLocator& operator=(const GradientLocator&) = delete;

  [[nodiscard]] const ParameterMap& map() const noexcept;
  [[nodiscard]] const LocatorOptions& options() const noexcept;
  [[nodiscard]] const std::filesystem::path& run_dir() const noexcept;  // output_dir/a{attempt}
  [[nodiscard]] const std::string& run_id() const noexcept;
  [[nodiscard]] std::int64_t iteration() const noexcept;                // of the latest step
  [[nodiscard]] const std::vector<Verdict>& verdicts() const noexcept;  // of all concluded findings
  /// True after a finding under Policy::report whose update made weights bad.
  [[nodiscard]] bool has_bad_update() const noexcept;
  /// True if this finding comes of that update: weights are bad, and untouched since. Every rank
  /// calls it after the weights were scanned and before `conclude`, which then only counts the
  /// finding. The same on all ranks.
  [[nodiscard]] bool is_consequence(bool are_weights_untouched);
  [[nodiscard]] std::int64_t incidents() const noexcept;  // findings, also past max_incidents
  /// Training goes on after this step, and its finding is past max_incidents: `conclude` counts it.
  [[nodiscard]] bool is_counted_only() const noexcept;
  [[nodiscard]] std::int64_t dismissed() const noexcept;

  /// Replaces the map (parameter groups added later) and writes its files again; forgets this
  /// step's scans. Throws UsageError between start_agreement and its conclusion, IoError.
  void set_map(ParameterMap map);

  /// Publishes this rank's activity, which the other ranks report if it falls silent. Needed only
  /// for activities that the class does not know (`rerun`): begin_step, start_agreement,
  /// finish_agreement and conclude publish theirs.
  void now_in(Activity activity);

  void begin_step(std::int64_t iteration);
  void scan(Phase phase, std::uint64_t group, std::string_view role,
            std::span<const GradientView> views);
  /// The step's losses; see GradientScanner.
  void scan_losses(std::span<const LossView> losses);
  /// Backward has finished the gradient of parameter `id`. Call it in execution order, in any
  /// steps, on any thread: autograd runs hooks on its own. The order is used once a single step has
  /// finished all.
  void gradient_is_ready(std::int64_t id);
  /// The framework's own global norm: Inf or NaN counts as bad even if every gradient is finite.
  /// Set before start_agreement, it is agreed on. Set later, it counts on this rank only, so it
  /// must be the same on all ranks: if it differs, conclude costs its deadline and the verdict is
  /// partial.
  void set_gradient_norm(double norm);
  /// Why this step is not executed again, as a clause.
  void set_no_rerun(std::string why);
  /// The earlier step whose bad gradients were still there when this one began.
  void set_gradients_left_by(std::int64_t step);
  /// What the program computed in this step before the model's first call was not recorded.
  void set_began_unrecorded();
  /// The program itself throws away what this step has computed: the policy is `skip`.
  void set_discarded();
  /// The factor of this step's gradients (fp16's loss scale); call any time before the next
  /// begin_step or conclude. The history is divided by it; without a call it stays as scanned.
  /// `falls_on_overflow`: the scaler lowers it after an overflow, which is then no fault (cause
  /// loss_scale). Throws UsageError unless it is positive.
  void set_loss_scale(double loss_scale, bool falls_on_overflow);
  /// States whether the framework itself will skip this step's update.
  void set_framework_skips_update(bool is_skipped);
  /// Adds a sentence to this step's ledger.
  void add_note(std::string note);
  /// Adds a sentence to the ledgers of this step and all later ones.
  void add_standing_note(std::string note);
  /// Adds phrases about what the run cannot see to `not_covered` of run.json, on rank 0. A write
  /// error goes to stderr.
  void add_not_covered(const std::vector<std::string>& phrases);
  /// Sets the births of this step for its ledger, replacing earlier ones. In a re-run it also
  /// replaces this rank's published ledger until the rank concludes (`keep_first_pass`).
  void set_births(std::vector<Birth> births);
  /// Sets this step's exchanges between ranks (bad tensors and numbers of scans), and the
  /// microbatches that this rank drew, for its ledger, replacing earlier ones. The ledger puts
  /// these sightings before those of gradients.
  void set_crossings(std::vector<Sighting> sightings, std::vector<CrossingCoverage> coverage);
  void set_microbatches(std::vector<Microbatch> microbatches);
  /// Sets the outcome of this step's re-run.
  void set_rerun(Rerun rerun);
  /// Asks the other ranks, for the re-run's last pass. If several ask, one question is answered.
  /// Every rank reads it (`peer_question`) after a later agreement.
  void ask_peers(const PeerQuestion& question);
  [[nodiscard]] std::optional<PeerQuestion> peer_question();
  /// Sets this rank's answers to it, for its ledger.
  void set_answers(std::vector<WeightValue> weights, std::vector<CollectiveResult> results);
  /// Ids of the parameters whose weights were bad before this step, in scan order; waits for the
  /// devices.
  [[nodiscard]] std::vector<std::int64_t> bad_weights();
  /// Sets the optimizer states of these.
  void set_optimizer_states(std::vector<OptimizerState> states);
  /// Every rank has scanned its weights after this step's update, and none is bad.
  void weights_are_finite();
  /// Returns the bundle's future path relative to run_dir(); "" if the budget drops it (a note says
  /// so). It is written after this step's verdict (`conclude`, `conclude_alone`), and dropped if
  /// there is none. `storages` owns the bytes behind `contents`, which must not change until then.
  /// Throws UsageError for contents that do not belong to the bundle.
  std::string keep_bundle(const Bundle& bundle, BundleContents contents,
                          std::shared_ptr<StorageCollector> storages);

  /// This step's gradients as scanned; waits for the devices.
  [[nodiscard]] std::vector<GradientScanner::Scanned> scanned_gradients();
  /// True if `mine` is true on any rank: decides how a step continues between finish_agreement and
  /// conclude. Every rank calls it equally often. Throws AgreementError like finish_agreement.
  /// After keep_first_pass it runs under a guard and without conclude_alone: `conclude` gathers the
  /// available ledgers.
  [[nodiscard]] bool is_true_anywhere(bool mine);
  /// Call it before a re-run: saves this rank's findings to disk and the Store, so that a re-run
  /// that fails, here or on another rank, costs no evidence. Waits for the devices.
  void keep_first_pass();
  /// Guards a pass of the re-run until it is destroyed, which must be when the pass has ended; null
  /// for a single rank. See step/rerun_guard.hpp. `abort` (may be empty) ends the collectives in
  /// which this process waits, on a separate thread. If even that does not free the training
  /// thread, the guard concludes this finding and ends the process.
  [[nodiscard]] std::unique_ptr<RerunGuard> guard_rerun(std::function<void()> abort);
  /// An error has ended this rank's re-run. Informs the other ranks without using a device: from
  /// here on this rank's ledger is that of the first pass.
  void rerun_has_failed(const std::string& problem);
  /// True if the re-run ended early on any rank, by an error or by a lost rank; rank 0 decides for
  /// all. It waits while ranks answer and are at work; a guard ends every re-run that hangs
  /// (`guard_rerun`). Not a collective: if a rank is gone, its lost connections have ended some
  /// passes, and others still wait.
  /// Throws AgreementError if rank 0 does not answer.
  [[nodiscard]] bool has_rerun_ended_early();

  /// Launches the flag reduction; equally often per step on every rank (once, and once more if the
  /// parameters are scanned after the step).
  void start_agreement();
  /// True if any rank has a finding in this step. Waits for the flag. Throws AgreementError if the
  /// reduction fails, after conclude_alone(Failure::of_peers).
  [[nodiscard]] bool finish_agreement();

  /// Writes the ledger to disk, sends ledgers to rank 0 through the Store, writes verdict.json and
  /// status.json, sends the verdict to every rank, and prints it on rank 0's stderr. Every rank
  /// calls it after a true finish_agreement, or if set_gradient_norm's number is not finite.
  /// If the run stops (`outcome_of`), it returns when every living rank has got this far, so that
  /// no rank's end breaks another one's connections. It returns within about three times
  /// gather_deadline, even if ranks are dead, and within one of a rank's death if the monitor
  /// notices it. It waits up to twenty for a rank that answers and is still busy with this finding
  /// (a replay). A disk error is a note in the verdict. Bundles are written after the verdict: an
  /// error goes to stderr, and to the notes of verdict.json if the run stops.
  /// Does not throw for policy: the caller raises. The reference is valid until the next finding.
  const Verdict& conclude();
  /// The same without the other ranks (this rank is about to raise an exception): writes and
  /// publishes this rank's ledger; the verdict is `partial` (verdict_rank{r}.json). Keeps the
  /// step's findings for a later `conclude`; a second call in the same step writes only what is
  /// new. A failure `of_peers` waits up to gather_deadline to learn which rank is lost, and up to
  /// five seconds for the ledgers of the others that have lost it: the verdict is then of all that
  /// came, and the first of these ranks prints it. It names the lost rank, even if this rank has no
  /// finding. nullptr if there is nothing to report; then nothing is written either.
  const Verdict* conclude_alone(const std::string& reason, Failure failure = Failure::own);
  /// Ends the step early, at any point; the next begin_step may follow. If a flag reduction has
  /// been launched, begin_step waits for it, as every rank has launched it.
  void abandon_step() noexcept;
  /// Forgets this step's findings (a loss scaler's routine overflow). Counted; nothing is written.
  void dismiss();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace nanlocator::inline step_room
