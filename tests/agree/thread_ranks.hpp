// Ranks as threads of one process: a function runs once per rank, with its own Communicator.
//
// The Torch wheel lacks gloo's headers, so the flag's all-reduce is done here by hand; the tests in
// Python use gloo itself.
#pragma once

#include <ATen/ops/full.h>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "nanlocator/agree/communicator.hpp"

namespace nanlocator::testing {

using std::chrono::milliseconds;

inline Deadline after(milliseconds time) {
  return std::chrono::steady_clock::now() + time;
}

/// For events that happen: generous, so that a loaded machine passes and a hang does not.
inline constexpr milliseconds kLong{60'000};
/// For events that never happen.
inline constexpr milliseconds kShort{1'000};

inline at::Tensor flag_of(int value) {
  return at::full({1}, value, at::kInt);
}

/// MAX all-reduces between threads; the n-th call of each rank belongs together.
class MaxReduction {
 public:
  MaxReduction(int size, milliseconds timeout) : size_(size), timeout_(timeout) {}

  std::size_t contribute(std::size_t& calls_of_rank, int value) {
    const std::lock_guard lock(mutex_);
    auto& round = rounds_[calls_of_rank];
    round.max = std::max(round.max, value);
    ++round.arrived;
    changed_.notify_all();
    return calls_of_rank++;
  }

  int wait(std::size_t call) {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, timeout_, [&] { return rounds_[call].arrived == size_; })) {
      throw std::runtime_error("timed out waiting for a peer");
    }
    return rounds_[call].max;
  }

 private:
  struct Round {
    int arrived = 0;
    int max = 0;
  };
  int size_;
  milliseconds timeout_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::size_t, Round> rounds_;
};

class ThreadGroup : public c10d::ProcessGroup {
 public:
  ThreadGroup(int rank, int size, std::shared_ptr<MaxReduction> reduction)
      : ProcessGroup(rank, size), reduction_(std::move(reduction)) {}

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    if (options.reduceOp != c10d::ReduceOp::MAX) throw std::logic_error("not a MAX reduction");
    const auto call = reduction_->contribute(calls_, tensors.at(0).item<int>());
    return c10::make_intrusive<ReductionWork>(reduction_, call, tensors.at(0));
  }

 private:
  class ReductionWork : public c10d::Work {
   public:
    ReductionWork(std::shared_ptr<MaxReduction> reduction, std::size_t call, at::Tensor tensor)
        : reduction_(std::move(reduction)), call_(call), tensor_(std::move(tensor)) {}
    bool wait(milliseconds) override {
      tensor_.fill_(reduction_->wait(call_));
      return true;
    }

   private:
    std::shared_ptr<MaxReduction> reduction_;
    std::size_t call_;
    at::Tensor tensor_;
  };

  std::shared_ptr<MaxReduction> reduction_;
  std::size_t calls_ = 0;
};

using StoreOfRank = std::function<c10::intrusive_ptr<c10d::Store>(int rank)>;

inline StoreOfRank one_hash_store() {
  return [store = c10::make_intrusive<c10d::HashStore>()](int) { return store; };
}

/// Runs `body(communicator)` on a thread per rank, and returns what each threw (null: nothing).
inline std::vector<std::exception_ptr> try_ranks(
    int size, const StoreOfRank& store,
    const std::function<void(const std::shared_ptr<Communicator>&)>& body,
    milliseconds flag_timeout = kLong) {
  const auto reduction = std::make_shared<MaxReduction>(size, flag_timeout);
  std::vector<std::exception_ptr> errors(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(std::make_shared<Communicator>(c10::make_intrusive<ThreadGroup>(rank, size, reduction),
                                            store(rank), "test"));
      } catch (...) {
        errors[rank] = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  return errors;
}

/// The same, for bodies that must not throw.
inline void run_ranks(int size, const StoreOfRank& store,
                      const std::function<void(const std::shared_ptr<Communicator>&)>& body) {
  for (const auto& error : try_ranks(size, store, body)) {
    if (error) std::rethrow_exception(error);
  }
}

/// The text of an exception of exactly this type; fails for none and for others.
template <class Error>
std::string text_of(const std::exception_ptr& error) {
  if (!error) throw std::logic_error("nothing was thrown");
  try {
    std::rethrow_exception(error);
  } catch (const Error& expected) {
    return expected.what();
  }
}

}  // namespace nanlocator::testing
