#include "nanlocator/gradients/gradient_locator.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "gradients/backward_order.hpp"
#include "gradients/run_directory.hpp"
#include "gradients/verdict_files.hpp"
#include "nanlocator/locate/locate.hpp"
#include "nanlocator/record/atomic_file.hpp"
#include "nanlocator/report/html.hpp"
#include "nanlocator/report/read_run.hpp"
#include "nanlocator/report/terminal.hpp"

namespace nanlocator {
namespace {

using Clock = std::chrono::steady_clock;

// Ranks come to the constructor minutes apart where some still read a checkpoint: with the default
// gather_deadline they get five minutes, c10d's own time-out for a Store.
constexpr int kInstallPatience = 10;
constexpr std::string_view kStopped = "stopped";

enum class State {
  before_first_step,
  scanning,
  agreeing,  // between start_agreement and finish_agreement
  bad,       // until conclude or dismiss
};

void check_options(const LocatorOptions& options) {
  if (options.gather_deadline.count() <= 0) {
    throw UsageError("gather_deadline is " + std::to_string(options.gather_deadline.count()) +
                     " ms; it must be positive.");
  }
  if (options.threads < 1) {
    throw UsageError("threads is " + std::to_string(options.threads) + "; it must be at least 1.");
  }
  if (options.max_incidents < 1) {
    throw UsageError("max_incidents is " + std::to_string(options.max_incidents) +
                     "; it must be at least 1.");
  }
}

ParameterMap with_run_id(const ParameterMap& map, const std::string& run_id) {
  return {map.coordinates(), map.parameters(), run_id};
}

// Where the flag is made: with the gradients, where the group can reduce it there; every rank must
// choose alike, so this depends on the layout alone and is part of the handshake.
at::DeviceType choose_flag_device(const RankCoordinates& coordinates,
                                  const Communicator* communicator) {
  const auto home = coordinates.device.starts_with("cuda") ? at::kCUDA : at::kCPU;
  if (communicator == nullptr || communicator->reduces_on(home)) return home;
  const auto other = home == at::kCPU ? at::kCUDA : at::kCPU;
  return communicator->reduces_on(other) ? other : home;
}

at::Device current_device(at::DeviceType type) {
  if (type == at::kCPU) return at::kCPU;
  return c10::impl::VirtualGuardImpl(type).getDevice();
}

// torch.distributed's env:// rendezvous starts the Store in rank 0's process, unless torchrun's
// agent hosts it (rendezvous.py, _create_c10d_store).
bool hosts_rank_zero_the_store() {
  const char* const uses_agent = std::getenv("TORCHELASTIC_USE_AGENT_STORE");
  return uses_agent == nullptr || std::string_view(uses_agent) != "True";
}

}  // namespace

std::string_view name_of(Level level) noexcept {
  switch (level) {
    case Level::grads:
      return "grads";
    case Level::boundaries:
      return "boundaries";
    case Level::modules:
      return "modules";
    case Level::operators:
      return "operators";
  }
  return "unknown";
}

std::string_view name_of(Policy policy) noexcept {
  switch (policy) {
    case Policy::report:
      return "report";
    case Policy::stop:
      return "stop";
    case Policy::skip:
      return "skip";
    case Policy::recover:
      return "recover";
  }
  return "unknown";
}

std::string_view name_of(RerunPolicy policy) noexcept {
  switch (policy) {
    case RerunPolicy::never:
      return "never";
    case RerunPolicy::on_bad:
      return "on_bad";
    case RerunPolicy::always:
      return "always";
  }
  return "unknown";
}

std::string_view outcome_of(Policy policy, const RerunOutcome& rerun) noexcept {
  switch (policy) {
    case Policy::report:
      return "reported";
    case Policy::skip:
      return "skipped";
    case Policy::recover:
      return rerun.reproduced == false ? "recovered" : kStopped;
    case Policy::stop:
      break;
  }
  return kStopped;
}

NonFiniteGradientError::NonFiniteGradientError(Verdict verdict,
                                               const std::filesystem::path& run_dir)
    : Error(format_verdict(verdict, {.run_dir = run_dir.string()})), verdict_(std::move(verdict)) {}

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
  std::filesystem::path directory;
  std::unique_ptr<VerdictFiles> files;

