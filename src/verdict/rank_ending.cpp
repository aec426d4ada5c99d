#include "nanlocator/verdict/rank_ending.hpp"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <map>
#include <optional>

#include "files/printable.hpp"

namespace nanlocator::inline verdict_room {
namespace {

constexpr std::size_t kMostBytes = 200;

using Words = std::span<const std::string_view>;

constexpr std::string_view kOfMachines[] = {
    "uncorrectable ECC",   "uncorrected ECC", "fallen off the bus", "no CUDA-capable device",
    "busy or unavailable", "hardware error",  "NODE FAIL",          "NODE_FAIL"};
constexpr std::string_view kOfKills[] = {"OutOfMemory",
                                         "out of memory",
                                         "Out Of Memory",
                                         "oom_kill",
                                         "oom-kill",
                                         "OUT_OF_MEMORY",
                                         "MemoryError",
                                         "Cannot allocate memory",
                                         "is killed by signal: Killed",
                                         "out of shared memory",
                                         "DUE TO TIME LIMIT",
                                         "DUE TO PREEMPTION",
                                         "TIMEOUT",
                                         "PREEMPTED"};
constexpr std::string_view kOfPeers[] = {
    "onnection closed", "onnection reset", "roken pipe", "NCCL",     "DistBackendError",
    "DistNetworkError", "DistStoreError",  "recvValue",  "imed out", "imeout"};
/// That no value and no batch causes.
constexpr std::string_view kProgrammingErrors[] = {
    "AttributeError",      "ImportError", "KeyError",  "ModuleNotFoundError", "NameError",
    "NotImplementedError", "SyntaxError", "TypeError", "UnboundLocalError"};

constexpr std::string_view kOfSlurm[] = {"slurmstepd: ", "srun: "};

bool has_any(std::string_view text, Words words) {
  return std::ranges::any_of(
      words, [&](std::string_view each) { return text.find(each) != std::string_view::npos; });
}

std::string_view without_margin(std::string_view text) {
  const std::size_t begin = text.find_first_not_of(" \t|");
  return begin == std::string_view::npos ? std::string_view() : text.substr(begin);
}

/// "ValueError: too large", "torch.OutOfMemoryError: ...", "KeyboardInterrupt".
bool is_last_line_of_traceback(std::string_view text) {
  const std::size_t end = std::min(text.find(':'), text.size());
  const std::string_view name = text.substr(0, end);
  const bool is_name = !name.empty() && std::ranges::all_of(name, [](unsigned char each) {
    return std::isalnum(each) != 0 || each == '_' || each == '.';
  });
  return is_name && (name.ends_with("Error") || name.ends_with("Exception") ||
                     name.ends_with("Interrupt") || name.ends_with("Exit"));
}

std::optional<int> number_at(std::string_view text) {
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() ? std::optional(number) : std::nullopt;
}

/// The number behind "NAME   : " of torchrun's list of failures.
std::optional<int> field_of(std::string_view line, std::string_view name) {
  line = without_margin(line);
  if (!line.starts_with(name)) return std::nullopt;
  line = without_margin(line.substr(name.size()));
  return line.starts_with(": ") ? number_at(line.substr(2)) : std::nullopt;
}

RankEnding ending_of(int rank, std::string_view text) {
  return {rank, ending_kind_of(text), printable(text.substr(0, kMostBytes))};
}

/// torch/distributed/elastic/multiprocessing/api.py: minus the signal's number.
RankEnding ending_of_exit(int rank, int code) {
  constexpr int kBus = -7, kKill = -9, kTerminate = -15;
  const EndingKind kind = code == kBus         ? EndingKind::machine
                          : code == kKill      ? EndingKind::killed
                          : code == kTerminate ? EndingKind::of_peers
                                               : EndingKind::other;
  return {rank, kind, "exit code " + std::to_string(code)};
}

/// One look through a log, line by line.
class LogReader {
 public:
  void read(std::string_view line) {
    read_traceback(line);
    if (const auto rank = field_of(line, "rank")) listed_ = rank;
    if (const auto code = field_of(line, "exitcode"); code && listed_) {
      exits_.insert_or_assign(*listed_, *code);
      listed_.reset();
    }
    if (!has_any(line, kOfSlurm)) return;
    const EndingKind kind = ending_kind_of(line);
    if (kind == EndingKind::killed || kind == EndingKind::machine) of_job_ = without_margin(line);
  }

  [[nodiscard]] std::optional<RankEnding> of(int rank) const {
    if (const auto error = errors_.find(rank); error != errors_.end()) {
      return ending_of(rank, error->second);
    }
    const auto exit = exits_.find(rank);
    const auto ended =
        exit == exits_.end() ? std::nullopt : std::optional(ending_of_exit(rank, exit->second));
    const bool is_told = ended && ended->kind != EndingKind::of_peers;
    if (!is_told && !of_job_.empty()) return ending_of(rank, of_job_);
    return ended;
  }

 private:
  void read_traceback(std::string_view line) {
    constexpr std::string_view kMark = "[rank";
    const std::size_t found = line.find(kMark);
    if (found == std::string_view::npos) return;
    line.remove_prefix(found + kMark.size());
    const auto rank = number_at(line);
    const std::size_t end = line.find("]:");
    if (!rank || end == std::string_view::npos) return;
    line.remove_prefix(end + 2);
    if (line.starts_with(" ")) line.remove_prefix(1);
    if (is_last_line_of_traceback(line)) errors_.insert_or_assign(*rank, line);
  }

  std::map<int, std::string_view> errors_;
  std::map<int, int> exits_;
  std::optional<int> listed_;  // the rank of torchrun's list that is being read
  std::string_view of_job_;
};

}  // namespace

EndingKind ending_kind_of(std::string_view words) {
  if (has_any(words, kOfMachines)) return EndingKind::machine;
  if (has_any(words, kOfKills)) return EndingKind::killed;
  if (has_any(words.substr(0, words.find(':')), kProgrammingErrors)) return EndingKind::code;
  return has_any(words, kOfPeers) ? EndingKind::of_peers : EndingKind::other;
}

std::vector<RankEnding> endings_in(std::string_view log, std::span<const int> ranks) {
  LogReader reader;
  while (!log.empty()) {
    const std::size_t end = std::min(log.find('\n'), log.size());
    reader.read(log.substr(0, end));
    log.remove_prefix(std::min(end + 1, log.size()));
  }
  std::vector<RankEnding> endings;
  for (const int rank : ranks) {
    if (auto found = reader.of(rank)) endings.push_back(*std::move(found));
  }
  return endings;
}

}  // namespace nanlocator::inline verdict_room
