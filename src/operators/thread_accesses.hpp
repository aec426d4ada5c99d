// Memory that the step and other threads of the program both use in a pass: who came first.
//
// A trace does not see whether one thread waits for another (a lock, a queue, a join). So each
// order that was seen is tried the other way round in a pass of its own: where the operator that
// came first can be made to wait until the second has run, the program keeps no order between them.
// Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "nanlocator/operators/operator_trace.hpp"
#include "tensor/observed_tensor.hpp"

namespace nanlocator::inline operators_room {

class ThreadAccesses {
 public:
  /// The calling thread is the step's.
  void begin_pass();
  [[nodiscard]] bool is_of_step(std::size_t backward_depth) const;

  /// How often the place has been counted before in this pass.
  [[nodiscard]] int count(const ThreadOrder::Place& place);
  [[nodiscard]] bool is_known(const at::Tensor& tensor) const;
  /// `place` uses `tensor`. Returns the orders that are seen for the first time with it, as
  /// positions in `orders`.
  std::vector<std::size_t> add(const at::Tensor& tensor, const ThreadOrder::Place& place);
  [[nodiscard]] std::vector<ThreadOrder> orders() const;
  void set_access(std::size_t order, UnorderedAccess access);

 private:
  struct Access {
    ThreadOrder::Place place;
    ByteRange range;
  };
  using PlaceKey = std::tuple<bool, const void*, int, std::string>;
  struct Memory {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // its address gets nobody else
    std::vector<Access> of_step, of_others;             // of each place and range the first
    std::map<std::pair<PlaceKey, bool>, std::vector<ByteRange>> known;  // by place and is_write
  };

  static PlaceKey key_of(const ThreadOrder::Place& place);

  mutable std::mutex mutex_;
  std::uint64_t step_thread_ = 0;
  std::unordered_map<const c10::StorageImpl*, Memory> memory_;
  std::map<PlaceKey, int> executions_;
  std::vector<ThreadOrder> orders_;
};

/// Makes the first of two operators, in the execution that was seen to come first, wait for the
/// second to have used its memory.
class Turn {
 public:
  void begin_pass();
  /// Before `place` runs, which has `tensors` among its arguments.
  void await(const ThreadOrder& order, const ThreadOrder::Place& place,
             const std::vector<at::Tensor>& tensors);
  /// After it has run.
  void give(const ThreadOrder& order, const ThreadOrder::Place& place,
            const std::vector<at::Tensor>& tensors);
  [[nodiscard]] bool has_come() const;

 private:
  enum class State : std::uint8_t { not_come, awaited, has_come, is_over };
  struct Memory {
    const c10::StorageImpl* storage = nullptr;  // alive: an operator with it waits
    ByteRange range;
  };

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  State state_ = State::not_come;
  int executions_ = 0;          // of the first operator, in this pass
  std::vector<Memory> memory_;  // of what is awaited
};

}  // namespace nanlocator::inline operators_room
