// Marks operators that work on gradients, for the trace: their births are no births of the loss.
#pragma once

#include <optional>

namespace nanlocator::inline operators_room {

/// While one lives, it is known whether the operators of its thread read or write gradients. The
/// innermost one counts.
class GradientWork {
 public:
  explicit GradientWork(bool is_on_gradients = true) noexcept;
  ~GradientWork();
  GradientWork(const GradientWork&) = delete;  // strictly nested
  GradientWork& operator=(const GradientWork&) = delete;

  /// Empty outside of any.
  [[nodiscard]] static std::optional<bool> current() noexcept;

 private:
  std::optional<bool> outer_;
};

}  // namespace nanlocator::inline operators_room
