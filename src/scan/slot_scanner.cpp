#include "nanlocator/scan/slot_scanner.hpp"

#include <algorithm>

namespace nanlocator {

bool ScanPlan::matches(std::span<const TensorView> tensors) const noexcept {
  return std::ranges::equal(tensors_, tensors);
}

}  // namespace nanlocator
