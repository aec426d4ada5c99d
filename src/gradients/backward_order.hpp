// The order in which backward finished the parameters' gradients in the latest complete step.
//
// A parameter may fire many times a step (microbatches); its last time counts. Cost: an append per
// call. Any thread may call (on CUDA, autograd runs hooks on its own threads).
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

namespace nanlocator::inline gradients_room {

class BackwardOrder {
 public:
  explicit BackwardOrder(std::size_t parameters) : parameters_(parameters) {}

  /// `parameter` is below the number of parameters.
  void record(std::int64_t parameter);
  /// The step's backward has ended.
  void end_step();
  /// All parameters in order; empty if no step has finished the gradient of each of them.
  [[nodiscard]] std::optional<std::vector<std::int64_t>> observed() const;

 private:
  [[nodiscard]] bool is_complete(const std::vector<std::int64_t>& fired) const;

  std::size_t parameters_;
  mutable std::mutex mutex_;
  std::vector<std::int64_t> this_step_;
  std::vector<std::int64_t> latest_complete_;
};

}  // namespace nanlocator::inline gradients_room
