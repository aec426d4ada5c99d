#include "step/verdict_files.hpp"

#include <algorithm>
#include <iostream>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "nanlocator/files/atomic_file.hpp"
#include "nanlocator/record/ledger.hpp"
#include "nanlocator/report/sentences.hpp"
#include "nanlocator/report/verdict_json.hpp"

namespace nanlocator::inline step_room {
namespace {

constexpr int kStatusVersion = 1;
constexpr std::string_view kRankReturned = "rank_returned";

std::vector<int> ranks_of(const std::vector<LostRank>& lost) {
  std::vector<int> ranks;
  for (const auto& each : lost) ranks.push_back(each.rank);
  return ranks;
}

std::string describe_all(const std::vector<LostRank>& lost) {
  std::string text;
  for (const auto& each : lost) text += (text.empty() ? "" : "; ") + each.describe();
  return text;
}

}  // namespace

void leave_out(const std::vector<UnwrittenBundle>& bundles, Verdict& verdict) {
  for (const auto& [folder, problem] : bundles) {
    verdict.notes.push_back(problem);
    for (Origin& origin : verdict.origins) {
      if (origin.bundle == folder) origin.bundle.clear();
    }
  }
}

VerdictFiles::VerdictFiles(Run run, std::filesystem::path directory, RankCoordinates coordinates)
    : run_(std::move(run)),
      directory_(std::move(directory)),
      coordinates_(std::move(coordinates)) {}

void VerdictFiles::now_in(Activity activity, std::int64_t iteration) {
  const std::lock_guard lock(mutex_);
  if (activity == Activity::forward_backward) reported_.reset();
  activity_ = activity;
  iteration_ = iteration;
}

Activity VerdictFiles::activity() const {
  const std::lock_guard lock(mutex_);
  return activity_;
}

void VerdictFiles::write(Verdict& verdict, VerdictScope scope, std::string_view state,
                         const std::string& archive) {
  const std::lock_guard lock(mutex_);
  name_lost_ranks(verdict, scope);
  reported_ = Reported{verdict, scope, std::string(state), archive};
  write_files(*reported_);
  verdict = reported_->verdict;
}

void VerdictFiles::add_unwritten(const std::vector<UnwrittenBundle>& bundles) {
  const std::lock_guard lock(mutex_);
  if (bundles.empty() || !reported_) return;
  leave_out(bundles, reported_->verdict);
  name_lost_ranks(reported_->verdict, reported_->scope);  // the monitor may have written meanwhile
  write_files(*reported_);
}

void VerdictFiles::take_over(const Verdict& verdict, std::string_view state) {
  const std::lock_guard lock(mutex_);
  reported_ = Reported{verdict, VerdictScope::all_ranks, std::string(state), {}};
}

void VerdictFiles::write_lost(const std::vector<LostRank>& lost) {
  const std::lock_guard lock(mutex_);
  if (lost == lost_) return;
  lost_ = lost;
  auto reported = reported_.value_or(Reported{{}, VerdictScope::alone, std::string(kRankLost), {}});
  auto& verdict = reported.verdict;
  if (!reported_) {
    verdict.run_id = run_.id;
    verdict.iteration = iteration_;
    verdict.status = VerdictStatus::partial;
    verdict.notes.push_back(own_place());
  }
  if (lost_.empty()) {
    if (is_first_living_rank()) {
      write_status(verdict, kRankReturned, "all ranks answer again");
    }
    return;
  }
  name_lost_ranks(verdict, reported.scope);
  write_ledger();
  write_verdict(verdict, own_verdict_name());
  if (!is_first_living_rank()) return;
  if (!is_less_than_on_disk(reported.scope)) write_verdict(verdict, "verdict.json");
  write_status(verdict, reported.state, summary_of(verdict));
  std::cerr << "nanlocator: " + describe_all(lost_) + "; see " +
                   (directory_ / "verdict.json").string() + "\n"
            << std::flush;
}

std::vector<LostRank> VerdictFiles::lost() const {
  const std::lock_guard lock(mutex_);
  return lost_;
}

// --- with the lock held ---

void VerdictFiles::write_files(Reported& reported) const {
  auto& [verdict, scope, state, archive] = reported;
  if (scope == VerdictScope::alone || coordinates_.rank != 0) {
    write_verdict(verdict, own_verdict_name());
  }
  if (is_first_living_rank() && (scope == VerdictScope::all_ranks || !lost_.empty())) {
    if (!archive.empty()) write_verdict(verdict, std::filesystem::path("verdicts") / archive);
    if (!is_less_than_on_disk(scope)) write_verdict(verdict, "verdict.json");
    write_status(verdict, state, summary_of(verdict));
  }
}

bool VerdictFiles::is_first_living_rank() const {
  for (int rank = 0; rank < coordinates_.rank; ++rank) {
    const bool is_lost =
        std::ranges::any_of(lost_, [&](const LostRank& each) { return each.rank == rank; });
    if (!is_lost) return false;
  }
  return true;
}

// Rank 0 has concluded this step for all ranks and has ended; a single rank's verdict goes into its
// own file.
bool VerdictFiles::is_less_than_on_disk(VerdictScope scope) const {
  if (scope == VerdictScope::all_ranks || coordinates_.rank == 0) return false;
  std::error_code error;
  return std::filesystem::exists(
      directory_ / "verdicts" / ("step" + std::to_string(iteration_) + ".json"), error);
}

// Put first, because readers look at the first three notes.
void VerdictFiles::name_lost_ranks(Verdict& verdict, VerdictScope scope) const {
  if (lost_.empty()) return;
  std::vector<std::string> notes;
  for (const auto& each : lost_) {
    auto note = each.describe() + ".";
    if (std::ranges::find(verdict.notes, note) == verdict.notes.end()) {
      notes.push_back(std::move(note));
    }
  }
  verdict.notes.insert(verdict.notes.begin(), notes.begin(), notes.end());
  if (scope == VerdictScope::alone) verdict.silent_ranks = ranks_of(lost_);
}

void VerdictFiles::write_verdict(Verdict& verdict, const std::filesystem::path& name) const {
  try {
    const auto path = directory_ / name;
    ensure_directory(path.parent_path());
    write_file_atomically(path, to_json(verdict));
  } catch (const std::exception& error) {
    verdict.notes.push_back("The verdict is not on disk: " + std::string(error.what()));
  }
}

void VerdictFiles::write_status(const Verdict& verdict, std::string_view state,
                                const std::string& summary) const {
  nlohmann::ordered_json json;
  json["version"] = kStatusVersion;
  json["run_id"] = run_.id;
  json["attempt"] = run_.attempt;
  json["state"] = state;
  json["iteration"] = verdict.iteration;
  json["summary"] = summary;
  json["verdict"] = "verdict.json";
  auto silent = ranks_of(lost_);
  silent.insert(silent.end(), verdict.silent_ranks.begin(), verdict.silent_ranks.end());
  json["silent_ranks"] = std::set<int>(silent.begin(), silent.end());
  json["time"] = utc_time();
  try {
    write_file_atomically(
        directory_ / "status.json",
        json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n");
  } catch (const std::exception&) {
    // The verdict, written just before, has this as a note.
  }
}

std::string VerdictFiles::summary_of(const Verdict& verdict) const {
  return verdict.origins.empty() && !lost_.empty() ? describe_all(lost_) : headline_of(verdict);
}

void VerdictFiles::write_ledger() const {
  Ledger ledger;
  ledger.run_id = run_.id;
  ledger.attempt = run_.attempt;
  ledger.iteration = iteration_;
  ledger.coordinates = coordinates_;
  for (const auto& each : lost_) ledger.notes.push_back(each.describe() + ".");
  ledger.notes.push_back(own_place());
  try {
    append_ledger(directory_, ledger);
  } catch (const std::exception&) {
    // This rank's verdict has the same content.
  }
}

std::string VerdictFiles::own_verdict_name() const {
  return "verdict_rank" + std::to_string(coordinates_.rank) + ".json";
}

std::string VerdictFiles::own_place() const {
  return "Then " + coordinates_.describe() + " was in " + std::string(name_of(activity_)) +
         " of iteration " + std::to_string(iteration_) + ".";
}

}  // namespace nanlocator::inline step_room
