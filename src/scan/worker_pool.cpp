#include "scan/worker_pool.hpp"

#include <pthread.h>

#include <condition_variable>
#include <csignal>
#include <mutex>
#include <system_error>
#include <thread>

namespace nanlocator::inline scan_room {
namespace {

class WorkerPool {
 public:
  void run(int more, const std::function<void()>& work) {
    const std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
    if (!turn.owns_lock()) return work();
    grow(more);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      work_ = &work;
      wanted_ = more < threads_ ? more : threads_;
    }
    wake_.notify_all();
    work();
    std::unique_lock<std::mutex> lock(mutex_);
    wanted_ = 0;  // threads that have not begun are no longer needed
    idle_.wait(lock, [this] { return active_ == 0; });
    work_ = nullptr;
  }

 private:
  void grow(int threads) {
    if (threads_ >= threads) return;
    // Signals belong to the program's own threads: the new ones inherit a mask that blocks all.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      for (; threads_ < threads; ++threads_) std::thread([this] { serve(); }).detach();
    } catch (const std::system_error&) {
      // No more threads are available; the scan takes longer, with the same result.
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  [[noreturn]] void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return wanted_ > 0; });
      --wanted_;
      ++active_;
      const std::function<void()>& work = *work_;
      lock.unlock();
      work();
      lock.lock();
      if (--active_ == 0) idle_.notify_one();
    }
  }

  std::mutex turn_;  // held by the caller that the pool serves
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable idle_;
  int threads_ = 0;
  // Guarded by mutex_:
  const std::function<void()>* work_ = nullptr;
  int wanted_ = 0;  // threads that may still begin
  int active_ = 0;  // threads in work()
};

std::mutex pool_mutex;
WorkerPool* pool = nullptr;

// Never destroyed: its threads may be parked in it when the process exits. In a forked child its
// threads are gone and its mutexes may be locked forever, so the child abandons it.
WorkerPool& this_process_pool() {
  const std::lock_guard<std::mutex> lock(pool_mutex);
  [[maybe_unused]] static const int registered =
      pthread_atfork([] { pool_mutex.lock(); }, [] { pool_mutex.unlock(); },
                     [] {
                       pool = nullptr;
                       pool_mutex.unlock();
                     });
  if (pool == nullptr) pool = new WorkerPool;
  return *pool;
}

}  // namespace

void run_shared(int more, const std::function<void()>& work) {
  this_process_pool().run(more, work);
}

}  // namespace nanlocator::inline scan_room
