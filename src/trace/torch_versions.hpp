// Where versions of Torch differ for the room `trace` (src/tensor/torch_versions.hpp).
#pragma once

#include <torch/csrc/autograd/function_hook.h>

#include "tensor/torch_versions.hpp"

namespace nanlocator::inline trace_room {

/// A hook of autograd's nodes that compiled autograd leaves out: it calls none of ours, and need
/// not know of them. Before 2.7 its question is not const.
template <class Hook>
class LeftOutOfCompiledAutograd : public Hook {
 public:
#if NANLOCATOR_TORCH_BEFORE(2, 7)
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) override {}
#else
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}
#endif
};

/// From 2.10 on a call that goes to the __torch_dispatch__ of a tensor's class has a frame inside
/// it that says so: without a schema, of the name "PythonSubclass".
inline constexpr bool kPythonSubclassHasAFrame = !NANLOCATOR_TORCH_BEFORE(2, 10);

/// Whether this thread is one on which a ProcessGroupGloo runs its collectives. Before 2.11 the
/// thread has no name, and a backtrace is asked (0.1 ms).
[[nodiscard]] bool is_thread_of_gloo() noexcept;

}  // namespace nanlocator::inline trace_room
