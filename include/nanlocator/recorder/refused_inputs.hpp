// The tensors that an operator was given when it raised an error: torch.linalg.cholesky(a + b)
// refuses a NaN in a sum that no variable of the program holds.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <vector>

namespace nanlocator::inline recorder_room {

/// While one lives, keeps the floating-point tensors that were given to the operator of this thread
/// that the last error ended: the innermost one that was given any. Also keeps alive what running
/// operators are given.
class RefusedInputs {
 public:
  RefusedInputs();
  ~RefusedInputs();
  RefusedInputs(const RefusedInputs&) = delete;  // strictly nested
  RefusedInputs& operator=(const RefusedInputs&) = delete;

  /// Shared with the operators' caller.
  [[nodiscard]] const std::vector<at::Tensor>& tensors() const noexcept { return tensors_; }

  struct Call;  // a running operator

 private:
  std::vector<at::Tensor> tensors_;
  at::CallbackHandle callback_;
  RefusedInputs* outer_;
};

}  // namespace nanlocator::inline recorder_room
