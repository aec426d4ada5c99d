// From the runs of a replay to what they mean. The rules and their limits are in docs/replay.md.
#pragma once

#include <vector>

#include "nanlocator/replay/replay.hpp"

namespace nanlocator {

/// What is known beside the report itself.
struct ConclusionEvidence {
  std::vector<TensorStats> inputs;  // of every floating-point tensor among the arguments
  bool is_custom = false;     // the operator is not PyTorch's: what it should compute is not known
  bool is_pointwise = false;  // each output element is of one element of each input
};

/// Fills `conclusion`, `is_bit_exact` and `sentences` from the recorded outputs and the runs.
void conclude(ReplayReport& report, const ConclusionEvidence& evidence);

}  // namespace nanlocator
