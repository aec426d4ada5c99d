// Where versions of Torch differ for the room `watch` (src/tensor/torch_versions.hpp).
#pragma once

#include <torch/csrc/autograd/function_hook.h>

#include "tensor/torch_versions.hpp"

namespace nanlocator::inline watch_room {

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

}  // namespace nanlocator::inline watch_room