  at::DeviceType flag_type;
  at::Tensor flag;  // int32 [1], ours: a reduction that outlives us writes to no freed memory
  at::Tensor
      host_flag;  // pinned copy of it, where there is no communicator and the flag is on a device
  std::optional<c10::Event> flag_is_copied;

  State state = State::before_first_step;
  std::int64_t iteration = 0;
  std::optional<double> gradient_norm;
  std::optional<double> loss_scale;  // that an overflow lowers
  std::vector<std::string> notes;
  std::vector<Birth> births;
  int questions = 0;  // of this step, put through the Store
  std::vector<Sighting> crossed;
  std::vector<CrossingCoverage> crossings;
  std::vector<Microbatch> microbatches;
  std::optional<Rerun> rerun;
  std::unique_ptr<BundleStore> bundles;
  std::vector<Verdict> verdicts;
  Verdict past_limit;  // what conclude returns after max_incidents
  std::int64_t incidents = 0;
  std::int64_t dismissed = 0;
  std::map<std::int64_t, int> concluded;  // how often, by iteration: a step may be repeated
  // By conclude_alone in this step: how many sightings and lost ranks.
  std::optional<std::pair<std::size_t, std::size_t>> told_alone;
  bool has_waited_for_loss = false;

  [[nodiscard]] int rank() const { return communicator ? communicator->rank() : 0; }
  [[nodiscard]] int world_size() const { return communicator ? communicator->size() : 1; }
  [[nodiscard]] bool is_norm_bad() const { return gradient_norm && !std::isfinite(*gradient_norm); }

  // --- install ---
  void agree_on_options(Deadline deadline);
  void open_run(Deadline deadline);
  void write_files();
  void use_map(ParameterMap new_map);

  void watch_ranks();

  // --- other ranks ---
  void now_in(Activity activity) const;
  void wait_for_loss();
  bool finish_flag_or_conclude_alone(GradientLocator& locator);

  // --- a finding ---
  void forget_step();
  void forget_step_quietly() noexcept;
  Ledger make_ledger(std::vector<std::string> extra_notes);
  std::string incident_key();
  Verdict judge(std::span<const Ledger> ledgers, std::vector<std::string> extra_notes) const;
  void write_page(const Verdict& verdict, std::vector<Ledger> ledgers) const;
  Verdict judge_alone(const Ledger& ledger, bool is_finding, std::vector<std::string> notes) const;
  void keep_on_disk(const Ledger& ledger, std::vector<std::string>& problems) const;
  [[nodiscard]] History history() const;
  void keep_history_on_disk(std::vector<std::string>& problems) const;
  void print(const Verdict& verdict) const {
    std::cerr << format_verdict(verdict, {.run_dir = directory.string()}) << std::flush;
  }
  void read_ledgers(const Gathered& texts, const Ledger& mine, std::vector<Ledger>& ledgers,
                    std::vector<std::string>& problems) const;
  Verdict conclude_as_first_rank(const Ledger& mine, const std::string& key, int repetition,
                                 Deadline deadline);
  Verdict conclude_as_other_rank(const Ledger& mine, const std::string& key, Deadline deadline);
  void go_on_or_stop(const Verdict& verdict, const std::string& key);
};

// ------------------------------------------------------------------------------------------
// install

