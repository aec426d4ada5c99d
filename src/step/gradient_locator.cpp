#include "nanlocator/step/gradient_locator.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

#include "nanlocator/files/atomic_file.hpp"
#include "nanlocator/tensor/scan_work.hpp"
#include "step/gradient_locator_impl.hpp"

namespace nanlocator::inline step_room {
namespace {

/// Published by a rank at the end of its pass.
constexpr auto kEarly = "early", kWhole = "whole";

at::Device current_device(at::DeviceType type) {
  if (type == at::kCPU) return at::kCPU;
  return c10::impl::VirtualGuardImpl(type).getDevice();
}

}  // namespace

NonFiniteGradientError::NonFiniteGradientError(Verdict verdict,
                                               const std::filesystem::path& run_dir)
    : Error(format_verdict(verdict, {.run_dir = run_dir.string()})), verdict_(std::move(verdict)) {}

GradientLocator::GradientLocator(ParameterMap map, LocatorOptions options,
                                 std::shared_ptr<Communicator> communicator) {
  check_options(options);
  const auto deadline = Clock::now() + kInstallPatience * options.gather_deadline;
  impl_ = std::make_unique<Impl>(std::move(map), std::move(options), std::move(communicator));
  impl_->agree_on_options(deadline);
  impl_->open_run(deadline);
  impl_->use_map(std::move(impl_->map));
  impl_->watch_ranks();
  // NCCL allocates its buffers in the first reduction: do it now, while memory is free.
  (void)is_true_anywhere(false);
}

GradientLocator::~GradientLocator() {
  impl_->last_words.reset();
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
bool GradientLocator::is_counted_only() const noexcept {
  const bool goes_on = impl_->options.on_bad != Policy::stop || impl_->is_discarded;
  return goes_on && impl_->incidents >= impl_->options.max_incidents;
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

void GradientLocator::abandon_step() noexcept {
  auto& state = impl_->state;
  if (state == State::agreeing) {
    state = State::abandoned;
  } else if (state == State::bad) {
    state = State::scanning;
  }
}

void GradientLocator::begin_step(std::int64_t iteration) {
  if (impl_->state == State::abandoned) {
    impl_->state = State::scanning;
    if (impl_->communicator) (void)impl_->finish_flag_or_conclude_alone(*this);
  }
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
  if (!impl_->first_iteration) impl_->first_iteration = iteration;
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

void GradientLocator::set_no_rerun(std::string why) {
  impl_->no_rerun = std::move(why);
}

void GradientLocator::set_began_unrecorded() {
  impl_->began_unrecorded = true;
}

void GradientLocator::set_discarded() {
  impl_->is_discarded = true;
}

void GradientLocator::set_gradients_left_by(std::int64_t step) {
  impl_->gradients_left_by = step;
}

void GradientLocator::set_loss_scale(double loss_scale, bool falls_on_overflow) {
  impl_->scanner->set_loss_scale(loss_scale);
  impl_->loss_scale = falls_on_overflow ? std::optional(loss_scale) : std::nullopt;
}

void GradientLocator::set_framework_skips_update(bool is_skipped) {
  impl_->framework_skips_update = is_skipped;
}

void GradientLocator::add_note(std::string note) {
  impl_->notes.push_back(std::move(note));
}

void GradientLocator::add_standing_note(std::string note) {
  impl_->standing_notes.push_back(note);
  add_note(std::move(note));
}

void GradientLocator::add_not_covered(const std::vector<std::string>& phrases) {
  auto& impl = *impl_;
  auto& all = impl.options.not_covered;
  all.insert(all.end(), phrases.begin(), phrases.end());
  try {
    impl.write_run_file();
  } catch (const IoError& error) {
    std::cerr << "nanlocator: run.json does not say what was not seen: " +
                     std::string(error.what()) + "\n"
              << std::flush;
  }
}

void GradientLocator::set_births(std::vector<Birth> births) {
  impl_->births = std::move(births);
  add_maxima_before(impl_->births, impl_->history(), impl_->scanner->weight_history(),
                    impl_->iteration);
  if (!impl_->first_pass) return;
  impl_->first_pass->births = impl_->births;
  impl_->keep_first_pass();
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
  if (impl_->first_pass) impl_->first_pass->rerun = impl_->rerun;
}

void GradientLocator::ask_peers(const PeerQuestion& question) {
  auto& impl = *impl_;
  if (!impl.communicator) return;
  impl.communicator->offer(impl.incident_key() + "/question", to_json(question));
}

std::optional<PeerQuestion> GradientLocator::peer_question() {
  auto& impl = *impl_;
  if (!impl.communicator) return std::nullopt;
  const auto text = impl.communicator->offered(impl.incident_key() + "/question");
  if (!text) return std::nullopt;
  try {
    return peer_question_from_json(*text, "the question of a rank with a birth");
  } catch (const FormatError& error) {
    add_note(error.what());
    return std::nullopt;
  }
}

void GradientLocator::set_answers(std::vector<WeightValue> weights,
                                  std::vector<CollectiveResult> results) {
  if (!impl_->first_pass) return;
  impl_->first_pass->weight_values = std::move(weights);
  impl_->first_pass->collective_results = std::move(results);
}

std::vector<std::int64_t> GradientLocator::bad_weights() {
  return impl_->scanner->bad_parameters(Phase::params_before);
}

void GradientLocator::set_optimizer_states(std::vector<OptimizerState> states) {
  impl_->optimizer_states = std::move(states);
}

void GradientLocator::weights_are_finite() {
  impl_->weights_finite_after = impl_->iteration;
}

std::string GradientLocator::keep_bundle(const Bundle& bundle, BundleContents contents,
                                         std::shared_ptr<StorageCollector> storages) {
  const auto dropped = impl_->bundles->dropped().size();
  auto prepared = impl_->bundles->prepare(bundle, std::move(contents));
  for (auto i = dropped; i < impl_->bundles->dropped().size(); ++i) {
    add_note(impl_->bundles->dropped()[i]);
  }
  if (!prepared) return {};
  impl_->kept_bundles.push_back({std::move(*prepared), std::move(storages)});
  return impl_->kept_bundles.back().prepared.folder;
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
  if (!impl_->first_pass) {
    impl_->communicator->start_flag(flag);
    return impl_->finish_flag_or_conclude_alone(*this);
  }
  // Between two passes of a re-run, a lost rank would block the others until their group's
  // time-out. `conclude` gathers the findings of the first pass.
  const auto guard = guard_rerun({});
  impl_->communicator->start_flag(flag);
  return impl_->communicator->finish_flag();
}

void GradientLocator::keep_first_pass() {
  impl_->first_pass = impl_->make_ledger({});
  impl_->notes = impl_->first_pass->notes;  // includes the notes of its scans
  impl_->keep_first_pass();
}

std::unique_ptr<RerunGuard> GradientLocator::guard_rerun(std::function<void()> abort) {
  auto& impl = *impl_;
  if (!impl.communicator) return nullptr;
  return std::make_unique<RerunGuard>(
      *impl.communicator, impl.incident_key(), impl.stretches++, impl.options.gather_deadline,
      [communicator = impl.communicator, abort = std::move(abort)] {
        if (abort) abort();
        communicator->abort();
      },
      [this](const std::string& why) {
        // Ranks at the end of the pass wait for this rank's answer.
        const auto key = impl_->key_of_question();
        (void)impl_->communicator->publish(key, kEarly);
        if (impl_->rank() == 0) (void)impl_->communicator->publish(key + "/outcome", kEarly);
        impl_->conclude_for_training(*this, why);
      });
}

void GradientLocator::rerun_has_failed(const std::string& problem) {
  auto& impl = *impl_;
  add_note("The re-run of the step ended with an error: " + problem);
  impl.has_rerun_failed = true;
  if (!impl.communicator || !impl.first_pass) return;
  RerunGuard::report_failure(*impl.communicator, impl.incident_key(), problem);
  (void)impl.communicator->publish(impl.incident_key() + "/ledger",
                                   to_jsonl(impl.ledger_of_conclusion({})));
}

bool GradientLocator::has_rerun_ended_early() {
  auto& impl = *impl_;
  if (!impl.communicator) return impl.has_rerun_failed;
  auto& communicator = *impl.communicator;
  const auto key = impl.key_of_question();
  ++impl.questions;
  (void)communicator.publish(key, impl.has_rerun_failed ? kEarly : kWhole);
  if (!impl.has_rerun_failed) {
    RerunGuard::report_end(communicator, impl.incident_key(), impl.stretches - 1);
  }
  if (impl.rank() != 0) {
    const auto outcome = impl.fetch_from_first_rank(key + "/outcome");
    if (!outcome) throw AgreementError("No word from rank 0 on the step's re-run.");
    return outcome != kWhole;
  }
  bool is_early = impl.has_rerun_failed;
  auto patience = impl.options.gather_deadline / 32;
  auto answers = communicator.gather(key, Clock::now() + patience);
  const auto says_early = [&] {
    return std::ranges::count(answers, std::optional<std::string>(kEarly)) > 0;
  };
  // Wait for ranks that answer and are still in their pass: they finish, or their guard ends it.
  while (!is_early && !says_early() && impl.is_waiting_for_any(answers)) {
    patience = std::min(2 * patience, impl.options.gather_deadline);
    answers = communicator.gather(key, Clock::now() + patience);
  }
  is_early = is_early || says_early() || has_gaps(answers);
  (void)communicator.publish(key + "/outcome", is_early ? kEarly : kWhole);
  return is_early;
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
  // A norm that is known by now is agreed on. A later one counts on this rank only: frameworks
  // compute the same norm on all ranks; if they do not, conclude costs a deadline.
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
  impl_->state = State::scanning;  // even if the reduction throws, for conclude_alone
  count_wait();
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
  const bool is_only_counted = is_counted_only();
  ++impl.incidents;
  impl.state = State::scanning;
  if (std::exchange(impl.is_consequence, false)) {
    const std::string note = "Weights hold NaN or Inf, as after step " +
                             std::to_string(impl.bad_update.value_or(impl.iteration - 1)) +
                             ", whose verdict tells why.";
    if (impl.rank() == 0 && !std::exchange(impl.has_told_of_consequences, true)) {
      std::cerr << "nanlocator: step " + std::to_string(impl.iteration) +
                       " and those that follow are counted, not located. " + note + "\n"
                << std::flush;
    }
    return impl.count_finding(note);
  }
  if (is_only_counted) {
    impl.tell_of_counted();
    return impl.count_finding(
        "Finding " + std::to_string(impl.incidents) + " of this run: past max_incidents (" +
        std::to_string(impl.options.max_incidents) + ") findings are counted, not located.");
  }
  impl.conclude_finding();
  impl.forget_step_quietly();
  const bool is_damaged = course_of(impl.verdicts.back()) == Course::goes_on_damaged;
  if (is_damaged && !impl.bad_update) {
    impl.bad_update = impl.iteration;
    impl.has_told_of_consequences = false;
  }
  return impl.verdicts.back();
}

/// What goes on without its update is told each time, for whoever counts the lines.
void GradientLocator::Impl::tell_of_counted() const {
  const bool is_first = incidents == options.max_incidents + 1;
  const bool is_left_out =
      options.on_bad == Policy::skip || options.on_bad == Policy::recover || is_discarded;
  if (rank() != 0 || (!is_left_out && !is_first)) return;
  std::cerr << "nanlocator WARNING step " + std::to_string(iteration) + ": finding " +
                   std::to_string(incidents) +
                   " of this run (on_bad=" + std::string(name_of(options.on_bad)) +
                   "); after the first " + std::to_string(options.max_incidents) +
                   " they are counted, not located (max_incidents)\n"
            << std::flush;
}

const Verdict& GradientLocator::Impl::count_finding(std::string note) {
  counted = Verdict{};
  // The same on all ranks: they have agreed on the re-run's outcome, and `recover` depends on it.
  if (rerun) {
    counted.rerun.done = true;
    counted.rerun.reproduced = rerun->reproduced;
  }
  counted.run_id = run.id;
  counted.iteration = iteration;
  counted.status = VerdictStatus::partial;
  counted.notes.push_back(std::move(note));
  remove_first_pass_file();
  forget_step_quietly();
  now_in(Activity::training);
  return counted;
}

bool GradientLocator::has_bad_update() const noexcept {
  return impl_->bad_update.has_value();
}

bool GradientLocator::is_consequence(bool are_weights_untouched) {
  auto& impl = *impl_;
  if (impl.options.on_bad != Policy::report || impl.incidents == 0) return false;
  const bool is_mine = impl.bad_update && are_weights_untouched && !bad_weights().empty();
  impl.is_consequence = is_true_anywhere(is_mine);
  if (!impl.is_consequence) impl.bad_update.reset();
  return impl.is_consequence;
}

const Verdict* GradientLocator::conclude_alone(const std::string& reason, Failure failure) {
  auto& impl = *impl_;
  auto ledger = impl.ledger_of_conclusion({reason});
  const bool is_finding = has_finding(ledger);
  const bool is_first = !impl.reported_alone;
  std::vector<std::string> notes;
  const bool is_news = is_first || impl.reported_alone->first != ledger.sightings.size();
  if (is_finding && is_news) impl.keep_on_disk(ledger, notes);  // before any wait
  const bool is_asked = failure == Failure::of_peers;           // by ranks that lost the same peer
  if (impl.communicator && is_news && (is_finding || is_asked)) {
    (void)impl.communicator->publish(impl.incident_key() + "/ledger", to_jsonl(ledger));
  }
  if (is_finding && is_news) impl.keep_history_on_disk(notes);
  if (is_finding && is_first) ++impl.incidents;
  if (impl.state == State::bad) impl.state = State::scanning;
  if (failure == Failure::of_peers) impl.wait_for_loss();
  const auto lost = impl.files->lost();
  if (!is_finding && (lost.empty() || failure == Failure::own)) {
    return is_first ? nullptr : &impl.verdicts.back();
  }
  const auto reported = std::pair(ledger.sightings.size(), lost.size());
  if (impl.reported_alone == reported) {  // nothing new, except bundles
    impl.files->add_unwritten(impl.write_bundles());
    return &impl.verdicts.back();
  }
  impl.reported_alone = reported;
  if (!is_finding) notes.push_back(reason);
  std::vector<Ledger> ledgers;
  if (is_finding && is_asked) {
    ledgers = impl.ledgers_of_survivors(ledger, notes);
  } else {
    ledgers.push_back(std::move(ledger));
  }
  auto verdict = impl.judge_alone(ledgers, is_finding, std::move(notes), is_asked ? "" : reason);
  verdict.status = VerdictStatus::partial;
  impl.files->write(verdict, VerdictScope::alone, kRankLost);
  if (is_finding) impl.print_alone(verdict, ledgers);  // a lost rank is one line, by one rank
  const auto unwritten = impl.write_bundles();
  impl.files->add_unwritten(unwritten);
  leave_out(unwritten, verdict);
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

}  // namespace nanlocator::inline step_room
