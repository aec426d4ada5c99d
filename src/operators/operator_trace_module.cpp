// Apart from the rest, because torch/nn/module.h takes long to compile.
#include <torch/nn/module.h>

#include "nanlocator/operators/operator_trace.hpp"

namespace nanlocator::inline operators_room {

void OperatorTrace::declare(const torch::nn::Module& model) {
  for (const auto& parameter : model.named_parameters()) {
    declare(parameter.value(), DeclaredAs::parameter, parameter.key());
  }
  for (const auto& buffer : model.named_buffers()) {
    declare(buffer.value(), DeclaredAs::buffer, buffer.key());
  }
}

}  // namespace nanlocator::inline operators_room
