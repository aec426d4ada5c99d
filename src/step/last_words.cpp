#include "step/last_words.hpp"

#include <semaphore.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

namespace nanlocator::inline step_room {
namespace {

constexpr std::chrono::seconds kPatience{5};

struct Registered {
  std::mutex mutex;
  std::map<int, std::function<void()>> writes;
  int next_key = 0;
};

Registered& registered() {
  static Registered* const kept = new Registered;  // its thread outlives static destructors
  return *kept;
}

// Globals that a signal handler may use.
sem_t is_terminated;
pid_t process_of_handler = 0;

void end_by_default() {
  struct sigaction as_before = {};
  as_before.sa_handler = SIG_DFL;
  sigaction(SIGTERM, &as_before, nullptr);
  kill(getpid(), SIGTERM);
}

void on_sigterm(int) {
  if (getpid() != process_of_handler) {
    end_by_default();  // a forked child, without our thread
  } else {
    sem_post(&is_terminated);
  }
}

void serve() {
  while (sem_wait(&is_terminated) != 0) {
  }
  std::thread([] {
    std::this_thread::sleep_for(kPatience);
    end_by_default();
  }).detach();
  {
    const std::lock_guard lock(registered().mutex);
    for (const auto& [key, write] : registered().writes) write();
  }
  end_by_default();
}

/// Once per process, if SIGTERM has no handler yet.
void handle_sigterm() {
  if (process_of_handler == getpid()) return;
  struct sigaction current = {};
  sigaction(SIGTERM, nullptr, &current);
  if (current.sa_handler != SIG_DFL) return;
  process_of_handler = getpid();
  sem_init(&is_terminated, /*pshared=*/0, 0);
  std::thread(serve).detach();
  struct sigaction ours = {};
  ours.sa_handler = on_sigterm;
  ours.sa_flags = SA_RESTART;
  sigaction(SIGTERM, &ours, nullptr);
}

}  // namespace

LastWords::LastWords(std::function<void()> write) {
  const std::lock_guard lock(registered().mutex);
  key_ = registered().next_key++;
  registered().writes.emplace(key_, std::move(write));
  handle_sigterm();
}

LastWords::~LastWords() {
  const std::lock_guard lock(registered().mutex);
  registered().writes.erase(key_);
}

}  // namespace nanlocator::inline step_room
