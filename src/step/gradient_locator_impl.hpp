// GradientLocator's state, and its parts: gradient_locator_install.cpp (the ranks' start),
// gradient_locator_findings.cpp (a bad step, from this rank's ledger to the verdict), and
// gradient_locator.cpp (the class, and the agreement of each step).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "gradients/backward_order.hpp"
#include "nanlocator/replay/operator_call.hpp"
#include "nanlocator/report/terminal.hpp"
#include "nanlocator/step/gradient_locator.hpp"
#include "step/last_words.hpp"
#include "step/rerun_guard.hpp"
#include "step/run_directory.hpp"
#include "step/verdict_files.hpp"

namespace nanlocator::inline step_room {

using Clock = std::chrono::steady_clock;

/// In gather_deadlines. Ranks may reach the constructor minutes apart, if some still read a
/// checkpoint: with the default gather_deadline they get five minutes, c10d's own time-out for a
/// Store.
inline constexpr int kInstallPatience = 10;
inline constexpr std::string_view kStopped = "stopped";  // from `outcome_of`

enum class State {
  before_first_step,
  scanning,
  agreeing,   // between start_agreement and finish_agreement
  abandoned,  // the same, but finish_agreement will not be called
  bad,        // until conclude or dismiss
};

/// Throws UsageError for options that cannot work.
void check_options(const LocatorOptions& options);

[[nodiscard]] inline ParameterMap with_run_id(const ParameterMap& map, const std::string& run_id) {
  return {map.coordinates(), map.parameters(), run_id};
}

/// The flag's device: the gradients' one if the group can reduce there. Every rank must choose the
/// same, so it depends on the layout alone and is part of the handshake.
[[nodiscard]] at::DeviceType choose_flag_device(const RankCoordinates& coordinates,
                                                const Communicator* communicator);

/// True if any rank has not answered.
[[nodiscard]] inline bool has_gaps(const Gathered& texts) {
  return !std::ranges::all_of(texts, [](const auto& text) { return text.has_value(); });
}

[[nodiscard]] inline bool has_finding(const Ledger& ledger) {
  const bool is_norm_bad = ledger.gradient_norm && !std::isfinite(*ledger.gradient_norm);
  return !ledger.sightings.empty() || is_norm_bad;
}

struct GradientLocator::Impl {
  Impl(ParameterMap map_, LocatorOptions options_, std::shared_ptr<Communicator> communicator_)
      : options(std::move(options_)),
        communicator(std::move(communicator_)),
        map(std::move(map_)),
        order(std::make_unique<BackwardOrder>(map.size())),
        flag_type(choose_flag_device(map.coordinates(), communicator.get())) {}

  LocatorOptions options;
  std::shared_ptr<Communicator> communicator;
  ParameterMap map;
  std::unique_ptr<GradientScanner> scanner;  // refers to `map`
  std::unique_ptr<BackwardOrder> order;
  Run run;
  std::string started = utc_time();
  std::filesystem::path directory;
  std::unique_ptr<VerdictFiles> files;

  at::DeviceType flag_type;
  at::Tensor flag;       // int32 [1]; owned, so that a late reduction writes to live memory
  at::Tensor host_flag;  // its pinned copy, without communicator and with the flag on a device
  std::optional<c10::Event> flag_is_copied;

  State state = State::before_first_step;
  std::int64_t iteration = 0;
  std::optional<std::int64_t> first_iteration;
  std::optional<double> gradient_norm;
  std::optional<std::int64_t> gradients_left_by;
  std::string no_rerun;
  std::optional<double> loss_scale;  // only if an overflow lowers it
  bool framework_skips_update = false;
  bool began_unrecorded = false;
  bool is_discarded = false;  // by the program itself
  std::vector<std::string> notes;
  std::vector<std::string> standing_notes;  // added to every step
  std::vector<Birth> births;
  int questions = 0;  // asked in this step: has a re-run ended early?
  int stretches = 0;  // guarded so far in its re-run
  std::vector<Sighting> crossed;
  std::vector<CrossingCoverage> crossings;
  std::vector<Microbatch> microbatches;
  std::optional<Rerun> rerun;
  std::optional<Ledger> first_pass;  // if the step is re-run
  bool has_rerun_failed = false;     // on this rank, by an error
  std::vector<OptimizerState> optimizer_states;
  std::optional<std::int64_t> weights_finite_after;  // this step or an earlier one
  std::unique_ptr<BundleStore> bundles;
  struct KeptBundle {
    PreparedBundle prepared;
    std::shared_ptr<StorageCollector> storages;
  };
  std::vector<KeptBundle> kept_bundles;  // of this step, not yet on disk
  std::vector<Verdict> verdicts;
  std::optional<LastWords> last_words;
  Verdict counted;  // returned by conclude for a finding that is not located
  std::int64_t incidents = 0;
  std::optional<std::int64_t> bad_update;  // a step whose update with bad gradients was applied
  bool is_consequence = false;             // the current finding, of that update
  bool has_told_of_consequences = false;
  std::int64_t dismissed = 0;
  std::map<std::int64_t, int> concluded;  // counts by iteration: a step may run again
  // Numbers of sightings and lost ranks at conclude_alone's report in this step.
  std::optional<std::pair<std::size_t, std::size_t>> reported_alone;
  bool has_waited_for_loss = false;
  bool is_concluded_by_guard = false;

