// Ranks as forked processes around one TCPStore, so that they can be killed and stopped. Each runs
// only a RankMonitor and writes the lost ranks to a file.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <map>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

#include "agree/store_client.hpp"
#include "nanlocator/agree/rank_monitor.hpp"
#include "nanlocator/files/atomic_file.hpp"
#include "temporary_folder.hpp"

namespace nanlocator::testing {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

inline constexpr MonitorTimes kQuick{milliseconds(100), milliseconds(1'000)};

inline std::string place_of(int rank) {
  return "rank " + std::to_string(rank) + " (host h" + std::to_string(rank) + ")";
}

class ProcessRanks {
 public:
  /// All processes are forked before the Store's thread exists: a lock that it held at that moment
  /// would stay locked in the child.
  explicit ProcessRanks(int size) : size_(size) {
    for (int rank = 0; rank < size; ++rank) fork_rank(rank);
    c10d::TCPStoreOptions server;
    server.port = 0;
    server.isServer = true;
    server.waitWorkers = false;
    host_ = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", server);
  }
  ~ProcessRanks() {
    for (const auto& [rank, process] : processes_) ::kill(process, SIGKILL);
    for (const auto& [rank, process] : processes_) ::waitpid(process, nullptr, 0);
    for (const auto& [rank, pipe] : pipes_) ::close(pipe);
  }
  ProcessRanks(const ProcessRanks&) = delete;  // one owner ends them
  ProcessRanks& operator=(const ProcessRanks&) = delete;

  void start_all() {
    for (int rank = 0; rank < size_; ++rank) start(rank);
  }
  /// Starts a rank whose heartbeat says `activity` of iteration 7. `spinners`: threads that keep
  /// cores busy beside it.
  void start(int rank, Activity activity = Activity::forward_backward, int spinners = 0) {
    const Start start{host_->getPort(), activity, spinners};
    ASSERT_EQ(::write(pipes_.at(rank), &start, sizeof start), sizeof start);
    started_.push_back(rank);
  }
  /// Returns when every started rank's heartbeat says iteration 7 and its neighbours have had time
  /// to see it.
  void wait_until_settled() const {
    const auto deadline = Clock::now() + milliseconds(60'000);
    for (const int rank : started_) {
      while (!has_settled(rank)) {
        ASSERT_LT(Clock::now(), deadline) << "rank " << rank << " has not started";
        std::this_thread::sleep_for(milliseconds(10));
      }
    }
    std::this_thread::sleep_for(10 * kQuick.interval);
  }
  void send(int rank, int signal) const { ASSERT_EQ(::kill(processes_.at(rank), signal), 0); }
  /// In good order, or with the text of an exception.
  void leave(int rank) const { send(rank, SIGUSR1); }
  void end_by_value_error(int rank) const { send(rank, SIGUSR2); }

  /// The lost ranks that `rank` last reported, one sentence a line; "never" if nothing has changed.
  [[nodiscard]] std::string lost_on(int rank) const {
    const auto file = file_of(rank);
    return std::filesystem::exists(file) ? read_file(file) : "never";
  }
  /// Waits until that is `expected`; fails after `patience`.
  void expect_lost(int rank, const std::string& expected, milliseconds patience) const {
    const auto deadline = Clock::now() + patience;
    while (lost_on(rank) != expected && Clock::now() < deadline) {
      std::this_thread::sleep_for(milliseconds(10));
    }
    EXPECT_EQ(lost_on(rank), expected) << "on rank " << rank;
  }

 private:
  [[nodiscard]] bool has_settled(int rank) const {
    const auto key = "test/beat/" + std::to_string(rank);
    return host_->check({key}) &&
           host_->get_to_str(key).find("\"iteration\":7") != std::string::npos;
  }
  [[nodiscard]] std::filesystem::path file_of(int rank) const {
    return folder_.path() / ("lost_on_" + std::to_string(rank));
  }

  struct Start {
    std::uint16_t port;
    Activity activity;
    int spinners;
  };

  void fork_rank(int rank) {
    int ends[2];
    if (::pipe(ends) != 0) throw std::runtime_error("pipe failed");
    const pid_t process = ::fork();
    if (process < 0) throw std::runtime_error("fork failed");
    if (process == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      Start start{};
      if (::read(ends[0], &start, sizeof start) == sizeof start) run(rank, start);
      ::_exit(1);
    }
    ::close(ends[0]);
    processes_[rank] = process;
    pipes_[rank] = ends[1];
  }

  [[noreturn]] void run(int rank, const Start& start) const {
    sigset_t orders;
    ::sigemptyset(&orders);
    ::sigaddset(&orders, SIGUSR1);
    ::sigaddset(&orders, SIGUSR2);
    ::pthread_sigmask(SIG_BLOCK, &orders, nullptr);
    c10d::TCPStoreOptions options;
    options.port = start.port;
    RankMonitor monitor(
        std::make_unique<StoreClient>(c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options)),
        "test", rank, size_, RankPlace{.text = place_of(rank)}, kQuick,
        [&](const std::vector<LostRank>& lost) {
          std::string text;
          for (const auto& each : lost) text += each.describe() + "\n";
          write_file_atomically(file_of(rank), text);
        });
    monitor.now_in(start.activity, 7);
    for (int i = 0; i < start.spinners; ++i) {
      std::thread([] {
        for (volatile unsigned long count = 0;;) count = count + 1;
      }).detach();
    }
    int order = 0;
    ::sigwait(&orders, &order);
    monitor.leave(order == SIGUSR2 ? "ValueError: no data" : "");
    ::_exit(0);
  }

  int size_;
  TemporaryFolder folder_;
  c10::intrusive_ptr<c10d::TCPStore> host_;
  std::vector<int> started_;
  std::map<int, pid_t> processes_;
  std::map<int, int> pipes_;  // to each of them
};

}  // namespace nanlocator::testing
