// Finds the input element from which the first bad output element was computed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace nanlocator::inline replay_room {

struct FirstBad {
  std::vector<std::int64_t> index;  // in the output, row-major
  std::vector<std::int64_t> shape;  // the output's
  bool is_pointwise = false;        // the operator has at::Tag::pointwise
};

struct InputElement {
  std::vector<std::int64_t> index;
  double value = 0;
};

/// For a pointwise operator, the element that broadcasts to the first bad one; for others, the
/// first non-finite element. Empty if there is none. Of a complex element, its magnitude. `input`
/// has plain memory; runs on the caller's thread and waits for the device.
[[nodiscard]] std::optional<InputElement> element_at_first_bad(const at::Tensor& input,
                                                               const FirstBad& bad);

}  // namespace nanlocator::inline replay_room
