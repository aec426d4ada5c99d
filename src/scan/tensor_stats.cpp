#include "nanlocator/scan/tensor_stats.hpp"

namespace nanlocator::inline scan_room {

std::vector<std::int64_t> unravel_index(std::int64_t flat, const std::vector<std::int64_t>& shape) {
  std::vector<std::int64_t> index(shape.size(), 0);
  for (std::size_t axis = shape.size(); axis-- > 0;) {
    if (shape[axis] <= 0) continue;  // an empty tensor has no elements to index
    // An index beyond the shape keeps its excess in the first axis, so that it is not mistaken for
    // a valid one.
    index[axis] = axis == 0 ? flat : flat % shape[axis];
    flat /= shape[axis];
  }
  return index;
}

}  // namespace nanlocator::inline scan_room
