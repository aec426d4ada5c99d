#include "step/rank_logs.hpp"

#include <algorithm>
#include <atomic>
#include <exception>
#include <fstream>
#include <map>
#include <system_error>
#include <utility>

#include "nanlocator/report/read_run.hpp"
#include "nanlocator/verdict/decision.hpp"

namespace nanlocator::inline step_room {
namespace {

namespace fs = std::filesystem;

/// "" if it is a terminal, a pipe or gone.
std::string file_of_stderr() {
  std::error_code error;
  const fs::path file = fs::read_symlink("/proc/self/fd/2", error);
  return !error && fs::is_regular_file(file, error) ? file.string() : "";
}

std::atomic<std::int64_t> log_begin{0};

/// What this attempt has written to a log, at most the last 16 MiB; "" if it cannot be read.
std::string end_of(const std::string& log, std::int64_t begin) {
  constexpr std::int64_t kMostBytes = std::int64_t{16} << 20;
  std::ifstream file(log, std::ios::binary | std::ios::ate);
  if (log.empty() || !file) return "";
  const std::int64_t size = file.tellg();
  begin = std::max(begin, size - kMostBytes);
  if (begin >= size) return "";
  std::string text(static_cast<std::size_t>(size - begin), '\0');
  file.seekg(begin);
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(file.gcount()));
  return text;
}

/// Of a rank with several, the one that says most. Returns whether it is this one.
bool add_ending(RankEnding ending, std::vector<RankEnding>& endings) {
  const auto known = std::ranges::find(endings, ending.rank, &RankEnding::rank);
  if (known == endings.end()) {
    endings.push_back(std::move(ending));
    return true;
  }
  if (known->kind >= ending.kind) return false;
  *known = std::move(ending);
  return true;
}

void read_log(const std::string& log, std::int64_t begin, std::span<const int> ranks,
              std::vector<RankEnding>& endings) {
  for (auto& each : endings_in(end_of(log, begin), ranks)) add_ending(std::move(each), endings);
}

}  // namespace

RankLog own_log() {
  return {.log = file_of_stderr(), .log_begin = log_begin};
}

RankPlace place_of_this_rank(const RankCoordinates& coordinates) {
  RankLog own = own_log();
  return {coordinates.describe(), coordinates.host, std::move(own.log), own.log_begin};
}

void begin_log() noexcept {
  std::error_code error;
  const auto size = fs::file_size(file_of_stderr(), error);
  log_begin = error ? 0 : static_cast<std::int64_t>(size);
}

std::vector<RankEnding> read_endings(const Launch& launch, std::span<const int> ranks) noexcept {
  constexpr std::size_t kMostFiles = 16;  // of other ranks; those of one host mostly share one
  std::vector<RankEnding> found;
  try {
    std::map<std::string, std::pair<std::int64_t, std::vector<int>>> files;
    for (const RankLog& each : launch.logs) {
      if (std::ranges::find(ranks, each.rank) == ranks.end()) continue;
      if (files.size() >= kMostFiles && !files.contains(each.log)) continue;
      auto& [begin, of] =
          files.try_emplace(each.log, each.log_begin, std::vector<int>()).first->second;
      begin = std::min(begin, each.log_begin);
      of.push_back(each.rank);
    }
    for (const auto& [log, part] : files) read_log(log, part.first, part.second, found);
    read_log(launch.log, launch.log_begin, ranks, found);
  } catch (const std::exception&) {  // what is missing is said to be unknown
  }
  return found;
}

bool add_later_endings(Verdict& verdict, const fs::path& attempt, const std::string& job_state) {
  if (!verdict.launch) return false;
  auto found = read_endings(*verdict.launch, verdict.silent_ranks);
  const EndingKind of_job = ending_kind_of(job_state);
  if (of_job == EndingKind::killed || of_job == EndingKind::machine) {
    for (const int rank : verdict.silent_ranks) {
      const auto known = std::ranges::find(found, rank, &RankEnding::rank);
      if (known == found.end()) found.push_back({rank, of_job, "the job is " + job_state});
    }
  }
  bool is_new = false;
  for (auto& each : found) is_new |= add_ending(std::move(each), verdict.launch->endings);
  if (is_new) verdict.decision = decide(verdict, earlier_verdicts(attempt));
  return is_new;
}

}  // namespace nanlocator::inline step_room