void GradientLocator::Impl::agree_on_options(Deadline deadline) {
  if (!communicator) return;
  const auto& coordinates = map.coordinates();
  if (coordinates.rank != communicator->rank() || coordinates.world_size != communicator->size()) {
    throw UsageError("The map's coordinates say rank " + std::to_string(coordinates.rank) + " of " +
                     std::to_string(coordinates.world_size) + ", the communicator rank " +
                     std::to_string(communicator->rank()) + " of " +
                     std::to_string(communicator->size()) +
                     ". The communicator's group must hold all ranks of the job.");
  }
  communicator->handshake(agreed_options_json(options, c10::DeviceTypeName(flag_type, true)),
                          deadline);
}

void GradientLocator::Impl::open_run(Deadline deadline) {
  // What rank 0 decides or why it could not, for every rank to act on alike.
  nlohmann::json opened;
  if (rank() == 0) {
    try {
      run = start_run(options.output_dir);
      opened = {{"run", run.id}, {"attempt", run.attempt}, {"error", ""}};
    } catch (const IoError& error) {
      opened = {{"run", ""}, {"attempt", 0}, {"error", error.what()}};
    }
  }
  if (communicator) {
    const auto text = opened.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    opened = nlohmann::json::parse(communicator->broadcast("run", text, deadline));
  }
  if (const auto error = opened.at("error").get<std::string>(); !error.empty()) {
    throw IoError(error);
  }
  run = {opened.at("run").get<std::string>(), opened.at("attempt").get<int>()};
  directory = run_directory(options.output_dir, run.attempt);
  bundles = std::make_unique<BundleStore>(directory, options.bundles);

  // A rank that cannot write tells the others, instead of leaving them in training's first
  // collective.
  std::string outcome = "written";
  try {
    ensure_directory(directory);
    write_files();
  } catch (const IoError& error) {
    outcome = error.what();
  }
  if (communicator) {
    const nlohmann::json statement = {{"files", outcome}};
    try {
      communicator->handshake(
          statement.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace), deadline);
    } catch (const AgreementError&) {
      if (outcome == "written") throw;
    }
  }
  if (outcome != "written") throw IoError(outcome);
}

void GradientLocator::Impl::write_files() {
  map = with_run_id(map, run.id);
  map.write(directory);
  if (rank() == 0) {
    write_file_atomically(directory / "run.json", run_json(run, options, map.coordinates()));
  }
}

void GradientLocator::Impl::use_map(ParameterMap new_map) {
  scanner.reset();
  map = std::move(new_map);
  scanner = std::make_unique<GradientScanner>(map, options.threads);
  order = std::make_unique<BackwardOrder>(map.size());
}

// The monitor's thread outlives no locator: ~GradientLocator stops it.
void GradientLocator::Impl::watch_ranks() {
  files = std::make_unique<VerdictFiles>(run, directory, map.coordinates());
  if (!communicator || world_size() == 1) return;
  communicator->watch_ranks(map.coordinates().describe(),
                            MonitorTimes::for_deadline(options.gather_deadline),
                            [this](const std::vector<LostRank>& lost) { files->write_lost(lost); });
}

// ------------------------------------------------------------------------------------ other ranks

void GradientLocator::Impl::now_in(Activity activity) const {
  files->now_in(activity, iteration);
  if (communicator && communicator->monitor()) communicator->monitor()->now_in(activity, iteration);
}

// After a collective has failed, once per step. Where the Store has gone with it, so has the rank
// that hosts it.
void GradientLocator::Impl::wait_for_loss() {
  if (!communicator || !communicator->monitor() || std::exchange(has_waited_for_loss, true)) return;
  const auto& monitor = *communicator->monitor();
  const auto lost = monitor.wait_for_loss(Clock::now() + options.gather_deadline);
  const bool is_store_gone = !monitor.problem().empty();
  if (lost.empty() && is_store_gone && rank() != 0 && hosts_rank_zero_the_store()) {
    LostRank host;
    host.place = "rank 0, whose process hosts the Store,";
    host.iteration = iteration;
    files->write_lost({host});
  } else if (!lost.empty()) {
    files->write_lost(lost);  // the monitor may not have come to it
  }
}

