// A tensor and what it is called where it is reported: a parameter, a loss, a role in a module's
// call.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace nanlocator::inline tensor_room {

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

}  // namespace nanlocator::inline tensor_room
