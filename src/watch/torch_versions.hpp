// Differences between Torch versions in the room `watch` (see src/tensor/torch_versions.hpp).
#pragma once

#include <torch/csrc/autograd/function_hook.h>

#include "tensor/torch_versions.hpp"

namespace nanlocator::inline watch_room {

/// A hook of autograd's nodes that compiled autograd omits: it runs none of our hooks and need not
/// know them. Before 2.7, compiled_args is not const.
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