  [[nodiscard]] int rank() const { return communicator ? communicator->rank() : 0; }
  [[nodiscard]] int world_size() const { return communicator ? communicator->size() : 1; }
  [[nodiscard]] bool is_norm_bad() const { return gradient_norm && !std::isfinite(*gradient_norm); }

  // --- install ---
  void agree_on_options(Deadline deadline);
  void open_run(Deadline deadline);
  void write_files();
  void write_run_file() const;  // on rank 0
  void use_map(ParameterMap new_map);

  void watch_ranks();

  // --- other ranks ---
  void now_in(Activity activity) const;
  void wait_for_loss();
  bool finish_flag_or_conclude_alone(GradientLocator& locator);
  [[nodiscard]] std::string key_of_question() {
    return incident_key() + "/rerun/" + std::to_string(questions);
  }
  [[nodiscard]] bool is_waiting_for_any(const Gathered& texts) const;
  std::optional<std::string> fetch_from_first_rank(const std::string& key);

  // --- a finding ---
  void forget_step();
  void forget_step_quietly() noexcept;
  Ledger make_ledger(std::vector<std::string> extra_notes);
  Ledger ledger_of_conclusion(std::vector<std::string> extra_notes);
  [[nodiscard]] std::filesystem::path first_pass_file() const;
  void keep_first_pass();
  void remove_first_pass_file() const;  // after this rank's return from its re-run
  void add_first_passes(const std::string& key, Gathered& texts,
                        std::vector<std::string>& problems);
  std::string incident_key();
  Verdict judge(std::span<const Ledger> ledgers, std::vector<std::string> extra_notes,
                const std::string& own_end = "") const;
  /// `own_end`: the error that ends this rank; "" if it goes on.
  void add_endings(const std::string& own_end, Verdict& verdict) const;
  void decide_on(Verdict& verdict) const;
  void write_page(const Verdict& verdict, std::vector<Ledger> ledgers) const;
  Verdict judge_alone(std::span<const Ledger> ledgers, bool is_finding,
                      std::vector<std::string> notes, const std::string& own_end) const;
  std::vector<Ledger> ledgers_of_survivors(const Ledger& mine, std::vector<std::string>& problems);
  void print_alone(const Verdict& verdict, std::span<const Ledger> ledgers) const;
  void keep_on_disk(const Ledger& ledger, std::vector<std::string>& problems) const;
  [[nodiscard]] History history() const;
  void keep_history_on_disk(std::vector<std::string>& problems) const;
  void print(const Verdict& verdict) const {
    std::cerr << format_verdict(verdict, {.run_dir = directory.string()}) << std::flush;
  }
  void read_ledgers(const Gathered& texts, const Ledger& mine, std::vector<Ledger>& ledgers,
                    std::vector<std::string>& problems) const;
  std::vector<UnwrittenBundle> write_bundles();
  void publish_unwritten(const std::string& key,
                         const std::vector<UnwrittenBundle>& unwritten) const;
  void take_unwritten(const std::string& key) const;
  void conclude_finding();
  void tell_of_counted() const;
  const Verdict& count_finding(std::string note);
  void tell_program() const;
  [[noreturn]] void conclude_for_training(GradientLocator& locator, const std::string& why);
  Gathered gather_ledgers(const std::string& key);
  Verdict conclude_as_first_rank(const Ledger& mine, const std::string& key, int repetition);
  Verdict conclude_as_other_rank(const Ledger& mine, const std::string& key,
                                 const std::vector<UnwrittenBundle>& unwritten);
  [[nodiscard]] std::optional<Ledger> ledger_at_end();
  void write_last_words() noexcept;
  void go_on_or_stop(const Verdict& verdict, const std::string& key);
};

}  // namespace nanlocator::inline step_room
