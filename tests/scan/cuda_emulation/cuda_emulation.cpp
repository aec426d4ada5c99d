// Compiled without sanitizers; it announces to the thread sanitizer what that must know.
#include "cuda_emulation.hpp"

#include <sys/mman.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <thread>

#if !defined(__x86_64__)
#error "the switch between stacks is written for x86-64"
#endif

extern "C" {
// The thread sanitizer's functions, null without it.
[[gnu::weak]] void __tsan_acquire(void* address);
[[gnu::weak]] void __tsan_release(void* address);
[[gnu::weak]] void* __tsan_get_current_fiber();
[[gnu::weak]] void* __tsan_create_fiber(unsigned int flags);
[[gnu::weak]] void __tsan_switch_to_fiber(void* fiber, unsigned int flags);

/// Saves this stack's position in `*from` and continues on the stack `to`.
void cuda_emulation_switch_stacks(void** from, void* to);
}
asm(R"(
.text
.type cuda_emulation_switch_stacks, @function
cuda_emulation_switch_stacks:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cuda_emulation_switch_stacks, .-cuda_emulation_switch_stacks
)");

namespace cuda_emulation {

constinit thread_local dim3 thread_index, block_index, block_size, grid_size;

namespace {

constexpr unsigned int kMaxThreads = 1024;
constexpr unsigned int kWarp = 32;
constexpr std::size_t kStackBytes = 128 * 1024;
constexpr std::size_t kGuardBytes = 4096;  // below each stack

[[noreturn]] void die(const char* reason, int line) {
  std::fprintf(stderr, "emulated kernel: %s (line %d)\n", reason, line);
  std::abort();
}

/// What happened before, for the thread sanitizer, which identifies it by the object's address.
class Order {
 public:
  void acquire() {
    if (__tsan_acquire != nullptr) __tsan_acquire(this);
  }
  void release() {
    if (__tsan_release != nullptr) __tsan_release(this);
  }

 private:
  char here_ = 0;
};

/// A position to continue from: that of a CUDA thread, or of the host thread that runs its block.
struct Stack {
  void* pointer = nullptr;
  void* fiber = nullptr;

  void switch_to(const Stack& other) {
    constexpr unsigned int kOrdersNothing = 1;  // __tsan_switch_to_fiber_no_sync
    if (__tsan_switch_to_fiber != nullptr) __tsan_switch_to_fiber(other.fiber, kOrdersNothing);
    cuda_emulation_switch_stacks(&pointer, other.pointer);
  }
};

// The CUDA threads access this without a mutex, in which the thread sanitizer would see an order.
constexpr int kLines = 10000;
bool line_was_met[kLines];
int left_out_line = 0;
unsigned int fence_count = 0;

/// False if `leave_out` disabled the barrier or fence in this line.
bool enter(int line) {
  __atomic_store_n(&line_was_met[line % kLines], true, __ATOMIC_RELAXED);
  return line != __atomic_load_n(&left_out_line, __ATOMIC_RELAXED);
}

struct Launch {
  std::function<void()> kernel;
  unsigned int blocks;
  unsigned int threads;
  unsigned int blocks_done = 0;
};

/// Room for one block on a multiprocessor; runs one block after the other.
class BlockSlot {
 public:
  explicit BlockSlot(unsigned int seed) : random_(seed) {}

  void run(const Launch& launch, unsigned int index) {
    current = this;
    block_index = {index};
    block_size = {launch.threads};
    grid_size = {launch.blocks};
    if (__tsan_get_current_fiber != nullptr) host_.fiber = __tsan_get_current_fiber();
    while (thread_count_ < launch.threads) add_thread();
    launch_ = &launch;
    unfinished_ = launch.threads;
    ready_first_ = ready_count_ = 0;
    for (unsigned int i = 0; i < launch.threads; ++i) make_ready(i);
    for (unsigned int i = launch.threads - 1; i > 0; --i)
      std::swap(ready_[i], ready_[random_() % i]);
    start_.release();
    resume_next(host_);
    end_.acquire();
  }

  void wait_for_block(int line) {
    if (barrier_.arrived > 0 && barrier_.line != line) {
      die("threads of a block wait at different barriers", line);
    }
    barrier_.line = line;
    Order& order = barrier_.order[barrier_.generation % 2];
    order.release();
    arrive(barrier_, launch_->threads);
    order.acquire();
  }

  std::uint32_t shuffle_down(std::uint32_t value, unsigned int lanes) {
    Warp& warp = warps_[running_ / kWarp];
    const unsigned int lane = running_ % kWarp;
    auto& values = warp.values[warp.rendezvous.generation % 2];
    values[lane] = value;
    arrive(warp.rendezvous, kWarp);
    return lane + lanes < kWarp ? values[lane + lanes] : value;
  }

  unsigned int random() { return random_(); }

  static thread_local BlockSlot* current;

 private:
  /// A point at which some of the block's threads wait for all of them.
  struct Rendezvous {
    std::array<unsigned int, kMaxThreads> waiting;
    unsigned int arrived = 0;
    unsigned int generation = 0;
    int line = 0;
    Order order[2];  // the next round may begin before all have left this one
  };
  struct Warp {
    Rendezvous rendezvous;
    std::array<std::uint32_t, kWarp> values[2];
  };

  void arrive(Rendezvous& rendezvous, unsigned int expected) {
    const unsigned int me = running_;
    rendezvous.waiting[rendezvous.arrived++] = me;
    if (rendezvous.arrived < expected) {
      resume_next(threads_[me]);
      return;
    }
    for (unsigned int i = 0; i + 1 < expected; ++i) make_ready(rendezvous.waiting[i]);
    rendezvous.arrived = 0;
    ++rendezvous.generation;
  }

