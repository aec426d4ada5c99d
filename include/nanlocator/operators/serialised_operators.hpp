// Serialises a pass: while one lives, the device is synchronised after each operator, as under
// CUDA_LAUNCH_BLOCKING but for all streams.
#pragma once

#include <ATen/record_function.h>

#include <functional>

namespace nanlocator::inline operators_room {

/// Waits for the CUDA device that is current on the operator's thread. Does nothing without one, or
/// if its stream is being captured into a graph.
void wait_for_current_device();

class SerialisedOperators {
 public:
  /// `wait` is called on the operator's thread. Only one instance calls at a time.
  explicit SerialisedOperators(std::function<void()> wait = &wait_for_current_device);
  ~SerialisedOperators();
  SerialisedOperators(const SerialisedOperators&) = delete;  // one callback
  SerialisedOperators& operator=(const SerialisedOperators&) = delete;

 private:
  at::CallbackHandle callback_;
};

}  // namespace nanlocator::inline operators_room