bool GradientLocator::Impl::finish_flag_or_conclude_alone(GradientLocator& locator) {
  try {
    return communicator->finish_flag();
  } catch (const AgreementError& error) {
    std::string text = error.what();
    const bool is_told = locator.conclude_alone(text, Failure::of_peers) != nullptr;
    for (const auto& each : files->lost()) text += "\n" + each.describe() + ".";
    if (is_told) text += "\nThis rank's verdict is in " + directory.string() + ".";
    throw AgreementError(text);
  }
}

// --------------------------------------------------------------------------------------- a finding

void GradientLocator::Impl::forget_step() {
  scanner->begin_step();
  gradient_norm.reset();
  loss_scale.reset();
  notes.clear();
  births.clear();
  questions = 0;
  crossed.clear();
  crossings.clear();
  microbatches.clear();
  rerun.reset();
  told_alone.reset();
  has_waited_for_loss = false;
}

// After a finding: a device that has failed is training's to report, not the verdict's to hide.
void GradientLocator::Impl::forget_step_quietly() noexcept {
  try {
    forget_step();
  } catch (...) {
  }
}

// What this rank saw in this step. Does not throw: a device that has failed leaves a note.
Ledger GradientLocator::Impl::make_ledger(std::vector<std::string> extra_notes) {
  Ledger ledger;
  ledger.run_id = run.id;
  ledger.attempt = run.attempt;
  ledger.iteration = iteration;
  ledger.coordinates = map.coordinates();
  ledger.gradient_norm = gradient_norm;
  ledger.loss_scale = loss_scale;
  ledger.level = name_of(options.level);
  ledger.on_bad = name_of(options.on_bad);
  ledger.births = births;
  ledger.sightings = crossed;
  ledger.crossings = crossings;
  ledger.microbatches = microbatches;
  ledger.rerun = rerun;
  ledger.notes = notes;
  for (auto& note : extra_notes) ledger.notes.push_back(std::move(note));
  try {
    auto collected = scanner->collect(iteration);
    for (auto& sighting : collected.sightings) ledger.sightings.push_back(std::move(sighting));
    ledger.coverage = std::move(collected.coverage);
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
                                     info.is_tp_duplicate, info.is_tied, info.chunk, info.shard});
  }
  return ledger;
}

// Below this key lie the ledgers and the verdict of one finding. It holds the iteration, not a
// count of findings: a rank that concluded alone once would count differently ever after.
std::string GradientLocator::Impl::incident_key() {
  return "incident/" + std::to_string(iteration) + "." + std::to_string(concluded[iteration]);
}

Verdict GradientLocator::Impl::judge(std::span<const Ledger> ledgers,
                                     std::vector<std::string> extra_notes) const {
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
  return verdict;
}

Verdict GradientLocator::Impl::judge_alone(const Ledger& ledger, bool is_finding,
                                           std::vector<std::string> run_notes) const {
  if (is_finding) return judge({&ledger, 1}, std::move(run_notes));
  Verdict verdict;  // nothing to locate: the other ranks are not silent, they were not asked
  verdict.run_id = run.id;
  verdict.iteration = iteration;
  verdict.notes = std::move(run_notes);
  return verdict;
}