  void make_ready(unsigned int thread) {
    ready_[(ready_first_ + ready_count_++) % kMaxThreads] = thread;
  }

  void resume_next(Stack& from) {
    if (ready_count_ == 0) {
      if (unfinished_ > 0) die("a thread ended while others of its block wait", barrier_.line);
      from.switch_to(host_);
      return;
    }
    running_ = ready_[ready_first_];
    ready_first_ = (ready_first_ + 1) % kMaxThreads;
    --ready_count_;
    thread_index = {running_};
    from.switch_to(threads_[running_]);
  }

  void add_thread() {
    constexpr std::size_t bytes = kGuardBytes + kStackBytes;
    void* const memory =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) die("no memory for a stack", 0);
    (void)mprotect(memory, kGuardBytes, PROT_NONE);
    auto* const top = reinterpret_cast<void**>(static_cast<char*>(memory) + bytes);
    // As cuda_emulation_switch_stacks leaves it: six registers and the return address. On entry a
    // function expects its stack 8 bytes below a multiple of 16.
    top[-2] = reinterpret_cast<void*>(&run_threads);
    Stack& stack = threads_[thread_count_++];
    stack.pointer = top - 8;
    if (__tsan_create_fiber != nullptr) stack.fiber = __tsan_create_fiber(0);
  }

  /// The main loop of a stack: runs one CUDA thread after the other.
  static void run_threads() {
    BlockSlot& slot = *current;
    const unsigned int me = slot.running_;
    while (true) {
      slot.start_.acquire();
      slot.launch_->kernel();
      slot.end_.release();
      --slot.unfinished_;
      slot.resume_next(slot.threads_[me]);
    }
  }

  const Launch* launch_ = nullptr;
  Stack host_;
  std::array<Stack, kMaxThreads> threads_;
  unsigned int thread_count_ = 0;
  std::array<unsigned int, kMaxThreads> ready_;  // a ring
  unsigned int ready_first_ = 0;
  unsigned int ready_count_ = 0;
  unsigned int running_ = 0;
  unsigned int unfinished_ = 0;
  Rendezvous barrier_;
  std::array<Warp, kMaxThreads / kWarp> warps_;
  Order start_, end_;
  std::minstd_rand random_;
};
thread_local BlockSlot* BlockSlot::current = nullptr;

/// The blocks of all launches, in order, and the threads that run them.
class BlockQueue {
 public:
  BlockQueue() {
    for (unsigned int i = 0; i < kMultiprocessors * kBlocksPerMultiprocessor; ++i) {
      std::thread([this, i] { run_blocks(i + 1); }).detach();  // until the process ends
    }
  }

  void run(Launch& launch) {
    std::unique_lock lock(mutex_);
    for (unsigned int i = 0; i < launch.blocks; ++i) blocks_.emplace_back(&launch, i);
    changed_.notify_all();
    changed_.wait(lock, [&] { return launch.blocks_done == launch.blocks; });
  }

 private:
  void run_blocks(unsigned int seed) {
    const auto slot = std::make_unique<BlockSlot>(seed);
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return !blocks_.empty(); });
      const auto [launch, index] = blocks_.front();
      blocks_.pop_front();
      lock.unlock();
      slot->run(*launch, index);
      lock.lock();
      if (++launch->blocks_done == launch->blocks) changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::pair<Launch*, unsigned int>> blocks_;
};

}  // namespace

void wait_for_block(int line) {
  if (enter(line)) BlockSlot::current->wait_for_block(line);
}

void fence(int line) {
  static Order all_fences;
  static bool taken = false;
  __atomic_fetch_add(&fence_count, 1, __ATOMIC_RELAXED);
  if (!enter(line)) return;
  while (__atomic_test_and_set(&taken, __ATOMIC_ACQUIRE)) {
  }
  all_fences.acquire();
  all_fences.release();
  __atomic_clear(&taken, __ATOMIC_RELEASE);
}

std::uint32_t shuffle_down(std::uint32_t mask, std::uint32_t value, unsigned int lanes) {
  if (mask != ~std::uint32_t{0}) die("a shuffle of less than a warp is not emulated", 0);
  return BlockSlot::current->shuffle_down(value, lanes);
}

void hesitate() {
  if (BlockSlot::current->random() % 2 == 0) return;
  const auto fences = __atomic_load_n(&fence_count, __ATOMIC_RELAXED);
  for (int i = 0; i < 10 && __atomic_load_n(&fence_count, __ATOMIC_RELAXED) == fences; ++i) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

void run(std::function<void()> kernel, unsigned int grid, unsigned int threads) {
  static auto& queue = *new BlockQueue;  // never destroyed: its threads outlive every destructor
  if (threads == 0 || threads > kMaxThreads || threads % kWarp != 0) {
    die("a block must have whole warps and at most 1024 threads", 0);
  }
  Launch launch{std::move(kernel), grid, threads};
  queue.run(launch);
}

std::vector<int> ordering_lines() {
  std::vector<int> lines;
  for (int line = 0; line < kLines; ++line) {
    if (__atomic_load_n(&line_was_met[line], __ATOMIC_RELAXED)) lines.push_back(line);
  }
  return lines;
}

void leave_out(int line) {
  __atomic_store_n(&left_out_line, line, __ATOMIC_RELAXED);
}

}  // namespace cuda_emulation
