// Shows whether this process still computes: records the time and name of the latest operator that
// PyTorch dispatched, on any thread.
//
// One per process at a time. Costs about a microsecond per operator while it lives.
#pragma once

#include <ATen/record_function.h>

#include <chrono>
#include <string>

namespace nanlocator::inline operators_room {

class OperatorProgress {
 public:
  /// Counts as progress.
  OperatorProgress();
  ~OperatorProgress();
  OperatorProgress(const OperatorProgress&) = delete;  // one callback
  OperatorProgress& operator=(const OperatorProgress&) = delete;

  struct Latest {
    std::string op;  // "aten::mm", "c10d::allreduce_"; "" if none has begun
    std::chrono::steady_clock::time_point begun;
  };
  /// Any thread.
  [[nodiscard]] Latest latest() const;

 private:
  at::CallbackHandle callback_;
};

}  // namespace nanlocator::inline operators_room