void GradientLocator::Impl::keep_on_disk(const Ledger& ledger,
                                         std::vector<std::string>& problems) const {
  try {
    append_ledger(directory, ledger);
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

// After the ledger has been published: nobody waits for it.
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

Verdict GradientLocator::Impl::conclude_as_first_rank(const Ledger& mine, const std::string& key,
                                                      int repetition, Deadline deadline) {
  std::vector<Ledger> ledgers;
  std::vector<std::string> problems;
  read_ledgers(communicator ? communicator->gather(key + "/ledger", deadline) : Gathered{}, mine,
               ledgers, problems);
  auto verdict = judge(ledgers, std::move(problems));
  const auto suffix = repetition == 0 ? "" : "-" + std::to_string(repetition);
  files->write(verdict, VerdictScope::all_ranks, outcome_of(options.on_bad, verdict.rerun),
               "step" + std::to_string(iteration) + suffix + ".json");
  if (communicator) (void)communicator->publish(key + "/verdict", to_json(verdict));
  print(verdict);
  write_page(verdict, std::move(ledgers));
  return verdict;
}

// When the verdict is out, as nobody waits for it; of the other ranks' histories and bundles it
// shows those that are on a shared disk by now. `nanlocator report --html` makes it again.
void GradientLocator::Impl::write_page(const Verdict& verdict, std::vector<Ledger> ledgers) const {
  const auto path = directory / "report.html";
  try {
    RunReport report;
    report.verdict = verdict;
    report.run_dir = directory.string();
    report.ledgers = std::move(ledgers);
    add_details(report, directory);
    write_file_atomically(path, format_html(report));
    std::cerr << "  page       " + path.string() + "\n\n" << std::flush;
  } catch (const std::exception& error) {
    std::cerr << "nanlocator: report.html was not written: " + std::string(error.what()) + "\n"
              << std::flush;
  }
}

Verdict GradientLocator::Impl::conclude_as_other_rank(const Ledger& mine, const std::string& key,
                                                      Deadline deadline) {
  std::string reason = "Rank 0 handed out no verdict in time";
  if (const auto text = communicator->fetch(key + "/verdict", 0, deadline)) {
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
  read_ledgers(communicator->gather(key + "/ledger", Clock::now()), mine, ledgers, problems);
  problems.push_back(reason + ". This is what rank " + std::to_string(rank()) + " makes of the " +
                     std::to_string(ledgers.size()) + " of " + std::to_string(world_size()) +
                     " ledgers that it could read.");
  auto verdict = judge(ledgers, std::move(problems));
  verdict.status = VerdictStatus::partial;
  files->write(verdict, VerdictScope::all_ranks, outcome_of(options.on_bad, verdict.rerun));
  print(verdict);
  return verdict;
}

// Before the error leaves under `stop`, every rank has its ledger, bundles and verdict on disk: the
// first rank that ends takes connections, and under torchrun the other ranks, with it.
void GradientLocator::Impl::go_on_or_stop(const Verdict& verdict, const std::string& key) {
  if (outcome_of(options.on_bad, verdict.rerun) != kStopped) return now_in(Activity::training);
  files->now_in(Activity::stopped, iteration);
  if (!communicator) return;
  (void)communicator->pass_barrier(key + "/on_disk", verdict.silent_ranks,
                                   Clock::now() + options.gather_deadline);
  if (communicator->monitor()) communicator->monitor()->stop(iteration);
}

// ---------------------------------------------------------------------------------------- the
// class

GradientLocator::GradientLocator(ParameterMap map, LocatorOptions options,
                                 std::shared_ptr<Communicator> communicator) {
  check_options(options);
  const auto deadline = Clock::now() + kInstallPatience * options.gather_deadline;
  impl_ = std::make_unique<Impl>(std::move(map), std::move(options), std::move(communicator));
  impl_->agree_on_options(deadline);
  impl_->open_run(deadline);
  impl_->use_map(std::move(impl_->map));
  impl_->watch_ranks();
}

GradientLocator::~GradientLocator() {
  if (impl_->communicator) impl_->communicator->stop_watching();
}

const ParameterMap& GradientLocator::map() const noexcept {
  return impl_->map;
}
const LocatorOptions& GradientLocator::options() const noexcept {
  return impl_->options;
}
const std::filesystem::path& GradientLocator::run_dir() const noexcept {
  return impl_->directory;
}
const std::string& GradientLocator::run_id() const noexcept {
  return impl_->run.id;
}
std::int64_t GradientLocator::iteration() const noexcept {
  return impl_->iteration;
}
const std::vector<Verdict>& GradientLocator::verdicts() const noexcept {
  return impl_->verdicts;
}
std::int64_t GradientLocator::incidents() const noexcept {
  return impl_->incidents;
}
std::int64_t GradientLocator::dismissed() const noexcept {
  return impl_->dismissed;
}

void GradientLocator::set_map(ParameterMap map) {
  if (impl_->state == State::agreeing || impl_->state == State::bad) {
    throw UsageError(
        "set_map: a step is being agreed on. Call it after finish_agreement and, where that was "
        "true, after conclude or dismiss.");
  }
  map = with_run_id(map, impl_->run.id);
  map.write(impl_->directory);
  impl_->use_map(std::move(map));
}

void GradientLocator::now_in(Activity activity) {
  impl_->now_in(activity);
}

void GradientLocator::begin_step(std::int64_t iteration) {
  if (impl_->state == State::agreeing) {
    throw UsageError("begin_step: start_agreement was called in step " +
                     std::to_string(impl_->iteration) + " and finish_agreement was not.");
  }
  if (impl_->state == State::bad) {
    throw UsageError("begin_step: step " + std::to_string(impl_->iteration) +
                     " was bad and neither conclude nor dismiss was called.");
  }
  impl_->forget_step();
  impl_->iteration = iteration;
  impl_->state = State::scanning;
  impl_->now_in(Activity::forward_backward);
}

void GradientLocator::scan(Phase phase, std::uint64_t group, std::string_view role,
                           std::span<const GradientView> views) {
  if (impl_->state == State::before_first_step) throw UsageError("scan: call begin_step first.");
  impl_->scanner->scan(phase, group, role, views);
}

void GradientLocator::scan_losses(std::span<const LossView> losses) {
  if (impl_->state == State::before_first_step) {
    throw UsageError("scan_losses: call begin_step first.");
  }
  impl_->scanner->scan_losses(losses);
}

void GradientLocator::gradient_is_ready(std::int64_t id) {
  (void)impl_->map.at(id);
  impl_->order->record(id);
}

void GradientLocator::set_gradient_norm(double norm) {
  impl_->gradient_norm = norm;
}

void GradientLocator::set_loss_scale(double loss_scale, bool falls_on_overflow) {
  impl_->scanner->set_loss_scale(loss_scale);
  impl_->loss_scale = falls_on_overflow ? std::optional(loss_scale) : std::nullopt;
}

void GradientLocator::add_note(std::string note) {
  impl_->notes.push_back(std::move(note));
}

void GradientLocator::set_births(std::vector<Birth> births) {
  impl_->births = std::move(births);
}

void GradientLocator::set_crossings(std::vector<Sighting> sightings,
                                    std::vector<CrossingCoverage> coverage) {
  impl_->crossed = std::move(sightings);
  impl_->crossings = std::move(coverage);
}

void GradientLocator::set_microbatches(std::vector<Microbatch> microbatches) {
  impl_->microbatches = std::move(microbatches);
}

void GradientLocator::set_rerun(Rerun rerun) {
  impl_->rerun = std::move(rerun);
}

BundleStore& GradientLocator::bundles() noexcept {
  return *impl_->bundles;
}

std::vector<GradientScanner::Scanned> GradientLocator::scanned_gradients() {
  return impl_->scanner->scanned_gradients();
}

bool GradientLocator::is_true_anywhere(bool mine) {
  if (!impl_->communicator) return mine;
  const at::NoGradGuard no_grad;
  const at::RecordFunctionGuard unobserved(false);
  auto flag =
      at::full({1}, mine ? 1 : 0,
               at::TensorOptions().dtype(at::kInt).device(current_device(impl_->flag_type)));
  impl_->communicator->start_flag(flag);
  return impl_->finish_flag_or_conclude_alone(*this);
}

bool GradientLocator::is_true_anywhere_by_store(bool mine) {
  auto& impl = *impl_;
  if (!impl.communicator) return mine;
  const auto key = impl.incident_key() + "/question/" + std::to_string(impl.questions++);
  (void)impl.communicator->publish(key, mine ? "1" : "0");
  const auto answers = impl.communicator->gather(key, Clock::now() + impl.options.gather_deadline);
  std::vector<int> missing;
  bool is_true = mine;
  for (int peer = 0; peer < static_cast<int>(answers.size()); ++peer) {
    if (peer == impl.rank()) continue;
    if (!answers[peer]) missing.push_back(peer);
    is_true = is_true || answers[peer] == "1";
  }
  if (missing.empty()) return is_true;
  std::string text;
  for (const int peer : missing) text += (text.empty() ? "" : ", ") + std::to_string(peer);
  throw AgreementError("No answer from rank " + text + " at the end of the step's repeat.");
}

void GradientLocator::start_agreement() {
  if (impl_->state != State::scanning) {
    throw UsageError(impl_->state == State::before_first_step
                         ? "start_agreement: call begin_step first."
                         : "start_agreement: the agreement before has not been finished, or its "
                           "finding not concluded. Call finish_agreement, then conclude or dismiss "
                           "where it is true.");
  }
  const at::NoGradGuard no_grad;
  const at::RecordFunctionGuard unobserved(false);
  impl_->order->end_step();
  const auto device = current_device(impl_->flag_type);
  if (!impl_->flag.defined()) {
    impl_->flag = at::zeros({1}, at::TensorOptions().dtype(at::kInt).device(device));
  }
  impl_->flag.copy_(impl_->scanner->flag(impl_->flag.device()), /*non_blocking=*/true);
  // A norm that is known by now is agreed on. One that is set later counts on this rank alone: the
  // frameworks compute the same norm on all ranks; where they do not, conclude costs a deadline.
  if (impl_->is_norm_bad()) impl_->flag.fill_(1);
  if (impl_->communicator) {
    impl_->communicator->start_flag(impl_->flag);
  } else if (!device.is_cpu()) {
    if (!impl_->host_flag.defined()) {
      impl_->host_flag = at::empty({1}, at::TensorOptions().dtype(at::kInt).pinned_memory(true));
      impl_->flag_is_copied.emplace(device.type());
    }
    impl_->host_flag.copy_(impl_->flag, /*non_blocking=*/true);
    impl_->flag_is_copied->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  }
  impl_->scanner->remember(impl_->iteration);  // after the flag, which does not wait for it
  impl_->state = State::agreeing;
  impl_->now_in(Activity::agreement);
}

bool GradientLocator::finish_agreement() {
  if (impl_->state != State::agreeing) {
    throw UsageError("finish_agreement: call start_agreement first.");
  }
  const at::NoGradGuard no_grad;
  const at::RecordFunctionGuard unobserved(false);
  impl_->state = State::scanning;  // also where the reduction throws, for conclude_alone
  bool is_bad = false;
  if (impl_->communicator) {
    is_bad = impl_->finish_flag_or_conclude_alone(*this);
  } else if (impl_->flag.is_cpu()) {
    is_bad = impl_->flag.item<std::int32_t>() != 0;
  } else {
    impl_->flag_is_copied->synchronize();
    is_bad = impl_->host_flag.item<std::int32_t>() != 0;
  }
  is_bad = is_bad || impl_->is_norm_bad();
  if (is_bad) {
    impl_->state = State::bad;
  } else {
    impl_->now_in(Activity::training);
  }
  return is_bad;
}

const Verdict& GradientLocator::conclude() {
  auto& impl = *impl_;
  const bool is_late_norm = impl.state == State::scanning && impl.is_norm_bad();
  if (impl.state != State::bad && !is_late_norm) {
    throw UsageError("conclude: nothing bad was agreed on. Call it after a true finish_agreement.");
  }
  ++impl.incidents;
  impl.state = State::scanning;
  if (impl.options.on_bad != Policy::stop && impl.incidents > impl.options.max_incidents) {
    impl.past_limit = Verdict{};
    // On all ranks alike: the repeat's outcome is agreed on, and `recover` must go by it.
    if (impl.rerun) impl.past_limit.rerun = {true, impl.rerun->reproduced, {}};
    impl.past_limit.run_id = impl.run.id;
    impl.past_limit.iteration = impl.iteration;
    impl.past_limit.status = VerdictStatus::partial;
    impl.past_limit.notes.push_back(
        "Finding " + std::to_string(impl.incidents) + " of this run: past max_incidents (" +
        std::to_string(impl.options.max_incidents) + ") findings are counted, not located.");
    impl.forget_step_quietly();
    impl.now_in(Activity::training);
    return impl.past_limit;
  }
  impl.now_in(Activity::gathering);
  const auto deadline = Clock::now() + impl.options.gather_deadline;
  const auto key = impl.incident_key();
  const int repetition = impl.concluded[impl.iteration]++;
  auto ledger = impl.make_ledger({});
  std::vector<std::string> problems;
  impl.keep_on_disk(ledger, problems);  // first: the Store dies with its host
  for (auto& problem : problems) ledger.notes.push_back(std::move(problem));
  if (impl.communicator && !impl.communicator->publish(key + "/ledger", to_jsonl(ledger))) {
    ledger.notes.push_back("This rank's ledger did not reach the Store.");
  }
  impl.keep_history_on_disk(ledger.notes);
  // Rank 0 may wait for silent ranks until its deadline, and locates only then.
  impl.verdicts.push_back(
      impl.rank() == 0
          ? impl.conclude_as_first_rank(ledger, key, repetition, deadline)
          : impl.conclude_as_other_rank(ledger, key, deadline + impl.options.gather_deadline / 2));
  impl.forget_step_quietly();
  impl.go_on_or_stop(impl.verdicts.back(), key);
  return impl.verdicts.back();
}

const Verdict* GradientLocator::conclude_alone(std::string reason, Failure failure) {
  auto& impl = *impl_;
  auto ledger = impl.make_ledger({reason});
  const bool is_finding = !ledger.sightings.empty() || impl.is_norm_bad();
  const bool is_first = !impl.told_alone;
  std::vector<std::string> notes;
  if (is_finding && (is_first || impl.told_alone->first != ledger.sightings.size())) {
    impl.keep_on_disk(ledger, notes);  // before any wait
    if (impl.communicator) {
      (void)impl.communicator->publish(impl.incident_key() + "/ledger", to_jsonl(ledger));
    }
    impl.keep_history_on_disk(notes);
  }
  if (is_finding && is_first) ++impl.incidents;
  if (impl.state == State::bad) impl.state = State::scanning;
  if (failure == Failure::of_peers) impl.wait_for_loss();
  const auto lost = impl.files->lost();
  if (!is_finding && (lost.empty() || failure == Failure::own)) {
    return is_first ? nullptr : &impl.verdicts.back();
  }
  const auto told = std::pair(ledger.sightings.size(), lost.size());
  if (impl.told_alone == told) return &impl.verdicts.back();  // nothing new since
  impl.told_alone = told;
  if (!is_finding) notes.push_back(std::move(reason));
  auto verdict = impl.judge_alone(ledger, is_finding, std::move(notes));
  verdict.status = VerdictStatus::partial;
  impl.files->write(verdict, VerdictScope::alone, kRankLost);
  if (is_finding) impl.print(verdict);  // of a loss alone one rank has told, in one line
  impl.verdicts.push_back(std::move(verdict));
  return &impl.verdicts.back();
}

void GradientLocator::dismiss() {
  if (impl_->state != State::bad) {
    throw UsageError("dismiss: nothing bad was agreed on. Call it after a true finish_agreement.");
  }
  ++impl_->dismissed;
  impl_->forget_step();
  impl_->state = State::scanning;
  impl_->now_in(Activity::training);
}

}  // namespace nanlocator
