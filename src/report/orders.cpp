#include "report/orders.hpp"

#include <algorithm>
#include <cctype>

#include "files/printable.hpp"
#include "files/text.hpp"
#include "nanlocator/record/collective_kind.hpp"
#include "record/operator_name.hpp"
#include "report/cause_text.hpp"
#include "report/checkpoint_orders.hpp"
#include "report/error_code.hpp"
#include "report/places.hpp"
#include "report/silent_orders.hpp"
#include "report/words.hpp"

namespace nanlocator::inline report_room {
namespace {

std::string in_capitals(std::string text) {
  std::ranges::transform(text, text.begin(),
                         [](unsigned char each) { return static_cast<char>(std::toupper(each)); });
  return text;
}

/// " (2026-11-27 02:12 UTC)", from the run's id, which begins with it; "" for another id.
std::string began_text(const Verdict& verdict) {
  const std::string& id = verdict.run_id;
  constexpr std::string_view kForm = "00000000T000000Z";
  if (id.size() < kForm.size()) return "";
  for (std::size_t i = 0; i < kForm.size(); ++i) {
    const bool is_digit = id[i] >= '0' && id[i] <= '9';
    if (kForm[i] == '0' ? !is_digit : id[i] != kForm[i]) return "";
  }
  return " (" + id.substr(0, 4) + "-" + id.substr(4, 2) + "-" + id.substr(6, 2) + " " +
         id.substr(9, 2) + ":" + id.substr(11, 2) + " UTC)";
}

std::string weights_text(const Verdict& verdict) {
  const JobState& job = verdict.job;
  const Origin* const origin = deciding_origin(verdict);
  if (job.are_weights_finite == false) {
    const Fact* const update =
        origin == nullptr ? nullptr : find_fact(origin->facts, FactKind::update_undefined);
    if (update != nullptr && update->step) {
      return "weights bad since the update of " + step_text(*update->step);
    }
    const bool is_copy = origin != nullptr && verdict.origins.size() == 1 &&
                         has_fact(origin->facts, FactKind::copies_clean) &&
                         !has_fact(origin->facts, FactKind::further_weights_bad);
    return is_copy ? "one copy of one weight bad, the others finite"
                   : "weights bad when the step began";
  }
  const bool is_of_update = origin != nullptr && origin->phase == Phase::params_after;
  if (is_of_update && job.are_weights_updated == true) {
    return "weights bad now, of this update: do not save them; finite as after " +
           step_text(verdict.iteration - 1);
  }
  if (job.are_weights_updated == true && job.on_bad == "report") {
    return "weights changed by the bad step";
  }
  if (job.are_weights_finite == true) {
    const bool is_damaged = course_of(verdict) == Course::goes_on_damaged;
    const bool is_of_buffer = origin != nullptr && origin->cause == Cause::bad_buffer;
    const std::string other = !is_of_buffer ? ""
                              : origin->parameter.empty()
                                  ? " (but not a tensor that the program keeps)"
                                  : " (but not the buffer " + origin->parameter + ")";
    const auto largest = origin == nullptr ? std::nullopt : largest_weight_of(*origin);
    const std::string size = largest && may_be_of_large_weights(*origin)
                                 ? " but as large as " + short_number(*largest)
                                 : "";
    return std::string(is_damaged ? "the weights were last finite "
                                  : "weights finite" + size + other + ", as ") +
           (verdict.iteration > 1 ? "after " + step_text(verdict.iteration - 1)
                                  : "before the first step");
  }
  return "whether all weights are finite is not known";
}

/// What was bad has not reached the update.
bool has_finite_gradients(const Verdict& verdict) {
  return verdict.spread.parameters.empty() && verdict.job.are_weights_finite == true &&
         verdict.status == VerdictStatus::located;
}

/// Does not match the line that prints it.
constexpr std::string_view kWarningPattern = "'nanlocato[r] WARNING'";

/// Counts the blocks of a job that goes on; "" if its log is not known.
std::string count_command(const Verdict& verdict) {
  if (!verdict.launch || verdict.launch->log.empty()) return "";
  return ", one WARNING each (grep -c " + std::string(kWarningPattern) + " " +
         shell_word(verdict.launch->log) + ")";
}

std::string running_text(const Verdict& verdict) {
  const JobState& job = verdict.job;
  const std::string policy = " (on_bad=" + job.on_bad + ")";
  const std::string step = step_text(verdict.iteration);
  if (verdict.status == VerdictStatus::benign) return "running; the scaler leaves this step out";
  if (job.are_weights_updated == true) return "running; the weights have the update of " + step;
  if (job.is_discarded) {
    return "running; the program itself discarded what " + step + " computed; weights good";
  }
  if (verdict.rerun.reproduced == false && job.on_bad != "skip") {
    return "running, with the finite gradients of the re-run" + policy + "; weights good";
  }
  if (job.on_bad == "skip" || job.framework_skips_update) {
    return "running, without the update of " + step + policy + "; weights good";
  }
  if (has_finite_gradients(verdict)) {
    return "running" + policy + "; the gradients were finite, and so are the weights";
  }
  return "running" + policy;
}

/// A machine is not ruled out, though none is suspected.
bool may_be_hardware(const Verdict& verdict, const Origin& origin) {
  const CheckpointFile* const loaded = loaded_and_read(verdict, origin);
  if (loaded != nullptr && loaded->is_finite == false) return false;
  const bool is_of_transfer =
      origin.cause == Cause::collective_result || origin.cause == Cause::pipeline_transfer;
  return is_of_transfer || std::ranges::any_of(origin.alternatives, [](Suspect each) {
           return each == Suspect::memory || each == Suspect::link;
         });
}

/// A re-run or a replay has shown it, or the values themselves do.
bool is_known_to_fail_again(const Verdict& verdict) {
  const Origin* const origin = deciding_origin(verdict);
  if (origin != nullptr && origin->alternatives == std::vector{Suspect::upstream}) return false;
  if (origin != nullptr && origin->cause == Cause::divergence) return false;
  const bool is_likely = origin != nullptr && origin->cause_confidence != Confidence::high;
  if (is_likely && !is_deterministic(*origin)) return false;
  return verdict.rerun.reproduced == true || (origin != nullptr && is_deterministic(*origin));
}

bool leaves_suspects_out(const JobDecision& decision) {
  return decision.kind == DecisionKind::exclude || decision.kind == DecisionKind::older_checkpoint;
}

/// The one GPU of the machines to look at, if it is one.
std::string error_counters_of(const Verdict& verdict) {
  const auto ranks = ranks_to_look_at(verdict);
  const RankCoordinates* const known =
      ranks.size() == 1 ? find_mentioned(verdict, ranks.front()) : nullptr;
  if (known == nullptr || !is_gpu(*known)) return error_counters();
  const std::size_t uuid =
      known->device.find("GPU-");  // an index may be another one outside the job
  if (uuid == std::string::npos) return error_counters(" -i " + std::to_string(known->local_rank));
  return error_counters(" -i " + known->device.substr(uuid, known->device.find(' ', uuid) - uuid));
}

/// `nanlocator netcheck` on these hosts alone.
std::string check_of_hosts(const std::vector<std::string>& hosts, int ranks_per_host) {
  return netcheck_command(ranks_per_host, static_cast<int>(hosts.size()), hosts.front());
}

/// Whom a fault is for that came again on other hosts.
std::string author_of_code(const JobDecision& decision) {
  return person_of(decision.page == Owner::framework ? decision.page : Owner::model_author);
}

/// What counts as again: "in bias", "in torch.div of blocks.2", "at train.py:12".
std::string same_place_text(const Verdict& verdict) {
  const Origin* const origin = deciding_origin(verdict);
  if (verdict.decision.ended_rank) return "with such an end of any rank";
  if (origin == nullptr) return "in the same place";
  if (origin->cause == Cause::collective_sum) return "in the reduction of any gradient";
  if (!origin->parameter.empty()) return "in the parameter " + origin->parameter;
  const bool is_of_writer = origin->cause == Cause::memory_corruption;  // not of the module
  if (!origin->op.empty() && !is_of_writer && !collective_kind_of(origin->op)) {
    return "in " + function_name_of(origin->op) +
           (origin->module.empty() ? "" : " of " + origin->module);
  }
  if (origin->code) return "at " + code_place(*origin->code);
  return origin->module.empty() ? "in the same place" : "in " + origin->module;
}

/// The second time, the decision is another one (verdict/decision.hpp).
void add_again(const Verdict& verdict, Rows& rows) {
  const JobDecision& decision = verdict.decision;
  const bool is_restarted = decision.kind != DecisionKind::do_not_restart &&
                            decision.kind != DecisionKind::none_needed && !decision.is_traced;
  if (!is_restarted) return;
  const bool is_of_somebody =
      decision.ticket != Owner::nobody && decision.ticket != Owner::cluster_operator;
  if (decision.kind == DecisionKind::skip_batch) {
    add_row(rows, "if AGAIN",
            "with ERROR[" + error_code_of(*deciding_origin(verdict)) +
                "] again: the variable had no effect, so leave it down, page the model author; any "
                "other stop: follow its own message");
    add_row(rows, "limit",
            "count the skipped steps each hour and at the end of the shift (grep -c " +
                std::string(kWarningPattern) +
                " in the new job's log): 10 or more: end the job, page the " +
                person_of(decision.ticket));
    return;
  }
  add_row(rows, "if AGAIN",
          same_place_text(verdict) + ": leave it down, page the " +
              person_of(is_of_somebody ? decision.ticket : Owner::model_author) +
              "; any other stop: follow its own message");
}

}  // namespace

std::vector<int> ranks_to_look_at(const Verdict& verdict) {
  constexpr std::size_t kMost = 4;
  if (!verdict.decision.ranks.empty()) return verdict.decision.ranks;
  const Origin* const origin = deciding_origin(verdict);
  const bool is_open =
      origin != nullptr && !verdict.decision.ended_rank && may_be_hardware(verdict, *origin);
  return is_open && origin->candidates.size() <= kMost ? origin->candidates : std::vector<int>{};
}

std::string error_counters(const std::string& gpu) {
  return "nvidia-smi -q -d ECC" + gpu + "; dmesg --time-format iso | grep NVRM";
}

bool may_be_of_large_weights(const Verdict& verdict) {
  const Origin* const origin = deciding_origin(verdict);
  return origin != nullptr && may_be_of_large_weights(*origin);
}

std::optional<double> largest_weight_of(const Origin& origin) {
  if (const Fact* const elsewhere = find_fact(origin.facts, FactKind::large_weight)) {
    return elsewhere->value;
  }
  const Fact* const weights = find_fact(origin.facts, FactKind::weights_magnitude);
  if (weights == nullptr || weights->values.empty()) return std::nullopt;
  return std::ranges::max_element(weights->values, {}, [](const auto& each) { return each.second; })
      ->second;
}

bool may_be_of_large_weights(const Origin& origin) {
  constexpr double kUsual = 100;
  if (origin.cause == Cause::divergence) return true;
  if (origin.action == Action::find_weight_writer) return true;
  const auto largest = largest_weight_of(origin);
  return origin.cause == Cause::operator_overflow && largest && *largest > kUsual;
}

void add_row(Rows& rows, const char* label, std::string text) {
  if (!text.empty()) rows.emplace_back(label, std::move(text));
}

std::string step_text(std::int64_t step) {
  return "step " + std::to_string(step);
}

const Origin* deciding_origin(const Verdict& verdict) {
  const auto index = static_cast<std::size_t>(verdict.decision.origin.value_or(0));
  if (index < verdict.origins.size()) return &verdict.origins[index];
  return verdict.origins.empty() ? nullptr : &verdict.origins.front();
}

std::string severity_of(const Verdict& verdict) {
  if (verdict.status == VerdictStatus::clean || verdict.status == VerdictStatus::benign) {
    return "INFO";
  }
  switch (course_of(verdict)) {
    case Course::goes_on:
      return "WARNING";
    case Course::goes_on_damaged:
      return "FATAL";
    default:
      return "ERROR";
  }
}

bool is_to_look_first(const Verdict& verdict) {
  if (!verdict.decision.ranks.empty() && leaves_suspects_out(verdict.decision)) return false;
  if (verdict.decision.is_to_check)
    return false;  // the checkpoints decide, and are there to be read
  return std::ranges::any_of(ranks_to_look_at(verdict), [&](int rank) {
    const RankCoordinates* const known = find_mentioned(verdict, rank);
    return known != nullptr && is_gpu(*known);
  });
}

/// "CHECK a18, THEN ", if that decides where it is restarted.
static std::string check_first_text(const Verdict& verdict, const char* then) {
  if (!is_to_look_first(verdict)) return "";
  return "CHECK " + joined(hosts_of(verdict, ranks_to_look_at(verdict))) + then;
}

std::string action_text_of(const Verdict& verdict) {
  const JobDecision& decision = verdict.decision;
  const bool is_running_damaged = course_of(verdict) == Course::goes_on_damaged;
  const std::string kill = is_running_damaged ? "KILL IT NOW, THEN " : "";
  switch (decision.kind) {
    case DecisionKind::none_needed:
      return decision.ticket == Owner::nobody ? "NO ACTION" : "LET IT RUN, FILE A TICKET";
    case DecisionKind::restart_as_is:
      return kill + check_first_text(verdict, ", THEN ") +
             (decision.is_traced          ? "RESTART TRACED"
              : is_to_look_first(verdict) ? "RESTART ONCE"
                                          : "RESTART ONCE, UNCHANGED");
    case DecisionKind::exclude:
      return kill + "RESTART WITHOUT " + suspects_text(verdict);
    case DecisionKind::skip_batch:
      return kill + "RESTART, SKIPPING BAD BATCHES";
    case DecisionKind::older_checkpoint: {
      if (decision.is_traced) return kill + "RESTART TRACED";
      const CheckpointFile* const file =
          decision.is_to_check ? nullptr : checkpoint_to_load(verdict);
      const std::string without =
          decision.ranks.empty() ? "" : "WITHOUT " + suspects_text(verdict) + " ";
      const std::string moved = moved_text(verdict);
      return kill + check_first_text(verdict, ", THEN ") +
             (moved.empty() ? "" : moved + ", THEN ") + "RESTART " + without + "FROM " +
             (may_be_of_large_weights(verdict) && checkpoint_before_growth(verdict) != nullptr
                  ? checkpoint_before_growth(verdict)->name
              : may_be_of_large_weights(verdict) ? "A CHECKPOINT FROM BEFORE THE WEIGHTS GREW"
              : decision.is_to_check             ? "THE NEWEST CHECKPOINT THAT A CHECK FINDS FINITE"
              : file != nullptr                  ? file->name
              : may_load_newest(verdict)
                  ? "THE NEWEST CHECKPOINT"
                  : "A CHECKPOINT FROM BEFORE STEP " + first_bad_step(verdict));
    }
    case DecisionKind::do_not_restart: {
      const std::string order =
          is_running_damaged ? "KILL IT NOW, PAGE THE " : "LEAVE IT DOWN, PAGE THE ";
      if (is_running_damaged) return order + in_capitals(person_of(decision.page));
      const std::string moved = moved_text(verdict);
      return check_first_text(verdict, "; IF CLEAN: ") +
             (moved.empty() ? order : moved + ", LEAVE THE JOB DOWN, PAGE THE ") +
             in_capitals(person_of(decision.page));
    }
  }
  return "";
}

std::string restart_word_of(const Verdict& verdict) {
  const JobDecision& decision = verdict.decision;
  if (has_unknown_log(verdict)) return "BY THAT LOG";
  if (decision.is_traced) return "ONLY TRACED";
  switch (decision.kind) {
    case DecisionKind::none_needed:
      return "NO";
    case DecisionKind::do_not_restart:
      return is_to_look_first(verdict) ? "NO, if the check is clean" : "NO";
    case DecisionKind::restart_as_is:
    case DecisionKind::older_checkpoint:
      return is_to_look_first(verdict) ? "ONCE, after the check" : "ONCE";
    case DecisionKind::skip_batch:
      return "YES, with NANLOCATOR_ON_BAD=skip";
    default:
      return "YES";
  }
}

std::string hosts_text_of(const Verdict& verdict) {
  const JobDecision& decision = verdict.decision;
  if (decision.ranks.empty()) {
    const Origin* const origin = deciding_origin(verdict);
    if (origin != nullptr && !decision.ended_rank && may_be_hardware(verdict, *origin)) {
      const auto hosts = hosts_of(verdict, ranks_to_look_at(verdict));
      return (is_to_look_first(verdict) ? std::string("by the check") : "unchanged") +
             (hosts.empty() ? "" : ", " + joined(hosts) + " not ruled out");
    }
    const bool is_open = !unexplained_ranks(verdict).empty();
    return std::string(!is_open                   ? ""
                       : has_unknown_log(verdict) ? "by that log and the check, else "
                                                  : "as nanlocator next says, else ") +
           (decision.kind == DecisionKind::do_not_restart ? "none suspected" : "unchanged");
  }
  const std::string suspects = suspects_text(verdict);
  if (leaves_suspects_out(decision)) return "without " + suspects;
  const bool is_kept = decision.kind == DecisionKind::restart_as_is && !decision.is_traced;
  return is_to_look_first(verdict)
             ? "by the check (" + suspects + " suspected)"
             : "unchanged (" + suspects + " suspected" + (is_kept ? ", kept this once)" : ")");
}

std::string state_of(const Verdict& verdict) {
  const JobState& job = verdict.job;
  std::string text;
  switch (course_of(verdict)) {
    case Course::unknown:
      return "";
    case Course::stops:
      text = job.are_weights_updated == true
                 ? "stopped after the update of " + step_text(verdict.iteration)
                 : "stopped before the update of " + step_text(verdict.iteration);
      break;
    case Course::goes_on_damaged:
      text = "running on bad weights (on_bad=" + job.on_bad + "): what it has saved since is bad";
      break;
    case Course::goes_on:
      text = running_text(verdict);
      break;
  }
  if (course_of(verdict) != Course::goes_on) text += "; " + weights_text(verdict);
  if (verdict.decision.kind == DecisionKind::do_not_restart) {
    text += verdict.decision.recurrence == Recurrence::same_place
                ? "; an earlier attempt of this run failed in the same way"
            : is_to_look_first(verdict)       ? "; on the same hosts a restart fails again"
            : fixed_text(verdict).empty()     ? "; a restart from that checkpoint fails again"
            : is_known_to_fail_again(verdict) ? "; a restart fails again until the code is fixed"
                                              : "; a restart will probably fail again";
  } else if (verdict.decision.recurrence == Recurrence::same_device) {
    text += "; the same device failed in an earlier attempt of this run";
  }
  return text;
}

std::string kill_of(const Verdict& verdict) {
  if (course_of(verdict) != Course::goes_on_damaged) return "";
  const auto& launch = verdict.launch;
  if (launch && launch->scheduler == "slurm") {
    // Scanners of logs take the command's name for what has ended the job.
    return "s\\cancel --signal=KILL --full " + launch->job_id +
           "   (the backslash keeps it out of log scanners' patterns; at SIGTERM the job would "
           "save)";
  }
  return "SIGKILL to its processes (at SIGTERM it may save)";
}

/// ": sample 3 of microbatch 1 on rank 2" of that batch; "" where the data were no batch.
static std::string sample_text(const Verdict& verdict) {
  const Origin* const origin = deciding_origin(verdict);
  if (origin == nullptr || origin->cause != Cause::bad_input || !origin->tensor) return "";
  if (const std::string bad = bad_samples_of(*origin); !bad.empty()) return " (" + bad + ")";
  const OriginTensor& tensor = *origin->tensor;
  if (tensor.shape.size() < 2 || tensor.first_bad_index.empty()) return "";
  const Fact* const read = find_fact(origin->facts, FactKind::made_before_pass);
  const std::string_view reader = read == nullptr ? "" : function_of(read->op);
  if (reader == "cat" || reader == "stack")
    return "";  // a sample, of which the loader makes a batch
  const std::string microbatch =
      origin->microbatch ? " of microbatch " + std::to_string(*origin->microbatch) : "";
  return " (first bad in sample " + std::to_string(tensor.first_bad_index.front()) +
         ", from 0, of " + std::to_string(tensor.shape.front()) + microbatch +
         on_ranks(verdict, *origin) + ")";
}

/// A step that goes wrong now and then has a block each time: when is it too often?
void add_limit(const Verdict& verdict, Rows& rows) {
  const JobDecision& decision = verdict.decision;
  if (decision.kind != DecisionKind::none_needed || decision.ticket == Owner::nobody) return;
  const bool is_left_out = verdict.job.on_bad == "skip";
  if (!is_left_out && !has_finite_gradients(verdict)) return;
  add_row(rows, "limit",
          std::string(is_left_out ? "in any case after 10 skipped steps in all"
                                  : "in any case after 10 such steps in all") +
              count_command(verdict) + ": end the job, page the " + person_of(decision.ticket));
}

void add_policy(const Verdict& verdict, Rows& rows) {
  const bool is_of_skip = verdict.decision.kind == DecisionKind::skip_batch;
  if (course_of(verdict) != Course::goes_on_damaged || is_of_skip) return;
  add_row(rows, "then",
          (verdict.decision.kind == DecisionKind::do_not_restart ? fixed_text(verdict) : "") +
              "start it with NANLOCATOR_ON_BAD=stop, so that it stops if this comes again");
}

/// How SLURM's environment gets variables; "" without SLURM.
static std::string exported(const Verdict& verdict, const std::string& variables) {
  const bool is_slurm = verdict.launch && verdict.launch->scheduler == "slurm";
  return is_slurm ? " (sbatch --export=ALL," + variables + " ...)" : "";
}

void add_skip(const Verdict& verdict, Rows& rows) {
  if (verdict.decision.kind != DecisionKind::skip_batch) return;
  add_row(rows, "skip",
          "start it with NANLOCATOR_ON_BAD=skip in its environment" +
              exported(verdict, "NANLOCATOR_ON_BAD=skip") + ": this batch" + sample_text(verdict) +
              " and any other bad one are skipped without an update, with one WARNING each; write "
              "into the "
              "ticket: remove the variable at the next planned start");
}

static std::string drain_command(const Verdict& verdict, const std::string& hosts) {
  return "scontrol update NodeName=" + hosts +
         " State=DRAIN Reason=" + shell_word("job-" + verdict.launch->job_id);
}

/// The devices' error counters, and what they change.
static void add_counters(const Verdict& verdict, const std::vector<std::string>& hosts,
                         Rows& rows) {
  const JobDecision& decision = verdict.decision;
  const bool is_running = decision.kind == DecisionKind::none_needed;
  const bool is_down = decision.kind == DecisionKind::do_not_restart;
  const bool is_slurm = verdict.launch && verdict.launch->scheduler == "slurm";
  const CheckpointFile* const file = decision.is_to_check ? nullptr : checkpoint_to_load(verdict);
  const bool is_one = hosts.size() == 1;
  std::string without = "without " + (is_one ? hosts.front() : "the one that has them");
  if (is_slurm) {
    const std::string host = is_one ? hosts.front() : "HOST";
    without += " (sbatch --exclude=" + host + "; " + drain_command(verdict, host) + ")";
  }
  if (!is_running && file != nullptr) without += ", from " + file->name;
  if (!is_running && decision.is_to_check) {
    without += may_be_of_large_weights(verdict) ? ", from before the weights grew"
                                                : ", from a checkpoint found finite";
  }
  add_row(rows, "check",
          std::string(is_running ? "on " : "FIRST, on ") + joined(hosts) + ": " +
              error_counters_of(verdict));
  add_row(rows, "if errors",
          "uncorrectable volatile counts above 0, or NVRM lines since the job began" +
              began_text(verdict) + ", or nvidia-smi fails: " +
              std::string(is_running ? "end it at its next checkpoint, restart " : "restart ") +
              without +
              (decision.ticket == Owner::cluster_operator ? "" : "; ticket cluster on-call") +
              (is_down ? ", page nobody" : ""));
  add_row(rows, "if clean",
          is_running ? "let it run"
          : is_down  ? "leave it down, page the " + person_of(decision.page)
                     : "restart it as it is, on any hosts");
}

static std::string excluded_text(const Verdict& verdict, const std::vector<std::string>& hosts) {
  const bool is_slurm = verdict.launch && verdict.launch->scheduler == "slurm";
  return is_slurm ? " (sbatch --exclude=" + list_for_command(hosts) + " ...)" : "";
}

static bool may_be_of_update(const Verdict& verdict) {
  const Origin* const origin = deciding_origin(verdict);
  return origin != nullptr && std::ranges::count(origin->alternatives, Suspect::last_update) > 0;
}

void add_check(const Verdict& verdict, Rows& rows) {
  const JobDecision& decision = verdict.decision;
  const std::vector<int> ranks = ranks_to_look_at(verdict);
  const auto hosts = verdict.layout ? hosts_of(verdict, ranks) : std::vector<std::string>{};
  if (hosts.empty()) return add_again(verdict, rows);
  const bool is_suspected = !decision.ranks.empty();
  const std::string suspects = is_suspected ? suspects_text(verdict) : joined(hosts);
  if (decision.is_to_check && !is_suspected) {
    add_row(rows, "if finite",
            loaded_by_run(verdict) + ": " +
                (may_be_of_update(verdict) ? "an update since or " : "") + "the memory of " +
                joined(hosts) +
                " is the suspect; before the restart, there: " + error_counters_of(verdict));
    add_row(rows, "if errors",  // a row of its own: log scanners take both words for a finding
            "uncorrectable volatile counts above 0, or NVRM lines since the job began" +
                began_text(verdict) + ": restart without " +
                (hosts.size() > 1 ? "the one that has them" : "it") +
                ", ticket cluster on-call; none: restart on the same hosts");
    return add_again(verdict, rows);
  }
  if (!is_suspected || !leaves_suspects_out(decision)) {
    if (is_to_look_first(verdict)) add_counters(verdict, hosts, rows);
    if (decision.kind == DecisionKind::do_not_restart) return;
    if (!is_suspected) return add_again(verdict, rows);
    add_row(rows, "if AGAIN",
            "on " + joined(hosts) +
                (decision.kind == DecisionKind::none_needed
                     ? ": end the job at its next checkpoint, restart it from there without "
                     : ": restart once more without ") +
                joined(hosts) + excluded_text(verdict, hosts) +
                (decision.kind == DecisionKind::none_needed
                     ? "; on other hosts: let it run, page the "
                     : "; on other hosts: leave it down, page the ") +
                author_of_code(decision) +
                (decision.kind == DecisionKind::none_needed
                     ? ""
                     : "; any other stop: follow its own message"));
    return;
  }
  if (verdict.launch && verdict.launch->scheduler == "slurm") {
    const std::string excluded = list_for_command(hosts);
    add_row(rows, "exclude", "sbatch --exclude=" + excluded + " ...");
    add_row(rows, "drain", drain_command(verdict, excluded));
    add_row(rows, "",
            "(now, or in the ticket if you may not: it keeps other jobs off " +
                std::string(hosts.size() > 1 ? "them)" : "it)"));
  }
  add_row(rows, "check",
          "cluster on-call, on " + joined(hosts) + (hosts.size() > 1 ? " (started on each)" : "") +
              ", out of the job: " + check_of_hosts(hosts, verdict.layout->ranks_per_host) +
              "   (" + (hosts.size() > 1 || verdict.layout->ranks_per_host > 1 ? "links, " : "") +
              "memory and arithmetic; the restart does not wait for it)");
  add_row(rows, "if FAIL", "what it names stays out until it is repaired");
  if (decision.recurrence == Recurrence::same_device) {
    add_row(rows, "if PASS",
            suspects +
                " stays out all the same, as this was its second event, until "
                "cluster on-call has repaired it");
  } else {
    add_row(rows, "if PASS", suspects + " may come back; after a second event there it stays out");
  }
  add_row(rows, "if AGAIN",
          "on other hosts: leave it down, page the " + author_of_code(decision) +
              "; any other stop: follow its own message");
}

bool is_of_compiled_code(const Origin& origin) {
  return origin.op.starts_with("inductor::");
}

void add_trace(const Verdict& verdict, Rows& rows) {
  if (!verdict.decision.is_traced) return;
  std::vector<std::string> variables = {"NANLOCATOR_LEVEL=operators"};
  if (std::ranges::any_of(verdict.origins, is_of_compiled_code)) {
    variables.emplace_back("TORCH_COMPILE_DISABLE=1");
  }
  const CheckpointFile* const file = checkpoint_to_load(verdict);
  const bool is_counted = file != nullptr && verdict.launch->steps_before;
  const std::int64_t steps =
      is_counted ? std::max<std::int64_t>(named_step(verdict, verdict.iteration) - file->step, 1)
                 : 0;
  add_row(rows, "trace",
          joined(variables, " and ") + " in the job's environment" +
              exported(verdict, list_for_command(variables)) + ", from " +
              (file == nullptr ? std::string("the checkpoint")
               : is_counted
                   ? file->name + " (" + count_text(static_cast<std::size_t>(steps), "step") + ")"
                   : file->name) +
              "; its steps take longer");
  add_row(rows, "if AGAIN",
          "it stops there; act on its own block, which names the operator and whom to page");
  add_row(rows, "if finite",
          "it passes " + step_text(named_step(verdict, verdict.iteration)) +
              ": let it write its next checkpoint, end it, take out what was added to the "
              "environment, restart from that");
}

}  // namespace nanlocator::inline report_room
