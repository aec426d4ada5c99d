// A call of code that computes without PyTorch's dispatcher: an extension module's function, a
// Triton launch.
//
//     nanlocator::KernelCall call("flash_attn_2_cuda::fwd", {{"q", q}, {"k", k}, {"out", out}});
//     auto result = fwd(q, k, out);
//     call.end({result});
//
// The process's trace scans the tensors before and after. If all were finite before, a value that
// is bad afterwards was born in this call. Does nothing without a trace.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace nanlocator::inline operators_room {

struct KernelArgument {
  std::string name;
  at::Tensor tensor;
};

/// Restarts the count of calls by name on all threads, so that a pass that is executed again gives
/// each call the same number. An OperatorTrace does so when its passes begin.
void count_kernel_calls_from_zero();

/// Calls on one thread are strictly nested. Both ends wait for the device.
class KernelCall {
 public:
  /// `name`: "module::function". `arguments`: every tensor that the code may read or write.
  KernelCall(const std::string& name, std::vector<KernelArgument> arguments);
  /// A call destroyed before `end` is not reported.
  ~KernelCall();
  KernelCall(const KernelCall&) = delete;  // one entry in its thread's calls
  KernelCall& operator=(const KernelCall&) = delete;

  void end(std::span<const at::Tensor> results);

  /// The call's index among those of this name, from 0.
  [[nodiscard]] std::int64_t number() const noexcept { return number_; }

 private:
  std::vector<KernelArgument> arguments_;
  std::int64_t number_ = 0;
  std::size_t depth_ = 0;  // of the thread, with this call; 0: nothing is scanned
};

}  // namespace nanlocator::inline operators_room
