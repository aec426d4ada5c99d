// Does this process still compute? Notes the begin of every operator that PyTorch dispatches, on
// any thread: its time, and the name of the latest.
//
// One at a time per process. Costs about a microsecond per operator while it exists.
#pragma once

#include <ATen/record_function.h>

#include <chrono>
#include <string>

namespace nanlocator::inline operators_room {

class OperatorProgress {
 public:
  /// Counts as progress itself.
  OperatorProgress();
  ~OperatorProgress();
  OperatorProgress(const OperatorProgress&) = delete;  // one callback
  OperatorProgress& operator=(const OperatorProgress&) = delete;

  struct Latest {
    std::string op;  // "aten::mm", "c10d::allreduce_"; "" where none has begun yet
    std::chrono::steady_clock::time_point begun;
  };
  /// Any thread.
  [[nodiscard]] Latest latest() const;

 private:
  at::CallbackHandle callback_;
};

}  // namespace nanlocator::inline operators_room
