#include "scan/tensor_view_check.hpp"

#include <limits>
#include <string>

#include "nanlocator/error.hpp"

namespace nanlocator::inline scan_room {
namespace {

[[noreturn]] void refuse(const std::string& what) {
  throw UsageError("TensorView cannot be scanned: " + what);
}

}  // namespace

void check_view(const TensorView& view) {
  const std::size_t element_bytes = size_of(view.dtype);
  if (element_bytes == 0) {
    std::string known;
    for (int i = 0; i < kDTypeCount; ++i) {
      known += (i == 0 ? "" : ", ") + std::string(name_of(static_cast<DType>(i)));
    }
    throw UnsupportedError("TensorView has dtype number " +
                           std::to_string(static_cast<int>(view.dtype)) +
                           ", which cannot be scanned; these can: " + known);
  }
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  const std::int64_t most_elements = kMost / static_cast<std::int64_t>(element_bytes);
  if (view.numel < 0 || view.numel > most_elements) {
    refuse("numel is " + std::to_string(view.numel) + "; expected 0 or more, and at most " +
           std::to_string(most_elements));
  }
  if (view.data == nullptr && view.numel > 0) {
    refuse("data is null, but numel is " + std::to_string(view.numel) +
           "; give the address of the first element");
  }
  if (view.sizes.size() != view.strides.size()) {
    refuse(std::to_string(view.sizes.size()) + " sizes, but " +
           std::to_string(view.strides.size()) +
           " strides; give one of each per dimension, or neither for a contiguous tensor");
  }
  if (view.is_contiguous()) return;
  std::int64_t product = 1;
  std::int64_t last_offset = 0;  // of the element furthest from `data`
  for (std::size_t i = 0; i < view.sizes.size(); ++i) {
    const std::int64_t size = view.sizes[i];
    const std::int64_t stride = view.strides[i];
    const std::string dimension = "dimension " + std::to_string(i);
    if (size < 0) refuse(dimension + " has size " + std::to_string(size) + "; expected 0 or more");
    if (stride < 0) {
      refuse(dimension + " has stride " + std::to_string(stride) + "; expected 0 or more elements");
    }
    std::int64_t reach = 0;
    const bool overflows = __builtin_mul_overflow(product, size, &product) ||
                           (size > 0 && __builtin_mul_overflow(size - 1, stride, &reach)) ||
                           __builtin_add_overflow(last_offset, reach, &last_offset);
    if (overflows) refuse(dimension + " makes the tensor larger than 64-bit indices can address");
  }
  if (product != view.numel) {
    refuse("the sizes multiply to " + std::to_string(product) + ", but numel is " +
           std::to_string(view.numel));
  }
  if (view.numel > 0 && last_offset > most_elements / 2) {
    refuse("its last element lies " + std::to_string(last_offset) +
           " elements from the first, more than 64-bit addresses can reach");
  }
}

}  // namespace nanlocator::inline scan_room
