#include "files/printable.hpp"
#include "step/gradient_locator_impl.hpp"

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <nlohmann/json.hpp>

#include "nanlocator/files/atomic_file.hpp"
#include "nanlocator/locate/locate.hpp"
#include "nanlocator/report/html.hpp"
#include "nanlocator/report/read_run.hpp"
#include "nanlocator/report/verdict_json.hpp"
#include "step/launch.hpp"
#include "step/rank_logs.hpp"

namespace nanlocator::inline step_room {
namespace {

/// In gather_deadlines, for ranks that answer: a replay or a bundle may take that long.
constexpr int kBusyPatience = 20;
/// For ranks that lost a peer, too: after wait_for_loss, which takes them as long.
constexpr std::chrono::seconds kSurvivors{5};
/// For the checkpoints that the orders depend on; `nanlocator next` has longer.
constexpr std::chrono::seconds kReadingCheckpoints{20};
// torch.distributed's env:// rendezvous starts the Store in rank 0's process, unless torchrun's
// agent hosts it (rendezvous.py, _create_c10d_store).
bool hosts_rank_zero_the_store() {
  const char* const uses_agent = std::getenv("TORCHELASTIC_USE_AGENT_STORE");
  return uses_agent == nullptr || std::string_view(uses_agent) != "True";
}

}  // namespace

// ------------------------------------------------------------------------------------ other ranks

void GradientLocator::Impl::now_in(Activity activity) const {
  files->now_in(activity, iteration);
  if (communicator && communicator->monitor()) communicator->monitor()->now_in(activity, iteration);
}

// Waits for news of a lost rank after a collective has failed, once per step. If the Store is gone,
// so is the rank that hosts it.
void GradientLocator::Impl::wait_for_loss() {
  if (!communicator || !communicator->monitor() || std::exchange(has_waited_for_loss, true)) return;
  const auto& monitor = *communicator->monitor();
  const auto lost = monitor.wait_for_loss(Clock::now() + options.gather_deadline);
  const bool is_store_gone = !monitor.problem().empty();
  if (lost.empty() && is_store_gone && rank() != 0 && hosts_rank_zero_the_store()) {
    LostRank host;
    host.place.text = "rank 0, whose process hosts the Store,";
    host.iteration = iteration;
    files->write_lost({host});
  } else if (!lost.empty()) {
    files->write_lost(lost);  // the monitor may not have done it yet
  }
}

bool GradientLocator::Impl::finish_flag_or_conclude_alone(GradientLocator& locator) {
  try {
    return communicator->finish_flag();
  } catch (const AgreementError& error) {
    std::string text = error.what();
    const bool is_reported = locator.conclude_alone(text, Failure::of_peers) != nullptr;
    for (const auto& each : files->lost()) text += "\n" + each.describe() + ".";
    if (is_reported) text += "\nThis rank's verdict is in " + directory.string() + ".";
    throw AgreementError(text);
  }
}

bool GradientLocator::Impl::is_waiting_for_any(const Gathered& texts) const {
  if (!communicator || !communicator->monitor()) return false;
  for (int peer = 0; peer < static_cast<int>(texts.size()); ++peer) {
    if (!texts[peer] && communicator->monitor()->is_locating(peer, iteration)) return true;
  }
  return false;
}

/// Waits as long as rank 0 answers and is busy with this finding.
std::optional<std::string> GradientLocator::Impl::fetch_from_first_rank(const std::string& key) {
  for (;;) {
    // Rank 0 may wait for silent ranks until its deadline before it locates.
    auto text = communicator->fetch(key, 0, Clock::now() + options.gather_deadline * 3 / 2);
    const auto* const monitor = communicator->monitor();
    if (text || !monitor || !monitor->is_locating(0, iteration)) return text;
  }
}

// --------------------------------------------------------------------------------------- a finding

void GradientLocator::Impl::forget_step() {
  scanner->begin_step();
  gradient_norm.reset();
  gradients_left_by.reset();
  no_rerun.clear();
  loss_scale.reset();
  framework_skips_update = began_unrecorded = is_discarded = false;
  notes = standing_notes;
  births.clear();
  kept_bundles.clear();
  questions = 0;
  stretches = 0;
  crossed.clear();
  crossings.clear();
  microbatches.clear();
  rerun.reset();
  first_pass.reset();
  has_rerun_failed = false;
  optimizer_states.clear();
  reported_alone.reset();
  has_waited_for_loss = false;
}

// After a finding: training should report a failed device, and the verdict must not be lost to it.
void GradientLocator::Impl::forget_step_quietly() noexcept {
  try {
    forget_step();
  } catch (...) {
  }
}

// This rank's observations of this step. Does not throw: a failed device leaves a note.
Ledger GradientLocator::Impl::make_ledger(std::vector<std::string> extra_notes) {
  Ledger ledger;
  ledger.run_id = run.id;
  ledger.attempt = run.attempt;
  ledger.iteration = iteration;
  ledger.coordinates = map.coordinates();
  ledger.gradient_norm = gradient_norm;
  ledger.gradients_left_by = gradients_left_by;
  ledger.no_rerun = no_rerun;
  ledger.loss_scale = loss_scale;
  ledger.framework_skips_update = framework_skips_update || is_discarded;
  ledger.level = name_of(options.level);
  ledger.on_bad = name_of(is_discarded ? Policy::report : options.on_bad);
  ledger.is_discarded = is_discarded;
  ledger.began_unrecorded = began_unrecorded;
  ledger.births = births;
  ledger.sightings = crossed;
  ledger.crossings = crossings;
  ledger.microbatches = microbatches;
  ledger.rerun = rerun;
  ledger.optimizer_states = optimizer_states;
  ledger.weights_finite_after = weights_finite_after;
  ledger.notes = notes;
  for (auto& note : extra_notes) ledger.notes.push_back(std::move(note));
  try {
    auto collected = scanner->collect(iteration);
    for (auto& sighting : collected.sightings) ledger.sightings.push_back(std::move(sighting));
    ledger.coverage = std::move(collected.coverage);
    for (auto& note : collected.notes) ledger.notes.push_back(std::move(note));
    ledger.absmax = collected.absmax;
    ledger.absmax_parameter = std::move(collected.absmax_parameter);
    if (auto summary = summary_of(history()); !summary.iterations.empty()) {
      ledger.history = std::move(summary);
    }
  } catch (const std::exception& error) {
    ledger.notes.push_back(std::string("This rank's scans could not be read back: ") +
                           error.what());
  }
  const auto observed = order->observed();
  ledger.is_backward_order_observed = observed.has_value();
  const auto parameters = static_cast<std::int64_t>(map.size());
  for (std::int64_t i = 0; i < parameters; ++i) {
    const auto& info = map.at(observed ? (*observed)[i] : parameters - 1 - i);
    ledger.backward_order.push_back({info.id, info.name, info.shape, info.may_be_untouched,
                                     info.is_tp_duplicate, info.is_tied, info.chunk, info.shard,
                                     info.shard_group, info.reduce_dtype});
  }
  return ledger;
}

/// The ledger of a re-run step is the first pass's, so that a device that has failed since is not
/// used.
Ledger GradientLocator::Impl::ledger_of_conclusion(std::vector<std::string> extra_notes) {
  if (!first_pass) return make_ledger(std::move(extra_notes));
  auto ledger = *first_pass;
  ledger.notes = notes;
  for (auto& note : extra_notes) ledger.notes.push_back(std::move(note));
  return ledger;
}

void GradientLocator::Impl::keep_first_pass() {
  const auto text = to_jsonl(*first_pass);
  try {
    write_file_atomically(first_pass_file(), text);
  } catch (const std::exception& error) {
    notes.push_back(std::string("The ledger of the first pass is not on disk: ") + error.what());
  }
  if (communicator && !communicator->publish(incident_key() + "/first_pass", text)) {
    notes.push_back("The ledger of the first pass did not reach the Store.");
  }
}

std::filesystem::path GradientLocator::Impl::first_pass_file() const {
  return directory / ("ledger_" + map.coordinates().file_suffix() + ".first_pass.jsonl");
}

void GradientLocator::Impl::remove_first_pass_file() const {
  if (!first_pass) return;
  std::error_code ignored;
  std::filesystem::remove(first_pass_file(), ignored);
}

/// Uses the first pass's ledgers of ranks that are gone or still in their re-run.
void GradientLocator::Impl::add_first_passes(const std::string& key, Gathered& texts,
                                             std::vector<std::string>& problems) {
  if (!has_gaps(texts) || !first_pass) return;
  auto first = communicator->gather(key + "/first_pass", Clock::now());
  for (std::size_t peer = 0; peer < texts.size(); ++peer) {
    if (texts[peer] || !first[peer] || static_cast<int>(peer) == rank()) continue;
    texts[peer] = std::move(first[peer]);
    problems.push_back("Rank " + std::to_string(peer) +
                       " has not come back from the re-run of the step: its ledger is that of the "
                       "first pass.");
  }
}

// The key prefix of one finding's ledgers and verdict. It holds the iteration, not a count of
// findings, because a rank that once concluded alone would count differently from then on.
std::string GradientLocator::Impl::incident_key() {
  return "incident/" + std::to_string(iteration) + "." + std::to_string(concluded[iteration]);
}

Verdict GradientLocator::Impl::judge(std::span<const Ledger> ledgers,
                                     std::vector<std::string> extra_notes,
                                     const std::string& own_end) const {
  Verdict verdict;
  try {
    verdict = locate(ledgers, world_size());
  } catch (const std::exception& error) {
    verdict.status = VerdictStatus::partial;
    verdict.notes.push_back(std::string("The ledgers could not be explained: ") + error.what());
  }
  verdict.run_id = run.id;
  verdict.iteration = iteration;
  for (auto& note : extra_notes) verdict.notes.push_back(std::move(note));
  if (communicator && communicator->monitor()) {
    auto problem = communicator->monitor()->problem();
    if (!problem.empty()) verdict.notes.push_back(std::move(problem));
  }
  verdict.launch = read_launch(options.checkpoint_dir, run.attempt,
                               first_iteration.value_or(iteration), iteration);
  add_endings(own_end, verdict);
  decide_on(verdict);
  return verdict;
}

/// The hosts and logs of ranks that sent no ledger, as their heartbeats named them.
static void add_places(const std::vector<LostRank>& lost, Verdict& verdict) {
  if (!verdict.layout) return;
  auto& known = verdict.layout->mentioned;
  for (const LostRank& each : lost) {
    const RankPlace& at = each.place;
    auto& logs = verdict.launch->logs;
    const bool has_own_log = !at.log.empty() && at.log != verdict.launch->log;
    if (has_own_log && logs.size() < kMostMentioned)
      logs.push_back({each.rank, at.log, at.log_begin});
    if (find_mentioned(verdict, each.rank) != nullptr || at.host.empty()) continue;
    if (known.size() >= kMostMentioned) break;
    RankCoordinates place;
    place.rank = each.rank;
    place.world_size = verdict.layout->first_rank.world_size;
    place.host = at.host;
    known.push_back(std::move(place));
  }
  std::ranges::sort(known, {}, &RankCoordinates::rank);
}

// A rank that ended by an exception has told the others why. Of one that was killed, or whose
// process was, its log may tell.
void GradientLocator::Impl::add_endings(const std::string& own_end, Verdict& verdict) const {
  std::vector<RankEnding>& endings = verdict.launch->endings;
  if (!own_end.empty()) endings.push_back({rank(), ending_kind_of(own_end), own_end});
  std::vector<int> unknown = verdict.silent_ranks;
  if (communicator && communicator->monitor()) {
    const auto lost = communicator->monitor()->lost();
    add_places(lost, verdict);
    for (const LostRank& each : lost) {
      if (each.ended_by.empty()) continue;
      endings.push_back({each.rank, ending_kind_of(each.ended_by), each.ended_by});
      std::erase(unknown, each.rank);
    }
  }
  for (auto& each : read_endings(*verdict.launch, unknown)) endings.push_back(std::move(each));
  std::ranges::stable_sort(endings, std::ranges::greater(), &RankEnding::kind);
  if (endings.size() > kMostMentioned) endings.resize(kMostMentioned);  // those that say most
}

void GradientLocator::Impl::decide_on(Verdict& verdict) const {
  verdict.decision = decide(verdict, earlier_verdicts(directory));
  const auto step = deciding_step(verdict);
  if (!step) return;
  const auto deciding = std::ranges::find(verdicts, *step, &Verdict::iteration);
  if (deciding != verdicts.end()) follow(*deciding, verdict);
}

Verdict GradientLocator::Impl::judge_alone(std::span<const Ledger> ledgers, bool is_finding,
                                           std::vector<std::string> run_notes,
                                           const std::string& own_end) const {
  Verdict verdict;
  if (is_finding) {
    verdict = judge(ledgers, std::move(run_notes), own_end);
    const auto lost = files->lost();
    std::erase_if(verdict.silent_ranks, [&](int rank) {  // the others were not asked, or still wait
      return !own_end.empty() || std::ranges::find(lost, rank, &LostRank::rank) == lost.end();
    });
    return verdict;
  }
  verdict.run_id = run.id;
  verdict.iteration = iteration;
  verdict.notes = std::move(run_notes);
  return verdict;
}

/// The ledgers of this step of the ranks whose collective has failed, too: those that lost the same
/// peer come out of it within seconds, except where they wait for others.
std::vector<Ledger> GradientLocator::Impl::ledgers_of_survivors(
    const Ledger& mine, std::vector<std::string>& problems) {
  std::vector<Ledger> ledgers;
  Gathered texts;
  if (communicator) {
    const auto patience = std::min<std::chrono::milliseconds>(options.gather_deadline, kSurvivors);
    texts = communicator->gather(incident_key() + "/ledger", Clock::now() + patience);
  }
  read_ledgers(texts, mine, ledgers, problems);
  return ledgers;
}

/// Of ranks that lost the same peer and read the same ledgers, the first with a finding prints the
/// verdict.
void GradientLocator::Impl::print_alone(const Verdict& verdict,
                                        std::span<const Ledger> ledgers) const {
  int first = rank();
  const auto lost = files->lost();
  for (const Ledger& each : ledgers) {
    const int other = each.coordinates.rank;
    const bool is_lost = std::ranges::find(lost, other, &LostRank::rank) != lost.end();
    if (has_finding(each) && !is_lost) first = std::min(first, other);
  }
  if (first == rank()) return print(verdict);
  std::cerr << "nanlocator: rank " + std::to_string(rank()) + " was bad in step " +
                   std::to_string(iteration) + ", too: rank " + std::to_string(first) +
                   " prints the verdict, and this rank's is in " + directory.string() +
                   "/verdict_rank" + std::to_string(rank()) + ".json\n"
            << std::flush;
}

void GradientLocator::Impl::keep_on_disk(const Ledger& ledger,
                                         std::vector<std::string>& problems) const {
  try {
    append_ledger(directory, ledger);
    remove_first_pass_file();
  } catch (const std::exception& error) {
    problems.push_back("The ledger of " + map.coordinates().describe() +
                       " is not on disk: " + error.what());
  }
}

History GradientLocator::Impl::history() const {
  auto history = scanner->history();
  history.run_id = run.id;
  history.attempt = run.attempt;
  history.coordinates = map.coordinates();
  return history;
}

// Runs after the ledger has been published, so that no rank waits for it.
void GradientLocator::Impl::keep_history_on_disk(std::vector<std::string>& problems) const {
  try {
    const auto latest = history();
    if (!latest.iterations.empty()) append_history(directory, latest);
  } catch (const std::exception& error) {
    problems.push_back("The history of " + map.coordinates().describe() +
                       " is not on disk: " + error.what());
  }
}

void GradientLocator::Impl::read_ledgers(const Gathered& texts, const Ledger& mine,
                                         std::vector<Ledger>& ledgers,
                                         std::vector<std::string>& problems) const {
  ledgers.push_back(mine);
  for (int peer = 0; peer < static_cast<int>(texts.size()); ++peer) {
    if (peer == rank() || !texts[peer]) continue;
    const auto source = "the ledger sent by rank " + std::to_string(peer);
    try {
      for (auto& ledger : ledgers_from_jsonl(*texts[peer], source)) {
        ledgers.push_back(std::move(ledger));
      }
    } catch (const std::exception& error) {
      problems.push_back(error.what());
    }
  }
}

/// Runs after the verdict, because large bundles take a shared disk some time. Returns those that
/// could not be written; they are on stderr by then.
std::vector<UnwrittenBundle> GradientLocator::Impl::write_bundles() {
  std::vector<UnwrittenBundle> unwritten;
  for (const auto& [prepared, storages] : std::exchange(kept_bundles, {})) {
    try {
      bundles->write(prepared);
    } catch (const std::exception& error) {
      unwritten.push_back({prepared.folder, "The bundle " + prepared.folder + " of rank " +
                                                std::to_string(rank()) +
                                                " could not be written: " + error.what()});
      std::cerr << "nanlocator: " + unwritten.back().problem + "\n" << std::flush;
    }
  }
  return unwritten;
}

/// For rank 0, which reads them when all ranks have reached the end.
void GradientLocator::Impl::publish_unwritten(const std::string& key,
                                              const std::vector<UnwrittenBundle>& unwritten) const {
  if (unwritten.empty()) return;
  auto json = nlohmann::json::array();
  for (const auto& [folder, problem] : unwritten) json.push_back({folder, problem});
  (void)communicator->publish(key + "/unwritten",
                              json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
}

void GradientLocator::Impl::take_unwritten(const std::string& key) const {
  std::vector<UnwrittenBundle> unwritten;
  for (const auto& text : communicator->gather(key + "/unwritten", Clock::now())) {
    if (!text) continue;
    try {
      using Pairs = std::vector<std::pair<std::string, std::string>>;
      for (const auto& [folder, problem] : nlohmann::json::parse(*text).get<Pairs>()) {
        unwritten.push_back({folder, problem});
      }
    } catch (const nlohmann::json::exception&) {
      // Not ours; the Store is shared. The rank has reported the problem on its stderr.
    }
  }
  files->add_unwritten(unwritten);
}

void GradientLocator::Impl::conclude_finding() {
  now_in(Activity::gathering);
  const auto key = incident_key();
  const int repetition = concluded[iteration]++;
  auto ledger = ledger_of_conclusion({});
  std::vector<std::string> problems;
  keep_on_disk(ledger, problems);  // first, because the Store dies with its host
  for (auto& problem : problems) ledger.notes.push_back(std::move(problem));
  if (communicator && !communicator->publish(key + "/ledger", to_jsonl(ledger))) {
    ledger.notes.push_back("This rank's ledger did not reach the Store.");
  }
  keep_history_on_disk(ledger.notes);
  if (rank() != 0) {  // its ledger is published, and no rank waits for it
    const auto unwritten = write_bundles();
    publish_unwritten(key, unwritten);
    verdicts.push_back(conclude_as_other_rank(ledger, key, unwritten));
  } else {
    verdicts.push_back(conclude_as_first_rank(ledger, key, repetition));
    tell_program();
  }
  go_on_or_stop(verdicts.back(), key);
}

/// Before the ranks leave: under torchrun the first that ends would end this one. They wait as for
/// a large bundle.
void GradientLocator::Impl::tell_program() const {
  if (is_concluded_by_guard || !options.on_finding) return;
  options.on_finding(std::filesystem::absolute(directory) / "verdict.json");
}

/// Runs on the guard's thread. The training thread is stuck for good; nothing of it is touched.
void GradientLocator::Impl::conclude_for_training(GradientLocator& locator,
                                                  const std::string& why) {
  locator.rerun_has_failed("the training thread of rank " + std::to_string(rank()) +
                           " did not come back from it, though its collectives were aborted; " +
                           why);
  ++incidents;
  is_concluded_by_guard = true;  // the training thread may hold what the program would need
  conclude_finding();
  std::cerr << "nanlocator: rank " + std::to_string(rank()) +
                   " ends here: its training thread has not come back from the re-run of step " +
                   std::to_string(iteration) + " (" + why + ")\n"
            << std::flush;
  std::_Exit(EXIT_FAILURE);
}

/// Waits longer for ranks that answer and are still busy with this finding.
Gathered GradientLocator::Impl::gather_ledgers(const std::string& key) {
  const auto limit = Clock::now() + kBusyPatience * options.gather_deadline;
  for (;;) {
    auto texts = communicator->gather(key + "/ledger", Clock::now() + options.gather_deadline);
    if (Clock::now() > limit || !is_waiting_for_any(texts)) return texts;
  }
}

Verdict GradientLocator::Impl::conclude_as_first_rank(const Ledger& mine, const std::string& key,
                                                      int repetition) {
  std::vector<Ledger> ledgers;
  std::vector<std::string> problems;
  Gathered texts;
  if (communicator) {
    texts = gather_ledgers(key);
    add_first_passes(key, texts, problems);
    if (auto text = RerunGuard::standstill(*communicator, key); !text.empty()) {
      problems.push_back(std::move(text));
    }
  }
  read_ledgers(texts, mine, ledgers, problems);
  auto verdict = judge(ledgers, std::move(problems));
  const auto suffix = repetition == 0 ? "" : "-" + std::to_string(repetition);
  const auto write = [&] {
    files->write(verdict, VerdictScope::all_ranks, outcome_of(options.on_bad, verdict.rerun),
                 "step" + std::to_string(iteration) + suffix + ".json");
  };
  write();
  if (read_checkpoints(verdict, options, kReadingCheckpoints)) {
    decide_on(verdict);
    write();
  }
  if (communicator) (void)communicator->publish(key + "/verdict", to_json(verdict));
  print(verdict);
  const auto unwritten = write_bundles();
  files->add_unwritten(unwritten);
  leave_out(unwritten, verdict);
  write_page(verdict, std::move(ledgers));
  return verdict;
}

// Runs after the verdict, as no rank waits for it. From other ranks' histories and bundles it shows
// those already on a shared disk. `nanlocator report --html` makes it again.
void GradientLocator::Impl::write_page(const Verdict& verdict, std::vector<Ledger> ledgers) const {
  const auto path = directory / "report.html";
  try {
    RunReport report;
    report.verdict = verdict;
    report.run_dir = std::filesystem::absolute(directory).string();
    report.ledgers = std::move(ledgers);
    add_details(report, directory);
    write_file_atomically(path, format_html(report));
    std::cerr << "  report:      " + std::filesystem::absolute(path).string() + "\n\n"
              << std::flush;
  } catch (const std::exception& error) {
    std::cerr << "nanlocator: report.html was not written: " + std::string(error.what()) + "\n"
              << std::flush;
  }
}

Verdict GradientLocator::Impl::conclude_as_other_rank(
    const Ledger& mine, const std::string& key, const std::vector<UnwrittenBundle>& unwritten) {
  std::string reason = "Rank 0 sent no verdict in time";
  if (const auto text = fetch_from_first_rank(key + "/verdict")) {
    try {
      auto verdict = verdict_from_json(*text, "the verdict sent by rank 0");
      files->take_over(verdict, outcome_of(options.on_bad, verdict.rerun));
      return verdict;
    } catch (const std::exception& error) {
      reason = error.what();
    }
  }
  std::vector<Ledger> ledgers;
  std::vector<std::string> problems;
  auto texts = communicator->gather(key + "/ledger", Clock::now());
  add_first_passes(key, texts, problems);
  read_ledgers(texts, mine, ledgers, problems);
  problems.push_back(reason + ". This is what rank " + std::to_string(rank()) + " makes of the " +
                     std::to_string(ledgers.size()) + " of " + std::to_string(world_size()) +
                     " ledgers that it could read.");
  auto verdict = judge(ledgers, std::move(problems));
  verdict.status = VerdictStatus::partial;
  leave_out(unwritten, verdict);
  files->write(verdict, VerdictScope::all_ranks, outcome_of(options.on_bad, verdict.rerun));
  print(verdict);
  return verdict;
}

/// This rank's findings of the current step, read on a thread other than the training thread.
std::optional<Ledger> GradientLocator::Impl::ledger_at_end() {
  switch (files->activity()) {
    case Activity::agreement: {  // the training thread waits, and uses no scan
      auto ledger = make_ledger({});
      std::vector<std::string> problems;
      keep_on_disk(ledger, problems);
      return ledger;
    }
    case Activity::rerun: {  // the ledger on disk
      auto ledgers = ledgers_from_jsonl(read_file(first_pass_file()), first_pass_file().string());
      if (!ledgers.empty()) return ledgers.back();
      return std::nullopt;
    }
    default:
      return std::nullopt;
  }
}

/// Runs on SIGTERM; see step/last_words.hpp.
void GradientLocator::Impl::write_last_words() noexcept {
  try {
    const auto ledger = ledger_at_end();
    if (!ledger || ledger->sightings.empty()) return;
    auto verdict = judge({&*ledger, 1}, {"SIGTERM ended " + map.coordinates().describe() +
                                         " before the ranks could agree on this step."});
    verdict.status = VerdictStatus::partial;
    files->write(verdict, VerdictScope::alone, kTerminated);
    // One line per host, and of each rank that may have made it itself.
    const bool may_be_its_own = std::ranges::any_of(ledger->sightings, [](const Sighting& each) {
      return each.phase != Phase::grad_reduced && each.phase != Phase::grad_norm;
    });
    if (map.coordinates().local_rank > 0 && !may_be_its_own) return;
    std::cerr << "nanlocator: SIGTERM ended rank " + std::to_string(rank()) + " in step " +
                     std::to_string(iteration) +
                     ", which was not finite: NaN or Inf. What all ranks left: nanlocator report " +
                     shell_word(directory.string()) + "\n"
              << std::flush;
  } catch (...) {
    // The process ends; its ledger may be on disk.
  }
}

// Before the error is raised under `stop`, every rank has its ledger, bundles and verdict on disk,
// because the first rank that ends breaks connections and, under torchrun, ends the other ranks.
void GradientLocator::Impl::go_on_or_stop(const Verdict& verdict, const std::string& key) {
  if (outcome_of(options.on_bad, verdict.rerun) != kStopped) return now_in(Activity::training);
  files->now_in(Activity::stopped, iteration);
  if (!communicator) return;
  const auto limit = Clock::now() + kBusyPatience * options.gather_deadline;
  (void)communicator->pass_barrier(
      key + "/on_disk", verdict.silent_ranks, Clock::now() + options.gather_deadline,
      [&](int peer) {  // a bundle may take some time
        const auto* const monitor = communicator->monitor();
        return monitor && Clock::now() < limit && monitor->is_locating(peer, iteration);
      });
  if (rank() == 0) take_unwritten(key);
  if (communicator->monitor()) communicator->monitor()->stop(iteration);
}

}  // namespace nanlocator::inline step_room
