#include "watch.hpp"

#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <ctime>
#include <iostream>
#include <map>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include "command.hpp"
#include "console.hpp"
#include "files/json_fields.hpp"
#include "files/printable.hpp"
#include "nanlocator/error.hpp"
#include "nanlocator/files/atomic_file.hpp"
#include "nanlocator/map/rank_coordinates.hpp"
#include "nanlocator/report/read_run.hpp"
#include "nanlocator/report/terminal.hpp"
#include "nanlocator/report/verdict_json.hpp"

namespace nanlocator::command {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t kLargestStatusFile = std::uint64_t{64} << 20;
constexpr std::string_view kStopped = "stopped";

volatile std::sig_atomic_t was_interrupted = 0;

/// Ctrl-C ends the watch cleanly: the exit code says whether there were findings.
void end_on_signals() {
  struct sigaction action {};
  action.sa_handler = [](int) { was_interrupted = 1; };  // without SA_RESTART: it ends the sleep
  ::sigaction(SIGINT, &action, nullptr);
  ::sigaction(SIGTERM, &action, nullptr);
}

void sleep_for(std::chrono::milliseconds interval) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(interval);
  const timespec time{.tv_sec = seconds.count(),
                      .tv_nsec = std::chrono::nanoseconds(interval - seconds).count()};
  ::nanosleep(&time, nullptr);
}

/// The fields of status.json that are shown here.
struct RunStatus {
  std::string state;
  std::int64_t iteration = 0;
  std::string time;
  std::vector<int> silent_ranks;

  [[nodiscard]] std::string describe() const {
    std::string text = state + " at step " + std::to_string(iteration) + ", " + time;
    if (!silent_ranks.empty()) text += "; no answer from rank " + describe_ranks(silent_ranks);
    return text;
  }
};

RunStatus status_from_json(const std::string& text) {
  const auto json = parse_json(text, "status.json");
  const JsonObject object(json, "status.json");
  require_version(object, 1);
  return {.state = object.text("state"),
          .iteration = object.integer("iteration", 0),
          .time = object.text("time"),
          .silent_ranks = member_from_json<std::vector<int>>(object, "silent_ranks")};
}

/// The last line of the output. A terminal overwrites it; elsewhere it is printed when it changes.
class StatusLine {
 public:
  void show(const std::string& text) {
    if (const auto width = terminal_width()) {
      clear();
      std::string line = printable(text);
      if (line.size() >= *width) line.resize(*width - 1);
      std::cout << line << std::flush;
      is_shown_ = true;
    } else if (text != shown_) {
      std::cout << printable(text) << '\n' << std::flush;
    }
    shown_ = text;
  }

  void clear() {
    if (is_shown_) std::cout << "\r\x1b[K";
    is_shown_ = false;
  }

  void end() {
    if (is_shown_) std::cout << '\n' << std::flush;
    is_shown_ = false;
  }

 private:
  std::string shown_;
  bool is_shown_ = false;  // on a terminal, without a line break after it
};

class Watch {
 public:
  explicit Watch(fs::path directory) : directory_(std::move(directory)) {}

  /// One check; true while the run continues.
  bool look() {
    std::error_code error;
    if (!fs::is_directory(directory_, error)) {
      line_.show("waiting for " + directory_.string() + ", which does not exist yet");
      return true;
    }
    enter(latest_attempt(directory_));
    const auto status = changed_status();
    if (status) print_new_verdicts();
    if (status) status_ = status;
    has_findings_ |= status_.has_value();  // status.json is written only at findings
    if (!status_) {
      line_.show(attempt_.string() + ": no findings so far");
      return true;
    }
    line_.show(attempt_.string() + ": " + status_->describe());
    return status_->state != kStopped;
  }

  /// The exit code.
  int end() {
    line_.end();
    return has_findings_ ? kFindings : kClean;
  }

 private:
  void enter(const fs::path& attempt) {
    if (attempt == attempt_) return;
    attempt_ = attempt;
    status_text_.clear();
    status_.reset();
    printed_.clear();
  }

  /// The status, which is written after its verdict. Empty if it is unchanged or missing.
  std::optional<RunStatus> changed_status() {
    const fs::path path = attempt_ / "status.json";
    std::error_code error;
    if (!fs::exists(path, error)) return std::nullopt;
    try {
      const std::string text = read_file(path, kLargestStatusFile);
      if (text == status_text_) return std::nullopt;
      status_text_ = text;
      return status_from_json(text);
    } catch (const Error& unreadable) {
      line_.clear();
      print_notes({unreadable.what()});
      return std::nullopt;
    }
  }

  /// Prints each new verdict, and a changed one again, as when ranks fell silent. For an attempt
  /// that already had findings, prints only the latest.
  void print_new_verdicts() {
    const auto steps = recorded_steps(attempt_);
    for (const std::int64_t step : steps) {
      const bool is_latest = step == steps.back();
      if (!is_latest && (printed_.empty() || step <= printed_.rbegin()->first)) continue;
      const auto verdict = read_recorded_verdict(attempt_, step);
      if (!verdict) continue;
      std::string text = to_json(*verdict);
      if (printed_[step] == text) continue;
      printed_[step] = std::move(text);
      line_.clear();
      std::cout << format_verdict(*verdict,
                                  {.width = static_cast<int>(terminal_width().value_or(kLogWidth)),
                                   .colour = has_colour(),
                                   .run_dir = attempt_.string()})
                << std::flush;
    }
  }

  fs::path directory_;
  fs::path attempt_;
  std::string status_text_;
  std::optional<RunStatus> status_;
  std::map<std::int64_t, std::string> printed_;  // printed verdicts of this attempt, by step
  StatusLine line_;
  bool has_findings_ = false;
};

}  // namespace

int watch(const fs::path& directory, std::chrono::milliseconds interval) {
  end_on_signals();
  Watch watched(directory);
  while (was_interrupted == 0 && watched.look()) sleep_for(interval);
  return watched.end();
}

}  // namespace nanlocator::command
