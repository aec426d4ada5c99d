// Records memory that both the step and other threads of the program use in a pass, and who came
// first.
//
// A trace cannot see whether one thread waits for another (a lock, a queue, a join). So each
// observed order is tried in reverse, in a pass of its own. If the first operator can be delayed
// until the second has run, the program does not order them. Thread-safe.
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
#include "operators/frames.hpp"
#include "tensor/observed_tensor.hpp"

namespace nanlocator::inline operators_room {

class ThreadAccesses {
 public:
  /// Call it on the step's thread.
  void begin_pass();
  [[nodiscard]] bool is_of_step(const ThreadFrames& frames) const;

  /// The number of earlier calls for this place in this pass.
  [[nodiscard]] int count(const ThreadOrder::Place& place);
  [[nodiscard]] bool is_known(const at::Tensor& tensor) const;
  /// `place` uses `tensor`. Returns the newly observed orders, as indices into `orders`.
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
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // prevents reuse of its address
    std::vector<Access> of_step, of_others;             // the first per place and range
    std::map<std::pair<PlaceKey, bool>, std::vector<ByteRange>> known;  // by place and is_write
  };

  static PlaceKey key_of(const ThreadOrder::Place& place);

  mutable std::mutex mutex_;
  std::uint64_t step_thread_ = 0;
  std::unordered_map<const c10::StorageImpl*, Memory> memory_;
  std::map<PlaceKey, int> executions_;
  std::vector<ThreadOrder> orders_;
};

/// Makes the first of two operators, in the execution that was seen to come first, wait until the
/// second has used its memory.
class Turn {
 public:
  void begin_pass();
  /// Call it before `place` runs with `tensors` among its arguments.
  void await(const ThreadOrder& order, const ThreadOrder::Place& place,
             const std::vector<at::Tensor>& tensors);
  /// Call it after `place` has run.
  void give(const ThreadOrder& order, const ThreadOrder::Place& place,
            const std::vector<at::Tensor>& tensors);
  [[nodiscard]] bool has_come() const;

 private:
  enum class State : std::uint8_t { not_come, awaited, has_come, is_over };
  struct Memory {
    const c10::StorageImpl* storage = nullptr;  // alive, as an operator that uses it is waiting
    ByteRange range;
  };

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  State state_ = State::not_come;
  int executions_ = 0;          // of the first operator, in this pass
  std::vector<Memory> memory_;  // the memory that it waits for
};

}  // namespace nanlocator::inline operators_room
