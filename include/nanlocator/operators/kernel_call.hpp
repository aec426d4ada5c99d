// A call of code that computes without PyTorch's dispatcher: a function of an extension module, a
// launch of Triton's.
//
//     nanlocator::KernelCall call("flash_attn_2_cuda::fwd", {{"q", q}, {"k", k}, {"out", out}});
//     auto result = fwd(q, k, out);
//     call.end({result});
//
// The trace of the process scans the tensors before and after; what is bad afterwards, though
// everything before was finite, was born in this call. Where there is no trace it does nothing.
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

/// Calls are counted by name from here on, on all threads: a pass that is executed again gives a
/// call the number that it had. An OperatorTrace does so where its passes begin.
void count_kernel_calls_from_zero();

/// Calls of one thread are strictly nested. A device is waited for at both ends.
class KernelCall {
 public:
  /// `name`: "module::function". `arguments`: every tensor that the code may read or write.
  KernelCall(const std::string& name, std::vector<KernelArgument> arguments);
  /// Of a call that has not come to its `end` nothing is told.
  ~KernelCall();
  KernelCall(const KernelCall&) = delete;  // one entry in its thread's calls
  KernelCall& operator=(const KernelCall&) = delete;

  void end(std::span<const at::Tensor> results);

  /// Which call of this name it is, from 0.
  [[nodiscard]] std::int64_t number() const noexcept { return number_; }

 private:
  std::vector<KernelArgument> arguments_;
  std::int64_t number_ = 0;
  std::size_t depth_ = 0;  // of the thread's calls while this one runs; 0 where nobody scans
};

}  // namespace nanlocator::inline operators_room
