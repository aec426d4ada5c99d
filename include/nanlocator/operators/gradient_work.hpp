// Marks operators that work on gradients, for the trace: their births are no births of the loss.
#pragma once

namespace nanlocator::inline operators_room {

/// While one lives, the operators of its thread read or write gradients. May be nested.
class GradientWork {
 public:
  GradientWork() noexcept { ++depth(); }
  ~GradientWork() { --depth(); }
  GradientWork(const GradientWork&) = delete;  // strictly nested
  GradientWork& operator=(const GradientWork&) = delete;

  [[nodiscard]] static bool is_running() noexcept { return depth() > 0; }

 private:
  static int& depth() noexcept;
};

}  // namespace nanlocator::inline operators_room
