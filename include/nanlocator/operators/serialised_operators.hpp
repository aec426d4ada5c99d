// A pass in which nothing overlaps: while one lives, each operator is waited for where it ends, as
// under CUDA_LAUNCH_BLOCKING, but on all streams of the device.
#pragma once

#include <ATen/record_function.h>

#include <functional>

namespace nanlocator::inline operators_room {

/// Waits for the CUDA device that is current on the thread of the operator; nothing where there is
/// none, or where its stream is being captured into a graph.
void wait_for_current_device();

class SerialisedOperators {
 public:
  /// `wait` is called on whichever thread an operator ran, by one instance at a time.
  explicit SerialisedOperators(std::function<void()> wait = &wait_for_current_device);
  ~SerialisedOperators();
  SerialisedOperators(const SerialisedOperators&) = delete;  // one callback
  SerialisedOperators& operator=(const SerialisedOperators&) = delete;

 private:
  at::CallbackHandle callback_;
};

}  // namespace nanlocator::inline operators_room
