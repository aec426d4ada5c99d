#include "nanlocator/scan/slot_scanner.hpp"

#include <algorithm>

namespace nanlocator::inline scan_room {

bool ScanPlan::matches(std::span<const TensorView> tensors) const noexcept {
  return std::ranges::equal(tensors_, tensors);
}

}  // namespace nanlocator::inline scan_room
