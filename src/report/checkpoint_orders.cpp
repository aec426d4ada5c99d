#include "report/checkpoint_orders.hpp"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "files/printable.hpp"
#include "files/text.hpp"
#include "report/orders.hpp"
#include "report/words.hpp"

namespace nanlocator::inline report_room {
namespace {

constexpr const char* kNothingBadSaved = "saved before this fault";

bool needs_checkpoint(const Verdict& verdict) {
  return verdict.decision.kind != DecisionKind::none_needed;
}

std::span<const CheckpointFile> checkpoints_of(const Verdict& verdict) {
  return verdict.launch ? verdict.launch->checkpoints : std::span<const CheckpointFile>();
}

std::string joined_path(const std::string& folder, const std::string& name) {
  return folder.empty() ? name : (std::filesystem::path(folder) / name).string();
}

std::string check_command(const std::string& path) {
  return "nanlocator check-checkpoint " + shell_word(path);
}

/// The step in whose maxima the growth shows first: ten times the first one that is known.
std::optional<std::int64_t> first_step_of_growth(const Origin& origin) {
  constexpr double kGrown = 10;
  for (const FactKind kind : {FactKind::weight_maxima, FactKind::gradient_maxima}) {
    const Fact* const maxima = find_fact(origin.facts, kind);
    if (maxima == nullptr || maxima->values.empty()) continue;
    const double first = maxima->values.front().second;
    const auto grown = std::ranges::find_if(
        maxima->values, [&](const auto& each) { return each.second > kGrown * first; });
    if (!(first > 0) || grown == maxima->values.end()) continue;
    std::int64_t step = 0;
    const std::string& text = grown->first;
    const auto read = std::from_chars(text.data(), text.data() + text.size(), step);
    if (read.ec == std::errc()) return step;
  }
  return std::nullopt;
}

/// The last step before the weights grew, in this run's count; nullopt if it is not known.
std::optional<std::int64_t> step_before_growth(const Verdict& verdict) {
  const Origin& origin = *deciding_origin(verdict);
  if (origin.cause == Cause::divergence) return verdict.decision.newest_step;
  const auto grown = first_step_of_growth(origin);
  return grown ? std::optional(std::max<std::int64_t>(*grown - 1, 0)) : std::nullopt;
}

/// Memory that nobody wrote, or that is read too early, holds finite values in most steps.
std::string garbage_text(const Verdict& verdict) {
  const Origin* const origin = deciding_origin(verdict);
  const bool is_garbage = origin != nullptr && (origin->cause == Cause::uninitialised_memory ||
                                                origin->cause == Cause::race);
  return is_garbage ? "; earlier steps may have used wrong finite values: the model author judges "
                      "that in the morning, the restart need not wait"
                    : "";
}

/// What this run was started from may be such a one.
bool is_any_bad(const Verdict& verdict) {
  return std::ranges::count(checkpoints_of(verdict), false, &CheckpointFile::is_finite) > 0;
}

/// None of the run's own steps can be used. In its own count, so the names do not matter.
std::string as_started(const Verdict& verdict) {
  const bool has_none = verdict.launch && !verdict.launch->checkpoint_dir.empty() &&
                        verdict.launch->checkpoints.empty();
  const std::string why =
      verdict.iteration <= 1 ? " (it completed no step)" : " (no later step can be used)";
  return has_none ? "start it from the beginning: " + verdict.launch->checkpoint_dir +
                        " holds no checkpoint"
                  : "LOAD what this run was started from" + why;
}

/// Where no folder is known whose names have steps.
std::string saved_text(const Verdict& verdict) {
  if (!verdict.launch || verdict.launch->saved.empty()) return "this run was not seen to save any";
  return "its latest, by a name without a step, is " + printable(verdict.launch->saved);
}

/// Of a checkpoint that the process has read again.
std::string found_in(const CheckpointFile& file) {
  if (!file.is_finite) return "";
  return *file.is_finite ? ", which is finite" : ", where " + file.found;
}

/// What to load once the job may start again.
std::string loaded_text(const Verdict& verdict) {
  const JobDecision& decision = verdict.decision;
  const std::string folder = verdict.launch ? verdict.launch->checkpoint_dir : "";
  const CheckpointFile* const file = checkpoint_to_load(verdict);
  const std::string all =
      folder.empty() ? check_command("FOLDER") : check_command(folder) + " --all";
  if (may_be_of_large_weights(verdict)) {
    if (const CheckpointFile* const grown_from = checkpoint_before_growth(verdict)) {
      return "LOAD " + joined_path(folder, grown_from->name) + " (after " +
             step_text(grown_from->step) + "): finite, and its largest weight, " +
             short_number(*grown_from->largest) + ", had not grown";
    }
    const auto before = step_before_growth(verdict);
    const std::string old = before ? " of " + step_text(named_step(verdict, *before)) +
                                         " or older" + counts_other_steps(verdict)
                                   : std::string();
    if (folder.empty() && before) {
      return "LOAD the newest" + old + " (" + saved_text(verdict) +
             "), else start as this run was started";
    }
    return "LOAD the newest" + old +
           " from before the weights grew (finite is not enough): its largest weight is at most "
           "ten times that of the one before it in the list of " +
           all + "; if there is none: start from the beginning";
  }
  if (decision.is_to_check) {
    const bool is_down = decision.kind == DecisionKind::do_not_restart;
    const bool is_unknown = folder.empty() && (!verdict.launch || verdict.launch->loaded.empty());
    const auto& loaded = verdict.launch ? verdict.launch->loaded_elsewhere : std::nullopt;
    const std::string where =
        !is_unknown ? ""
        : loaded    ? "this run has loaded " + printable(loaded->name) + found_in(*loaded) +
                       "; FOLDER is where it saves: "
                 : "this run was not seen to load or save one; FOLDER is in the job's script: ";
    return where + "run " + all +
           " (weights and optimizer) and LOAD the newest that it finds finite" +
           (is_down ? "; if there is none: start from the beginning"
            : ranks_to_look_at(verdict).empty()
                ? "; if there is none, or only " + loaded_by_run(verdict) +
                      ": leave it down, page the model author"
                : "; if there is none: leave it down, page the model author");
  }
  if (file != nullptr) {
    const std::string path = joined_path(folder, file->name);
    const bool is_newest =
        file == &verdict.launch->checkpoints.front() && course_of(verdict) == Course::stops;
    const std::string load =
        "LOAD " + path + " (after " + step_text(file->step) + (is_newest ? ", the newest)" : ")");
    const bool is_of_before =
        decision.newest_step && *decision.newest_step == verdict.iteration - 1;
    if ((may_load_newest(verdict) || is_of_before) && verdict.job.are_weights_finite == true) {
      const std::string garbage = garbage_text(verdict);
      return load + ": " + (garbage.empty() ? kNothingBadSaved : "it holds no NaN or Inf") +
             garbage;
    }
    if (file->is_finite == true) {
      return load + ": everything in it was read and is finite" + garbage_text(verdict);
    }
    return load + ", once " + check_command(path) +
           " finds it finite, else the one before; if none is: start from the beginning" +
           garbage_text(verdict);
  }
  if (is_any_bad(verdict)) {
    return folder +
           " holds no other; the model author decides: the newest older one from elsewhere, if " +
           check_command("PATH") + " finds it finite, else from the beginning";
  }
  if (decision.newest_step && *decision.newest_step < 1) return as_started(verdict);
  if (may_load_newest(verdict)) {
    const bool is_known = verdict.job.are_weights_finite == true;
    return "LOAD the newest that the job has (" +
           (folder.empty() ? saved_text(verdict) : "none with a step in its name is in " + folder) +
           ")" + (is_known ? "" : ", if " + check_command("PATH") + " finds it finite") +
           ", else start as this run was started" + garbage_text(verdict);
  }
  return "LOAD the newest from before the update of step " + first_bad_step(verdict) +
         counts_other_steps(verdict) + ", NEVER LOAD anything newer";
}

/// Where weights had grown, the newest checkpoint whose weights had not; null if none is known.
const CheckpointFile* newest_without_growth(const Verdict& verdict) {
  return may_be_of_large_weights(verdict) ? checkpoint_before_growth(verdict) : nullptr;
}

/// The newest first: those read and found bad, those newer than the newest that may be loaded, and
/// those whose weights had grown.
std::vector<const CheckpointFile*> never_to_load(const Verdict& verdict) {
  std::vector<const CheckpointFile*> never;
  const auto newest = verdict.decision.newest_step;
  const CheckpointFile* const small = newest_without_growth(verdict);
  for (const CheckpointFile& each : checkpoints_of(verdict)) {
    const bool is_newer = verdict.launch->steps_before && newest &&
                          each.step > named_step(verdict, *newest) && !may_load_newest(verdict);
    const bool has_grown = small != nullptr && &each < small && each.largest;
    if (is_newer || has_grown || each.is_finite == false) never.push_back(&each);
  }
  return never;
}

}  // namespace

bool may_load_newest(const Verdict& verdict) {
  const auto newest = verdict.decision.newest_step;
  return course_of(verdict) == Course::stops && (!newest || *newest == verdict.iteration - 1);
}

std::int64_t named_step(const Verdict& verdict, std::int64_t step) {
  return step + (verdict.launch ? verdict.launch->steps_before.value_or(0) : 0);
}

std::string counts_other_steps(const Verdict& verdict) {
  const bool is_known = !verdict.launch || verdict.launch->steps_before;
  return is_known ? "" : " (the names in " + verdict.launch->checkpoint_dir + " count other steps)";
}

const CheckpointFile* checkpoint_to_load(const Verdict& verdict) {
  if (!verdict.launch || verdict.launch->checkpoints.empty()) return nullptr;
  const Launch& launch = *verdict.launch;
  if (!launch.steps_before) return may_load_newest(verdict) ? &launch.checkpoints.front() : nullptr;
  const auto newest = verdict.decision.newest_step;
  const auto found = std::ranges::find_if(launch.checkpoints, [&](const CheckpointFile& each) {
    return each.is_finite != false && (!newest || each.step - *launch.steps_before <= *newest);
  });
  return found == launch.checkpoints.end() ? nullptr : &*found;
}

std::string first_bad_step(const Verdict& verdict) {
  const auto newest = verdict.decision.newest_step.value_or(verdict.iteration - 1);
  return std::to_string(named_step(verdict, newest + 1));
}

std::string loaded_by_run(const Verdict& verdict) {
  const bool is_known = verdict.launch && !verdict.launch->loaded.empty();
  if (is_known) return verdict.launch->loaded + ", which this run had loaded";
  if (!verdict.launch || !verdict.launch->loaded_elsewhere) {
    return "the one that this run had loaded";
  }
  return printable(verdict.launch->loaded_elsewhere->name) + ", which this run had loaded";
}

const CheckpointFile* checkpoint_before_growth(const Verdict& verdict) {
  constexpr double kGrown = 10;
  if (!verdict.launch || !verdict.launch->steps_before) return nullptr;
  const auto before = step_before_growth(verdict);
  const auto& found = verdict.launch->checkpoints;
  for (std::size_t i = 0; i + 1 < found.size(); ++i) {
    const bool is_from_before = !before || found[i].step <= named_step(verdict, *before);
    const bool is_read = found[i].is_finite == true && found[i].largest && found[i + 1].largest;
    if (is_from_before && is_read && *found[i].largest <= kGrown * *found[i + 1].largest) {
      return &found[i];
    }
  }
  return nullptr;
}

const CheckpointFile* loaded_and_read(const Verdict& verdict, const Origin& origin) {
  const bool may_be_stored = std::ranges::count(origin.alternatives, Suspect::checkpoint) > 0;
  if (!may_be_stored || !verdict.launch) return nullptr;
  const auto& elsewhere = verdict.launch->loaded_elsewhere;
  if (elsewhere && elsewhere->is_finite) return &*elsewhere;
  if (verdict.launch->loaded.empty()) return nullptr;
  const auto& found = verdict.launch->checkpoints;
  const auto loaded = std::ranges::find(found, verdict.launch->loaded, &CheckpointFile::name);
  return loaded != found.end() && loaded->is_finite ? &*loaded : nullptr;
}

std::string fixed_text(const Verdict& verdict) {
  const Origin* const origin = deciding_origin(verdict);
  const CheckpointFile* const loaded =
      origin == nullptr ? nullptr : loaded_and_read(verdict, *origin);
  const bool is_all = loaded != nullptr && loaded->is_finite == false &&
                      checkpoint_to_load(verdict) == nullptr &&
                      verdict.decision.recurrence == Recurrence::none;
  return is_all ? "" : "after the fix: ";
}

/// The checkpoint that the block names to be loaded; null if it names none.
static const CheckpointFile* named_checkpoint(const Verdict& verdict) {
  if (may_be_of_large_weights(verdict)) return checkpoint_before_growth(verdict);
  return verdict.decision.is_to_check ? nullptr : checkpoint_to_load(verdict);
}

std::string load_of(const Verdict& verdict) {
  if (!needs_checkpoint(verdict)) return "not needed";
  if (verdict.decision.kind == DecisionKind::do_not_restart) {
    const CheckpointFile* const file = named_checkpoint(verdict);
    const bool is_known =
        file != nullptr && (verdict.job.are_weights_finite == true || file->is_finite == true);
    if (is_known) return "after the fix: " + file->name;
    if (is_any_bad(verdict)) return "nothing now";
    const auto newest = verdict.decision.newest_step;
    const bool is_as_started = newest && *newest < 1;
    const bool is_newest = may_load_newest(verdict) && verdict.job.are_weights_finite == true &&
                           !may_be_of_large_weights(verdict);
    return is_as_started ? "after the fix: as started"
           : is_newest   ? "after the fix: the newest"
                         : "nothing now";
  }
  if (may_be_of_large_weights(verdict)) {
    const CheckpointFile* const grown_from = checkpoint_before_growth(verdict);
    return grown_from != nullptr ? grown_from->name : "only one from before the weights grew";
  }
  if (verdict.decision.is_to_check) return "the newest found finite";
  if (const CheckpointFile* const file = checkpoint_to_load(verdict)) {
    const bool is_known = verdict.job.are_weights_finite == true || file->is_finite == true;
    return file->name + (is_known ? "" : ", after its check");
  }
  if (may_load_newest(verdict) && verdict.iteration <= 1) return "as started";
  if (may_load_newest(verdict)) {
    return verdict.job.are_weights_finite == true ? "the newest" : "the newest, after its check";
  }
  const auto newest = verdict.decision.newest_step;
  if (!newest) return "the newest";
  return *newest < 1 ? "as started" : step_text(named_step(verdict, *newest)) + " or older";
}

void add_checkpoint(const Verdict& verdict, Rows& rows) {
  if (!needs_checkpoint(verdict)) return;
  const JobDecision& decision = verdict.decision;
  const auto never = never_to_load(verdict);
  std::string oldest_newer, bad;
  std::size_t newer = 0;
  for (const CheckpointFile* const each : never) {
    if (each->is_finite == false) {
      bad += "NEVER LOAD " + each->name + " (" + each->found + "); ";
    } else {
      oldest_newer = each->name;
      ++newer;
    }
  }
  if (newer > 0) {
    const Origin* const origin = deciding_origin(verdict);
    const bool is_diverged = origin != nullptr && origin->cause == Cause::divergence;
    oldest_newer = "NEVER LOAD " + oldest_newer + (newer > 1 ? " or anything newer" : "") +
                   (is_diverged                                 ? " (saved while it diverged); "
                    : newest_without_growth(verdict) != nullptr ? " (its weights have grown); "
                                                                : " (it may hold the fault); ");
  }
  const bool is_down = decision.kind == DecisionKind::do_not_restart;
  add_row(rows, "checkpoint",
          oldest_newer + bad + (is_down ? fixed_text(verdict) : "") + loaded_text(verdict));
}

void add_aside(const Verdict& verdict, Rows& rows) {
  if (!needs_checkpoint(verdict)) return;
  const auto never = never_to_load(verdict);
  const CheckpointFile* const good = named_checkpoint(verdict);
  constexpr std::size_t kMost = 4;
  const bool is_running = course_of(verdict) == Course::goes_on_damaged && good != nullptr;
  if (!is_running && (never.empty() || never.size() > kMost)) return;
  const std::filesystem::path folder(verdict.launch->checkpoint_dir);
  const std::string aside = shell_word(folder.string() + ".set_aside");
  std::string command = "mkdir -p " + aside + " && ";
  if (is_running) {  // not the files that name the latest
    command += "find " + shell_word(folder.string()) +
               " -mindepth 1 -maxdepth 1 ! -name 'latest*' ! -name 'nanlocator*' -newer " +
               shell_word((folder / good->name).string()) + " -exec mv -t " + aside + " {} +";
  } else {
    command += "mv";
    for (const CheckpointFile* const each : never) {
      command += " " + shell_word((folder / each->name).string());
    }
    command += " " + aside + "/";
  }
  add_row(rows, "aside", command);
  const std::string latest =
      good == nullptr ? std::string()
                      : "; if a latest file or link names one of these, let it name " + good->name;
  add_row(rows, "",
          std::string(is_running ? "(when the job is gone: what it saved since" : "(now") +
              ", so that no resubmit loads it" + latest + ")");
}

std::string moved_text(const Verdict& verdict) {
  const auto never = never_to_load(verdict);
  if (never.empty()) return "";
  return "MOVE " +
         (never.size() == 1 ? never.front()->name : std::to_string(never.size()) + " CHECKPOINTS") +
         " AWAY";
}

}  // namespace nanlocator::inline report_room
